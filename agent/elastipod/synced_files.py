"""Files and names that survive a power loss: the kernel writes neither to the disk until it is asked to."""

from __future__ import annotations

import os
from pathlib import Path


def create_synced(path: Path, text: str) -> None:
    """Create a small file whose content is on disk on return; its name may not be. Raises FileExistsError."""
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Sync the directory, so that a rename or a new name survives a power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
