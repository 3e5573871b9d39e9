"""Why a generation cannot continue, and how it ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from elastipod.ipc.protocol import RestartMode
from elastipod_agent.clock import utc_now
from elastipod_agent.core.exits import Outcome, describe_status
from elastipod_agent.core.requests import StartRequest
from elastipod_agent.waiting import in_thread
from elastipod_agent.workers.failure import Failure, describe, shorten
from elastipod_agent.workers.group import WorkerGroup, WorkerProcess


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a generation cannot continue: the reason as /status shows it, and which worker failed how.

    restart_mode: what the worker that reported the fault asks for.
    """

    reason: str
    failure: Failure
    restart_mode: RestartMode | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEnd:
    """How a generation ended.

    is_late: a drain ran out of time. note: a sentence to show, or "". stuck: pids that SIGKILL did not end. successors: the
    start before their own with which new processes of this pod begin at once; None where they wait for the next one, or none come.
    """

    outcome: Outcome
    is_late: bool = False
    note: str = ""
    stuck: tuple[int, ...] = ()
    successors: StartRequest | None = None


LATE_DRAIN = "the workers did not drain in the time that the stop gave them and were killed"
LATE_CALLED_BACK = "the workers did not drain in the time that the stop gave them and were returned to the barrier"


def not_killed(pids: Iterable[int]) -> str:
    """Say that processes survive SIGKILL. They hold their devices, so this pod can run no other generation."""
    return f"processes {', '.join(map(str, pids))} cannot be killed; the node may need attention"


async def describe_worker_failure(group: WorkerGroup, worker: WorkerProcess) -> Failure:
    """Describe how a worker that has ended failed."""
    await group.catch_up(worker)
    assert worker.child.status is not None
    tell = partial(
        describe,
        global_rank=group.global_rank(worker),
        local_rank=worker.local_rank,
        status=worker.child.status,
        stderr_tail=await stderr_tail(worker),
        time=utc_now(),
    )
    try:
        return await in_thread(lambda: tell(error_file=worker.error_file))
    except TimeoutError:
        return tell(error_file=None)


async def stderr_tail(worker: WorkerProcess) -> str:
    """Give the end of a worker's standard error; "" if it is in a file whose storage hangs."""
    if worker.stderr_file is None:
        return worker.stderr_tail()
    try:
        return await in_thread(worker.stderr_tail)
    except TimeoutError:
        return ""


async def describe_early_end(group: WorkerGroup, worker: WorkerProcess) -> Failure:
    """Describe how a worker ended before it reached the barrier. Between two runs it has no global rank."""
    assert worker.child.status is not None
    before = "before it reached hyperpod_barrier()"
    who = f"local rank {worker.local_rank} ended with {describe_status(worker.child.status)} {before}"
    if worker.child.status == 0:
        return failure_without_worker(
            f"{who}; a script whose processes live over generations must call it before it trains"
        )
    failure = await describe_worker_failure(group, worker)
    _, newline, details = failure.message.partition("\n")
    return replace(failure, global_rank=None, message=shorten(who + newline + details))


def failure_without_worker(message: str) -> Failure:
    """Give a failure that no worker caused."""
    return Failure(
        global_rank=None, local_rank=None, exitcode=None, signal=None, message=shorten(message), time=utc_now()
    )
