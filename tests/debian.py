"""Programs of Debian or Ubuntu, taken from their packages. Nothing is installed: packages are unpacked into a folder of the cache."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S

from elastipod_local.paths import cache_dir


def unpacked(package: str, *, with_libraries: bool = False) -> Path:
    """Give the folder with the files of a package, fetched once. Skips the test where there is no apt-get.

    with_libraries: also of the packages that it needs and this machine lacks.
    """
    if shutil.which("apt-get") is None:
        pytest.skip(f"this machine has no apt-get; install {package} by other means to run this test")
    folder = cache_dir() / package
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        downloads = folder / "downloads"
        (downloads / "partial").mkdir(parents=True)
        if not _fetch(package, downloads, with_libraries=with_libraries):  # a new machine has no lists yet
            subprocess.run(["apt-get", "update", "-q"], check=True, capture_output=True, timeout=PATIENCE_S)
            assert _fetch(package, downloads, with_libraries=with_libraries), f"{package} cannot be fetched"
        for archive in downloads.glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(archive), str(folder / "package")], check=True, timeout=PATIENCE_S)
        shutil.rmtree(downloads)
        (folder / "complete").touch()
    return folder / "package"


def _fetch(package: str, folder: Path, *, with_libraries: bool) -> bool:
    if with_libraries:
        where = f"Dir::Cache::archives={folder}"
        command = [
            "apt-get",
            "install",
            "-q",
            "--yes",
            "--no-install-recommends",
            "--download-only",
            "-o",
            where,
            package,
        ]
    else:
        command = ["apt-get", "download", "-q", package]
    return subprocess.run(command, cwd=folder, capture_output=True, timeout=PATIENCE_S).returncode == 0
