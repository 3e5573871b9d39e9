"""Python packages put into a folder, by uv if it is installed and by pip otherwise."""

import importlib.util
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from elastipod_local.errors import LocalClusterError
from elastipod_local.host import OPEN_UMASK, find_program, run
from elastipod_local.registry_access import settings

INSTALL_DEADLINE_S = 1800


def install_into(folder: Path, requirements: Sequence[str | Path], *, python_version: str | None = None) -> None:
    """Install packages and what they depend on into a folder, readable by everybody.

    requirements: options that uv and pip share, and names, or '-r' and the path of a file.
    python_version: of the interpreter that will import them on this machine's kind of Linux, e.g. '3.11'; ours if None.
    Raises LocalClusterError when neither uv nor pip is there, CommandError when the installation fails.
    """
    if uv := _uv():
        command = [*uv, "pip", "install", "--quiet", "--python", sys.executable]
        if python_version:
            wheels = f"{platform.machine()}-manylinux_2_28"
            command += ["--python-version", python_version, "--python-platform", wheels, "--only-binary", ":all:"]
    elif importlib.util.find_spec("pip"):
        command = [sys.executable, "-m", "pip", "install", "--quiet"]
        if python_version:
            wheels = f"manylinux_2_28_{platform.machine()}"
            command += ["--python-version", python_version, "--platform", wheels, "--only-binary", ":all:"]
    else:
        raise LocalClusterError("neither uv nor pip is installed; `python3 -m ensurepip` brings pip")
    run(
        [*command, "--target", folder, *requirements],
        env=settings(os.environ, Path.home()),
        timeout_s=INSTALL_DEADLINE_S,
        umask=OPEN_UMASK,
    )


def _uv() -> list[str] | None:
    """Give the words that call uv, None without it."""
    if importlib.util.find_spec("uv"):
        return [sys.executable, "-m", "uv"]
    found = find_program("uv")
    return [str(found)] if found else None
