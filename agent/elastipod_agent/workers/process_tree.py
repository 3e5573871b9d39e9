"""Finds and ends all descendants of workers, also those that left the process group or lost their parent.

A process belongs to the workers if it descends from the agent (orphans do too, see `linux.adopt_orphans`) and is in a worker's session or
has the generation's worker file in its environment. What descends from a worker when that is ended belongs to it in any case. Processes
that a pre-train script left running on purpose, or that the container started before the agent, do not belong to them.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from elastipod_agent.workers.process_table import (
    PROC,
    Process,
    command_line,
    descendants,
    has_in_environment,
    name_of,
    snapshot,
)
from elastipod_agent.workers.reaper import Reaper

_POLL_S = 0.05
_SHM_MANAGER = b"torch_shm_manager"
_EXEC_S = 0.5  # beyond the time limit, for processes that nothing can be told of yet
_FREEING_S = 2.0  # how long processes that free what workers have left may take, once the workers are gone


def members(sessions: Collection[int], cookie: str, proc: Path = PROC) -> list[int]:
    """Give the pids of the workers' living processes. cookie: a ``NAME=value`` in every worker's environment."""
    return _members_in(snapshot(proc), sessions, cookie, proc)[0]


def _members_in(
    processes: dict[int, Process], sessions: Collection[int], cookie: str, proc: Path = PROC
) -> tuple[list[int], bool]:
    """Give the pids of the workers' living processes, and whether it is known of all others that they are none."""
    below = [process for process in descendants(processes, os.getpid()) if not process.is_dead]
    belongs = {process.pid: _belongs(process, sessions, cookie, proc) for process in below}
    return [pid for pid, does in belongs.items() if does], None not in belongs.values()


def _belongs(process: Process, sessions: Collection[int], cookie: str, proc: Path) -> bool | None:
    """Tell whether it is a worker, perhaps just forked and without its own session, or shows that it came from one.

    None while nothing can be told of it, in the middle of an exec.
    """
    is_inside = process.pid in sessions or process.session in sessions
    return is_inside or has_in_environment(process.pid, cookie, proc)


def family(workers: Collection[int], proc: Path = PROC) -> set[int]:
    """Give the pids of workers and their descendants, and the sessions that these have made.

    A descendant may have left the worker's session and environment (`env -i setsid ...`): only while its ancestors live is it known
    whose it is. A session that another process leads, such as the agent's own, is left out.
    """
    return _family_in(snapshot(proc), workers)


def _family_in(processes: dict[int, Process], workers: Collection[int]) -> set[int]:
    found = [one for worker in workers for one in descendants(processes, worker)]
    pids = {*workers, *(one.pid for one in found)}
    others = {os.getsid(0), *(processes.keys() - pids)}
    return pids | ({one.session for one in found} - others)


def may_free_resources(pid: int, proc: Path = PROC) -> bool:
    """Tell by its name whether it is worth to ask `frees_resources` of a process."""
    name = name_of(pid, proc)
    return b"python" in name or name == _SHM_MANAGER[:15]


def frees_resources(command: bytes) -> bool:
    """Tell by its command line whether a process frees what workers have left, such as shared memory, once they have ended.

    These are torch's manager of shared memory and the resource trackers of multiprocessing and of its forks. Each ends by itself when
    the last process that holds its pipe or socket is gone; if it is killed with the workers, their segments stay in /dev/shm.
    """
    program = command.partition(b"\0")[0]
    return os.path.basename(program) == _SHM_MANAGER or b".resource_tracker import main" in command


async def end_all(reaper: Reaper, sessions: Collection[int], cookie: str, timeout_s: float) -> list[int]:
    """Kill every process of the workers and wait until all are gone; gives the pids that SIGKILL did not end in time.

    What frees the resources of the others ends after them by itself, and is killed only if it does not.

    Only a second empty result counts: a process whose parent was reaped during a snapshot is missing in the tree of that snapshot, and is
    below the agent in the next. The first of them shows the family too: the end is waited for with each look at /proc. Nor does a result
    count while a process is in the middle of an exec, unless that lasts until the deadline.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    spared_until = deadline - timeout_s / 4  # time that SIGKILL may take afterwards
    processes = snapshot()
    kin = _family_in(processes, sessions)
    killed: set[int] = set()  # whatever the time limit: nothing may live on beside what is started next
    while True:
        found, is_known = _members_in(processes, kin, cookie)
        if not found and is_known:
            found, is_known = _members_in(snapshot(), kin, cookie)
        now = loop.time()
        is_complete = killed.issuperset(found) and is_known
        if (not found and is_known) or (now >= deadline and (is_complete or now >= deadline + _EXEC_S)):
            return found
        workers = [pid for pid in found if pid in sessions]
        _kill(workers)  # without a look at their command lines, which may wait for one that is stuck in the kernel
        others = [pid for pid in found if pid not in sessions]
        if not workers:
            spared_until = min(spared_until, now + _FREEING_S)
        ended = [pid for pid in others if now >= spared_until or not _is_spared(pid)]
        _kill(ended)
        killed.update(workers, ended)
        await reaper.next_exit(_POLL_S)
        processes = snapshot()


def _is_spared(pid: int) -> bool:
    return may_free_resources(pid) and frees_resources(command_line(pid))


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
