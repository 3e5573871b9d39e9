"""Photographs of pages, taken by a headless Chromium from the package of the machine's Debian."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.debian import unpacked
from tests.patience import PATIENCE_S


def photograph(page: Path, picture: Path, width: int, height: int) -> None:
    """Write what a window of this size shows of a page on this machine, as a PNG."""
    program, environment = _chromium()
    profile = picture.with_suffix(".profile")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1")
    command = [program, *options, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
    command += [f"--screenshot={picture}", page.resolve().as_uri()]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    finally:
        shutil.rmtree(profile, ignore_errors=True)
    assert picture.is_file(), done.stderr[-2000:]


def _chromium() -> tuple[str, dict[str, str]]:
    found = shutil.which("chromium")
    if found is not None:
        return found, dict(os.environ)
    package = unpacked("chromium", with_libraries=True)
    libraries = sorted({str(library.parent) for library in package.glob("usr/lib/**/*.so*")})
    return str(package / "usr/lib/chromium/chromium"), {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(libraries)}
