"""Environments of peers: other people's packages that tests and benchmarks run beside ours, each made once and kept.

    deepspeed  DeepSpeed beside torch
    hyp        SageMaker HyperPod's own command line and SDK, sagemaker-hyperpod, which reads our jobs
    original   the original agent, hyperpod-elastic-agent, beside the newest torch that it takes (2.11). Our own packages
               do not belong in there: the two share import names and the command hyperpodrun
    s3         a client of S3, s3fs, for checkpoints in object stores (its site-packages behind our own)
    streaming  MosaicML's StreamingDataset beside torch (PYTHONPATH=agent)
    torchtitan torchtitan beside torch
    trackers   MLflow and W&B's client, without torch (PYTHONPATH=agent)
    torch211   torch 2.11 and numpy alone, a second torch for our agent and library (PYTHONPATH=agent)

They are pinned with hashes in requirements/peer-<name>.txt (made by `make requirements`) and kept in the cache that also
holds what the local cluster builds. On the file system of uv's own cache one costs some seconds and next to no disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elastipod_local.images import IMAGE_PYTHON
from elastipod_local.paths import cache_dir
from elastipod_local.pip import install_into
from elastipod_local.registry_access import settings

ROOT = Path(__file__).resolve().parents[1]
INSTALL_DEADLINE_S = 1800
UNUSED_DAYS = 14
_COMPLETE = ".complete"  # written last, so what has none is half made


def peer_python(name: str) -> Path:
    """Give the interpreter of a peer's environment, made on first use and anew when its requirements changed.

    Safe to call from several processes at once. Raises FileNotFoundError for an unknown name, RuntimeError with uv's
    words when the packages cannot be installed.
    """
    version = "{}.{}".format(*sys.version_info)
    return _kept(name, f"venv {version} {sys.base_prefix}", _make_environment) / "bin" / "python"


def peer_packages(name: str) -> Path:
    """Give a folder of the same packages for the Python of the local cluster's training image, to be mounted into pods."""
    if "{}.{}".format(*sys.version_info) == IMAGE_PYTHON:
        return peer_python(name).parents[1] / "lib" / f"python{IMAGE_PYTHON}" / "site-packages"
    return _kept(name, f"packages {IMAGE_PYTHON}", _make_packages)


def peer_requirements(name: str) -> Path:
    """Give the pinned requirements of a peer. Raises FileNotFoundError for an unknown one."""
    path = ROOT / "requirements" / f"peer-{name}.txt"
    if not path.is_file():
        known = sorted(p.stem.removeprefix("peer-") for p in path.parent.glob("peer-*.txt"))
        raise FileNotFoundError(f"there is no peer {name!r}; known are {', '.join(known)}")
    return path


def _kept(name: str, variant: str, make: Callable[[Path, Path], None]) -> Path:
    """Give the folder of one variant, made by make(requirements, folder) where no complete one is there."""
    requirements = peer_requirements(name)
    key = hashlib.sha256(requirements.read_bytes() + variant.encode()).hexdigest()[:16]
    peers = cache_dir() / "peers"
    peers.mkdir(exist_ok=True)
    folder = peers / f"{name}-{key}"
    marker = folder / _COMPLETE
    with _locked(peers / f"{name}.lock", name):
        if not marker.is_file():
            began = time.monotonic()
            _say(f"making the environment of peer {name!r} in {folder} (once)")
            shutil.rmtree(folder, ignore_errors=True)
            make(requirements, folder)
            _say(f"peer {name!r} is ready after {time.monotonic() - began:.0f} s")
        marker.touch()
        _delete_unused(peers, name)
    return folder


def _make_environment(requirements: Path, folder: Path) -> None:
    # Bytecode now: many processes import these packages at the same time, and pods see them read-only.
    _uv("venv", "--python", sys.executable, str(folder))
    python = str(folder / "bin" / "python")
    _uv("pip", "sync", "--python", python, "--require-hashes", "--compile-bytecode", str(requirements))


def _make_packages(requirements: Path, folder: Path) -> None:
    install_into(folder, ["--require-hashes", "-r", requirements], python_version=IMAGE_PYTHON)


def _uv(*arguments: str) -> None:
    # uv does not read pip's settings of index and certificates; `settings` hands them on.
    environ = {"UV_HTTP_TIMEOUT": "180", **os.environ, **settings(os.environ, Path.home())}
    command = [str(Path(sys.executable).with_name("uv")), *arguments, "--quiet"]
    done = subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S
    )
    if done.returncode != 0:
        raise RuntimeError(f"`uv {' '.join(arguments)}` failed: {done.stderr.strip()[-2000:]}")


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Hold a lock among processes; the kernel gives it back when its holder dies."""
    with path.open("w") as lock:
        for delay_s in (0.1, 0.4, 1.5):  # whoever only looks holds it for an instant
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(delay_s)
        else:
            _say(f"waiting for another process that makes peer {name!r}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _delete_unused(peers: Path, name: str) -> None:
    """Delete the environments of a peer that nobody has asked for in a long time."""
    for marker in peers.glob(f"{name}-*/{_COMPLETE}"):
        if time.time() - marker.stat().st_mtime > UNUSED_DAYS * 86400:
            shutil.rmtree(marker.parent, ignore_errors=True)


def _say(text: str) -> None:
    print(f"peers: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(peer_python(*sys.argv[1:]))
