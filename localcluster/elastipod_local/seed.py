"""Containerd folders that already hold a set of images, unpacked; nodes start from copies of them."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from elastipod_local.errors import LocalClusterError
from elastipod_local.host import delete_tree, run, tail_of, tool_environment, wait_until
from elastipod_local.oci import Image
from elastipod_local.processes import isolated

START_DEADLINE_S = 30
IMPORT_DEADLINE_S = 600
IMPORT_ATTEMPTS = 3


def make_seed(seed: Path, images: Iterable[Image], *, like: Path | None, notes: Mapping[str, str]) -> None:
    """Make a seed. like: an earlier one to start from, so that only layers that it lacks are imported.

    notes: small files that are put beside containerd's own.
    """
    draft = seed.with_name(seed.name + ".new")
    delete_tree(draft)
    draft.parent.mkdir(parents=True, exist_ok=True)
    if like is None:
        draft.mkdir()
    else:
        copy_seed(like, draft)
    for name, text in notes.items():
        (draft / name).unlink(missing_ok=True)  # it is a hard link to the other seed's
        (draft / name).write_text(text)
    # A socket's path has room for 107 letters, and caches may lie deep.
    with tempfile.TemporaryDirectory(prefix="elastipod-seed-") as scratch:
        _import_all(draft, Path(scratch), images)
    draft.rename(seed)


def copy_seed(seed: Path, folder: Path) -> None:
    """Copy a seed: hard links for what nobody changes, copies of the databases. The folder is replaced."""
    delete_tree(folder)
    if run(["cp", "--archive", "--link", seed, folder], check=False).returncode != 0:
        # The cache lies on another file system.
        delete_tree(folder)
        run(["cp", "--archive", seed, folder])
    for database in folder.glob("*/*.db"):  # of containerd's plugins; what lies deeper belongs to images
        copy = database.with_name(database.name + ".new")
        shutil.copy2(database, copy)
        copy.replace(database)


def present_layers(folder: Path) -> set[str]:
    """Give the digests of what a containerd folder holds."""
    blobs = folder / "io.containerd.content.v1.content" / "blobs" / "sha256"
    return {f"sha256:{blob.name}" for blob in blobs.iterdir()} if blobs.is_dir() else set()


def import_image(image: Image, folder: Path, tar: Path, command: Sequence[str]) -> None:
    """Import an image into the containerd that runs over `folder`; only layers that it lacks are carried over.

    tar: where the image is written; command: imports that file, wherever the containerd sees it.
    """
    for attempt in range(1, IMPORT_ATTEMPTS + 1):
        image.write(tar, present_layers(folder))
        # containerd may collect the unpacked layers of the image's predecessor just while it builds upon them: the
        # import fails then, and the next one unpacks them again, because the image is registered by now.
        done = run(command, timeout_s=IMPORT_DEADLINE_S, check=attempt == IMPORT_ATTEMPTS)
        if done.returncode == 0:
            return


def _import_all(root: Path, scratch: Path, images: Iterable[Image]) -> None:
    """Run a containerd of our own over the folder, import the images and end it."""
    socket, log, config = scratch / "containerd.sock", scratch / "containerd.log", scratch / "config.toml"
    config.write_text(
        f'version = 2\nroot = "{root}"\nstate = "{scratch}/state"\n'
        f'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n[grpc]\naddress = "{socket}"\n'
        f'[plugins."io.containerd.internal.v1.opt"]\npath = "{scratch}/opt"\n'
        # Nothing is collected while we import; nodes do that when they have the time.
        '[plugins."io.containerd.gc.v1.scheduler"]\nstartup_delay = "24h"\nmutation_threshold = 1000000\n'
    )
    with log.open("wb") as output:
        containerd = subprocess.Popen(
            isolated(["containerd", "--config", str(config)]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=tool_environment(),
        )
    ctr = ["ctr", "--address", str(socket), "--namespace", "k8s.io"]

    def answers() -> bool:
        if containerd.poll() is not None:
            raise LocalClusterError(f"containerd ended at its start: {tail_of(log)}")
        return socket.exists() and run([*ctr, "version"], check=False).returncode == 0

    with containerd:
        try:
            wait_until(answers, deadline_s=START_DEADLINE_S, what="containerd to answer")
            for image in images:
                import_image(image, root, scratch / "image.tar", [*ctr, "images", "import", f"{scratch}/image.tar"])
        finally:
            # All that it was told is in its databases by now; with its namespaces goes whatever it started.
            containerd.kill()
