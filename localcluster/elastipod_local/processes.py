"""Long-running processes that belong to a cluster, found and ended without ever hitting processes of others.

Every process of a cluster carries the environment variable TAG with the cluster's folder. A crash of the tool between
starting a process and writing it down therefore loses nothing: the tag is on the process itself.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastipod_local.errors import LocalClusterError
from elastipod_local.host import ends_with_parent, tool_environment

TAG = "ELASTIPOD_LOCAL_CLUSTER"


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that cannot be mistaken for a later one with the same pid: `started` is in clock ticks since boot."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        """Give the identity of a living process, None when there is none (a zombie counts as dead, once its threads have ended)."""
        fields = _stat(pid)
        if fields is None or (fields[0] in "ZX" and int(fields[17]) <= 1):
            return None
        return cls(pid, int(fields[19]))

    def is_alive(self) -> bool:
        return ProcessId.of(self.pid) == self

    def is_stopped(self) -> bool:
        """Tell whether a signal has stopped it: SIGSTOP takes effect a little after it was sent."""
        fields = _stat(self.pid)
        return fields is not None and fields[0] == "T" and int(fields[19]) == self.started


def _stat(pid: int) -> list[str] | None:
    """Give what /proc/<pid>/stat tells from the state on, None when there is no such process."""
    try:
        # The second field, the command in brackets, may itself hold spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def isolated(command: Sequence[str | Path]) -> list[str]:
    """Give the command made so that it runs with mounts and processes of its own, none of which outlasts it or us."""
    return ends_with_parent(["unshare", "--mount", "--pid", "--fork", "--kill-child", "--", *command])


def spawn(command: Sequence[str | Path], *, owner: Path, log: Path, env: Mapping[str, str] | None = None) -> ProcessId:
    """Start a process in a session of its own that outlives us, tagged with its cluster's folder, output to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stream:
        child = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            env=tool_environment({TAG: str(owner), **(env or {})}),
        )
    return adopt(child)


def adopt(child: "subprocess.Popen[bytes]") -> ProcessId:
    """Give the identity of a child and keep it: children that end are reaped by `reap`, not by the garbage collector."""
    _children.append(child)
    started = ProcessId.of(child.pid)
    # A child that ended at once is a zombie of ours until reaped, so its pid is not in use by anyone else.
    return started or ProcessId(child.pid, 0)


_children: "list[subprocess.Popen[bytes]]" = []


def reap() -> None:
    """Collect those of our children that have ended."""
    _children[:] = [child for child in _children if child.poll() is None]


def tagged(owner: Path) -> Iterator[int]:
    """Give the pids of all living processes that carry the tag of this cluster's folder."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and _carries_tag(int(entry.name), owner):
            yield int(entry.name)


def _carries_tag(pid: int, owner: Path) -> bool:
    wanted = f"{TAG}={owner}".encode()
    try:
        return wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def kill_if_tagged(pid: int, owner: Path, signum: signal.Signals = signal.SIGKILL) -> bool:
    """Signal a process only if it carries the tag, without a moment in which the pid could change hands."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not _carries_tag(pid, owner):
            return False
        signal.pidfd_send_signal(handle, signum)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)


def kill_all_tagged(owner: Path, *, deadline_s: float = 20) -> int:
    """End every process of the cluster; gives how many there were. Raises LocalClusterError when some do not end."""
    end = time.monotonic() + deadline_s
    seen: set[int] = set()
    while pids := list(tagged(owner)):
        seen.update(pid for pid in pids if kill_if_tagged(pid, owner))
        reap()
        if time.monotonic() > end:
            raise LocalClusterError(f"processes {pids} did not end within {deadline_s:g} s of SIGKILL")
        time.sleep(0.02)
    reap()
    return len(seen)
