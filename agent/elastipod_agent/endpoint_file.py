"""How a person's command inside the pod finds the agent: a small file in the agent's own private folder.

The folder is made anew by every agent (in memory where possible) and readable by its user only. A living agent holds a
lock on its file, which says the same in every process namespace; a folder without one was left by an agent that was killed,
and is removed by the next.
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
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 a private folder is made in it


@dataclass(frozen=True, slots=True)
class AgentEndpoint:
    """One agent on this host. host: as it was told to listen, perhaps on all addresses."""

    pid: int
    host: str
    port: int
    job: str

    @property
    def address(self) -> str:
        """The address under which it is reached from here."""
        wild = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 what stands for all addresses
        return wild.get(self.host, self.host)


def fast_directory() -> str | None:
    """Give the place for the agent's folder: memory rather than a disk; None = the system's for temporary files."""
    return str(_SHARED_MEMORY) if os.access(_SHARED_MEMORY, os.W_OK | os.X_OK) else None


def publish_endpoint(folder: Path, presence: AgentEndpoint) -> TextIO:
    """Write the file into the agent's own folder; gives it, to be kept open as long as the agent lives. Raises OSError."""
    draft = folder / f"{_FILE}.new"
    file = open(draft, "w", encoding="utf-8")  # noqa: SIM115 it is the lock's
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
    """Give the agents of this user that run here, in no order."""
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
    """Tell whether a living agent holds the file. Raises OSError when it cannot be opened."""
    with open(path, encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
