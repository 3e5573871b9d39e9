"""Holds workers that live through generations: those of a generation that all announced it, and those that are prepared for their first."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from elastipod_agent.core.inprocess_restart import WorkerPreparation, preparation_now
from elastipod_agent.core.requests import StartRequest
from elastipod_agent.generation.faults import not_killed
from elastipod_agent.inprocess.worker_pool import WorkerPool
from elastipod_agent.ipc.run_coordinator import RunCoordinator
from elastipod_agent.runtime import AgentRuntime
from elastipod_agent.workers import process_table
from elastipod_agent.workers.failure import describe_error
from elastipod_agent.workers.group import WorkerGroup
from elastipod_agent.workers.output_tap import OutputTap

# How long a worker may take to come back to the barrier after a fault elsewhere: one step, and the end of its process groups.
RETURN_LIMIT_S = 30.0


class KeptPool:
    """At most one pool of kept workers. Belongs to the event loop's thread.

    guard: runs a part of the agent's own work. on_change: called when the pool begins or has ended, with it or None. on_preparation:
    called with how far prepared workers are, until their first run; None when they were told to end. keeps_after_fault: whether the
    stop after the last fault left the workers their processes, as the next one probably will.
    """

    def __init__(
        self,
        runtime: AgentRuntime,
        coordinator: RunCoordinator,
        guard: Callable[[Coroutine[Any, Any, None]], Coroutine[Any, Any, None]],
        on_change: Callable[[WorkerPool | None], None],
        on_preparation: Callable[[WorkerPreparation | None], None],
    ) -> None:
        self.task: asyncio.Task[None] | None = None
        self.keeps_after_fault = True
        self._runtime = runtime
        self._coordinator = coordinator
        self._guard = guard
        self._on_change = on_change
        self._on_preparation = on_preparation
        self._preparation = WorkerPreparation.BEGUN
        self._num_prepared = 0
        self._pool: WorkerPool | None = None
        self._unkillable: tuple[int, ...] = ()

    @property
    def pool(self) -> WorkerPool | None:
        """The kept workers; None if there are none, or their processes are about to end."""
        return None if self._pool is None or self._pool.is_closing else self._pool

    @property
    def unkillable(self) -> tuple[int, ...]:
        """The pids of former kept workers that SIGKILL did not end, as far as they still live: nothing may be started beside them."""
        self._unkillable = process_table.living_below(os.getpid(), self._unkillable)
        return self._unkillable

    @property
    def is_empty(self) -> bool:
        """True if no process of kept workers is left."""
        return self._pool is None

    def adopt(self, group: WorkerGroup, directory: Path, start: StartRequest, tap: OutputTap | None) -> WorkerPool:
        """Keep the workers of a run that is under way. tap: what reads the output of local rank 0; None if nothing can."""
        assert self._pool is None
        pool = WorkerPool(
            self._runtime,
            self._coordinator,
            group=group,
            directory=directory,
            start=start,
            tap=tap or OutputTap(),
            return_limit_s=self._return_limit_s,
            is_standing=False,
        )
        self._begin(pool)
        return pool

    def prepare(self, start: StartRequest) -> None:
        """Start workers ahead of their first run, for which there is no rank yet."""
        assert self._pool is None
        if pids := self.unkillable:
            self._runtime.log.warning("workers cannot be prepared", why=not_killed(pids))
            self._on_preparation(WorkerPreparation.FAILED)
            return
        self._num_prepared += 1
        directory = self._runtime.root / f"prepared-{self._num_prepared}"
        try:
            pool = WorkerPool.prepared(self._runtime, self._coordinator, directory, start, self._return_limit_s)
        except OSError as error:
            self._runtime.log.warning("workers cannot be prepared", why=describe_error(error))
            self._on_preparation(WorkerPreparation.FAILED)
            return
        pool.on_change = lambda: self._follow(pool)
        self._begin(pool)
        self._preparation = WorkerPreparation.BEGUN
        self._on_preparation(self._preparation)

    def close(self) -> None:
        """Let the processes end; `wait_until_ended` waits for it."""
        if self._pool is not None:
            self._pool.close()

    async def wait_until_ended(self) -> None:
        """Wait for the end of the processes, which is limited by the time that a process has to end."""
        if self.task is not None:
            await asyncio.wait([self.task])

    @property
    def _return_limit_s(self) -> float:
        return min(RETURN_LIMIT_S, self._runtime.settings.inprocess_timeout_s)

    def _begin(self, pool: WorkerPool) -> None:
        self._pool = pool
        self.task = asyncio.ensure_future(self._guard(self._run(pool)))
        self._on_change(pool)

    def _follow(self, pool: WorkerPool) -> None:
        if pool.is_closing:
            return
        self._preparation = preparation_now(
            self._preparation, is_gathered=pool.is_gathered, has_all_processes=pool.has_all_processes
        )
        self._on_preparation(self._preparation)

    async def _run(self, pool: WorkerPool) -> None:
        try:
            await pool.run()
        finally:
            self._pool = None
            self._unkillable = (*self._unkillable, *pool.stuck)
            if pool.is_preparing:
                self._on_preparation(WorkerPreparation.FAILED if pool.has_failed else None)
            self._coordinator.on_position_change = lambda: None
            self._coordinator.forget_kept_state()
            self._on_change(None)
