"""Holds: after a step that a test names, all ranks wait until it has done what it does there, however long that takes."""

from __future__ import annotations

import time
from pathlib import Path


def hold(folder: Path, step: int) -> Path:
    """Have the ranks of a job wait after a step; gives the file that they wait for the end of."""
    file = _file(folder, step)
    file.touch()
    return file


def hold_after(step: int, folder: Path) -> None:
    """Wait, in a rank, where the test holds the job after this step."""
    while _file(folder, step).exists():
        time.sleep(0.005)


def _file(folder: Path, step: int) -> Path:
    return folder / f"hold-{step}"
