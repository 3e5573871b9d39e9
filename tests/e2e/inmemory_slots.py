"""The pods of a test's job in memory, what may be planned for them, and how a job ended."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
from tests.e2e.torch_fork_server import ForkedTestWorker

from elastipod.worker_file import WorkerFile


@dataclass(frozen=True, slots=True)
class Resize:
    """A planned change: once a step is reached, the job goes to another size."""

    after_step: int
    size: int


@dataclass(slots=True)
class Slot:
    """One pod: its process, and what its agent knows of it. run: the last one that the process was released into. fault_run: the last one
    that it had to leave. has_called: it has called its agent. is_released: it may begin its run. has_left: it said at the barrier that it
    had left its run with all others.

    reported_at: how many steps its workers have reported, and when. reports_before: how many they had when the generation began.
    """

    number: int
    process: ForkedTestWorker
    file: WorkerFile
    run: int
    is_at_barrier: bool = False
    is_released: bool = False
    has_left: bool = False
    fault_run: int = 0
    num_processes: int = 1
    reported_at: tuple[int, float] = (0, 0.0)
    reports_before: int = 0
    has_called: bool = False


@dataclass(frozen=True, slots=True)
class NextRun:
    """The run that follows a drain, as agents are told of it: each begins it by itself. starts: by member, the environment of its rank."""

    run: int
    starts: Mapping[int, dict[str, Any]]


@dataclass(slots=True)
class Ended:
    """How a job ended.

    lost_copies: generations that began when no process was left that had trained. planned: the generations that nothing but a planned
    change led to. most_dead: how many processes that had trained died before a generation had made two steps (by then whoever is
    to hold a copy does), the most there ever were.
    """

    generations: int
    processes: int
    members: tuple[int, ...]
    faults: int = 0
    lost_copies: int = 0
    is_complete: bool = False
    planned: frozenset[int] = frozenset()
    most_dead: int = 0
    begun_by_agents: frozenset[int] = frozenset()
    log: list[str] = field(default_factory=list)


def kill(slot: Slot) -> None:
    with suppress(ProcessLookupError):  # it has ended just now, and the fork server has not said so yet
        slot.process.kill()


def is_stopped(process: ForkedTestWorker) -> bool:
    """Whether it neither runs nor has ended."""
    try:
        return process.poll() is None and psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False
