"""A small file by which `elastipod agent status` finds the agent of its pod.

Each agent creates a private folder for it, in memory where possible and readable by its user only. A living agent holds a lock on the
file, which every process namespace sees. A folder without a lock was left by an agent that was killed; the next agent removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

FOLDER_PREFIX = "elastipod-"
_FILE = "agent.json"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # a private folder is created in it


@dataclass(frozen=True, slots=True)
class AgentEndpoint:
    """One agent on this host. host: the address that it listens on, which may stand for all addresses."""

    pid: int
    host: str
    port: int
    job: str

    @property
    def address(self) -> str:
        """The address at which this host reaches it."""
        wild = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # stand for all addresses
        return wild.get(self.host, self.host)


def fast_directory() -> str | None:
    """Give the directory for the agent's folder, in memory; None stands for the system's directory for temporary files."""
    return str(_SHARED_MEMORY) if os.access(_SHARED_MEMORY, os.W_OK | os.X_OK) else None


def publish_endpoint(folder: Path, presence: AgentEndpoint) -> TextIO:
    """Write the file into the agent's folder and lock it; the caller keeps it open as long as the agent lives. Raises OSError."""
    draft = folder / f"{_FILE}.new"
    file = open(draft, "w", encoding="utf-8")  # noqa: SIM115  # holds the lock
    fcntl.flock(file, fcntl.LOCK_EX)
    json.dump(asdict(presence), file)
    file.flush()
    draft.rename(folder / _FILE)
    return file


def remove_stale_folders(place: Path) -> None:
    """Remove the folders of agents that were killed."""
    for path in place.glob(f"{FOLDER_PREFIX}*/{_FILE}"):
        with suppress(OSError):
            if not _is_locked(path):
                shutil.rmtree(path.parent, ignore_errors=True)


def find_agents(places: Sequence[Path] | None = None) -> list[AgentEndpoint]:
    """Give the agents of this user on this host, in no particular order."""
    if places is None:
        places = list(dict.fromkeys((_SHARED_MEMORY, Path(tempfile.gettempdir()))))
    paths = [path for place in places for path in place.glob(f"{FOLDER_PREFIX}*/{_FILE}")]
    return [one for path in paths if (one := _read(path)) is not None]


def _read(path: Path) -> AgentEndpoint | None:
    with suppress(OSError, ValueError, TypeError, KeyError):
        if not _is_locked(path):
            return None
        fields = json.loads(path.read_text("utf-8"))
        return AgentEndpoint(int(fields["pid"]), str(fields["host"]), int(fields["port"]), str(fields["job"]))
    return None


def _is_locked(path: Path) -> bool:
    """Tell whether a living agent holds the lock. Raises OSError if the file cannot be opened."""
    with open(path, encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
