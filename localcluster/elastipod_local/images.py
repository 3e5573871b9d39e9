"""The images of a cluster and the disks that nodes start from.

Nodes do not import images: they are imported once, into a containerd folder of their own (a seed), and each node gets
a copy of the seed made of hard links in a fraction of a second.
"""

import hashlib
import json
import platform
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from elastipod_local import dockerfile
from elastipod_local.bases import DEBIAN, bootstrap_debian, compile_pause
from elastipod_local.buildcontext import BuildContext
from elastipod_local.buildstep import SOURCE
from elastipod_local.host import Progress, delete_tree, is_open, quiet
from elastipod_local.imagebuild import Built, ImageBuilder
from elastipod_local.node_config import PAUSE_IMAGE, SITE_PACKAGES_MOUNT
from elastipod_local.oci import Blob, Image, ImageConfig, pack_layer
from elastipod_local.paths import PACKAGE, cache_dir, checkout_root
from elastipod_local.pip import install_into
from elastipod_local.registry_access import registry_access
from elastipod_local.seed import make_seed, present_layers
from elastipod_local.state import BUILD_WAIT_S, exclusive

# Stage of the Dockerfile -> full name of the image. Short names like elastipod/train:dev mean the same to Kubernetes.
STAGES = {"operator": "docker.io/elastipod/operator:dev", "train": "docker.io/elastipod/train:dev"}
# The environment is mounted into every container, so that no node unpacks gigabytes.
BUILD_ARGUMENTS = {"TRAIN_REQUIREMENTS": ""}
IMAGE_PYTHON = "3.11"  # Debian bookworm's
KEPT = 3  # seeds, and environments
MOST_LAYERS = 100  # in a seed, configurations and manifests included
SITE_PACKAGES_NOTE = "elastipod-site-packages"
# Not `python3 -m compileall`: packages carry files of other Python versions that do not compile, and its exit code is about those.
_COMPILE_ALL = f"compile_dir('{SOURCE}', quiet=2, workers=0, stripdir='{SOURCE}', prependdir='{SITE_PACKAGES_MOUNT}')"
COMPILE = ("python3", "-c", f"import compileall; compileall.{_COMPILE_ALL}")


@dataclass(frozen=True, slots=True)
class ImageSet:
    """The images of one state of the checkout.

    key: changes exactly when an image does. seed: containerd folder that holds them. site_packages: the environment
    that every container finds at SITE_PACKAGES_MOUNT.
    """

    key: str
    images: tuple[Image, ...]
    seed: Path
    site_packages: Path

    @classmethod
    def of(cls, images: Iterable[Image], site_packages: Path) -> "ImageSet":
        found = tuple(images)
        named = sorted(f"{image.name} {image.digest}" for image in found)
        key = hashlib.sha256(json.dumps([*named, str(site_packages)]).encode()).hexdigest()[:16]
        return cls(key, found, seeds_dir() / key, site_packages)


def seeds_dir() -> Path:
    return cache_dir() / "images" / "seeds"


def has_built_images() -> bool:
    """Tell whether images of any state of the checkout were built here: most of their layers stay the same."""
    return bool(_by_age(seeds_dir()))


def stored_seed(key: str) -> tuple[Path, Path] | None:
    """Give seed and site-packages of an earlier image set, None when they were deleted as too old."""
    seed = seeds_dir() / key
    try:
        return seed, Path((seed / SITE_PACKAGES_NOTE).read_text())
    except FileNotFoundError:
        return None


def ensure_images(progress: Progress = quiet) -> ImageSet:
    """Build what is missing or out of date and give the images of the checkout as it is now.

    Needs root and the Debian packages. Raises LocalClusterError naming the step of the Dockerfile that failed.
    """
    folder = cache_dir() / "images"
    with built_stages(STAGES, progress) as (builder, built):
        site_packages = _site_packages(builder, built["train"], progress)
        images = [_pause(folder), *(builder.image(built[stage], name) for stage, name in STAGES.items())]
        found = ImageSet.of(images, site_packages)
        if not found.seed.exists():
            progress("  importing the images (once for all nodes)")
            make_seed(found.seed, images, like=_seed_to_start_from(), notes={SITE_PACKAGES_NOTE: str(site_packages)})
        for used in (found.seed, site_packages):
            used.touch()
            _keep_newest(used.parent)
        builder.delete_unused()
    return found


@contextmanager
def built_stages(targets: Iterable[str], progress: Progress = quiet) -> Iterator[tuple[ImageBuilder, dict[str, Built]]]:
    """Build some stages of the Dockerfile; gives them with their builder, which can run programs of them. Needs root."""
    folder = cache_dir() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / "lock", wait_s=BUILD_WAIT_S, progress=progress):
        _clear_drafts(folder)
        builder = _builder(folder, progress)
        yield builder, builder.build(dockerfile.parse((checkout_root() / "Dockerfile").read_text()), targets)


def _builder(folder: Path, progress: Progress) -> ImageBuilder:
    bases = {DEBIAN: lambda: bootstrap_debian(folder, progress)}
    return ImageBuilder(
        folder, BuildContext(checkout_root()), bases, registry_access(folder), BUILD_ARGUMENTS, progress
    )


def _pause(folder: Path) -> Image:
    source = (PACKAGE / "c" / "pause.c").read_bytes()
    layer = folder / f"pause-{hashlib.sha256(source + platform.machine().encode()).hexdigest()[:24]}.tar"
    if not layer.exists() or not _holds_open(layer, "pause"):
        pack_layer(compile_pause(folder), layer)
    return Image(PAUSE_IMAGE, (Blob.of(layer),), ImageConfig(entrypoint=("/pause",)))


def _holds_open(layer: Path, name: str) -> bool:
    """Tell whether a file in a packed layer is for everybody; earlier versions left that to our umask."""
    with tarfile.open(layer) as tar:
        return tar.getmember(name).mode & 0o005 == 0o005


def _site_packages(builder: ImageBuilder, train: Built, progress: Progress) -> Path:
    """Give the folder with PyTorch and its dependencies for the train image's Python; recreated when the requirements change."""
    requirements = checkout_root() / "requirements" / "train.txt"
    key = hashlib.sha256(requirements.read_bytes() + f"{IMAGE_PYTHON} {COMPILE}".encode()).hexdigest()[:16]
    target = cache_dir() / "site-packages" / key
    if target.exists() and not is_open(target):
        delete_tree(target)  # made under a strict umask by an earlier version
    if not target.exists():
        progress(f"installing PyTorch for the nodes into {target} (once)")
        draft = target.with_name(f"{key}.new")
        delete_tree(draft)
        install_into(draft, ["-r", requirements], python_version=IMAGE_PYTHON)
        progress("  compiling its bytecode (containers see it read-only and could not keep theirs)")
        builder.run_on(train, COMPILE, draft, "compiling PyTorch's bytecode")
        draft.rename(target)
    return target


def _clear_drafts(folder: Path) -> None:
    """Delete what builds that were killed have left; the lock is ours, so none is running."""
    for pattern in ("layers/new-*", "layers/context-*", "seeds/*.new"):
        for draft in folder.glob(pattern):
            delete_tree(draft)


def _by_age(folder: Path) -> list[Path]:
    """Give the entries of a folder, the last used first."""
    if not folder.is_dir():
        return []
    return sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)


def _seed_to_start_from() -> Path | None:
    """Give the last seed, unless so many states of the checkout have piled up in it that a fresh one is due."""
    last = next(iter(_by_age(seeds_dir())), None)
    return last if last and len(present_layers(last)) <= MOST_LAYERS else None


def _keep_newest(folder: Path) -> None:
    """Delete all but the last used; nodes that run keep their hard links to what is deleted."""
    for old in _by_age(folder)[KEPT:]:
        delete_tree(old)
