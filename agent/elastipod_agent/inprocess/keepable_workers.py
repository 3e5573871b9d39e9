"""Workers that are started for one generation, and may turn out to be able to live through several."""

from __future__ import annotations

from dataclasses import replace

from elastipod_agent.core.exits import Outcome
from elastipod_agent.core.inprocess_restart import is_followed_by_new_processes, keeps_processes
from elastipod_agent.core.run_env import before_generation
from elastipod_agent.generation.faults import LATE_DRAIN, GenerationEnd, not_killed
from elastipod_agent.generation.generation_run import GenerationRun
from elastipod_agent.generation.process_workers import ProcessWorkers
from elastipod_agent.inprocess.kept_pool import KeptPool
from elastipod_agent.inprocess.pooled_workers import PooledWorkers
from elastipod_agent.inprocess.worker_pool import WorkerPool
from elastipod_agent.ipc.run_coordinator import RunCoordinator
from elastipod_agent.runtime import AgentRuntime


class KeepableWorkers:
    """Starts processes unless some were kept, and keeps them if each has announced that it can be kept. See `GenerationWorkers`.

    Until then, and in scripts that never announce it, the workers are those of `ProcessWorkers`; from then on those of
    `PooledWorkers`. What a stop asks for decides whether they live on.
    """

    def __init__(
        self, runtime: AgentRuntime, run: GenerationRun, *, kept: KeptPool, coordinator: RunCoordinator
    ) -> None:
        self._runtime = runtime
        self._run = run
        self._kept = kept
        self._coordinator = coordinator
        self._processes = ProcessWorkers(runtime, run)
        self._pooled: PooledWorkers | None = None
        self._pool: WorkerPool | None = None
        self._has_begun = False

    def begin(self) -> None:
        """Open the run to processes that are started for it, unless those of an earlier one are still there."""
        if self._kept.is_empty:
            self._begin_run()

    async def start(self) -> bool:
        """Release the kept workers into the run, or start new ones; False if the generation has already ended."""
        pool, run = self._kept.pool, self._run
        if pool is not None:
            self._pooled, self._pool = self._pooled_workers(pool), pool
            if await self._pooled.start() or not pool.is_closing or run.is_ending:
                return run.group is not None
            self._pooled.close()  # the workers ended before they could take the start
            self._pooled = None
        if not self._has_begun:
            self._kept.close()
            await self._kept.wait_until_ended()
            self._begin_run()
        if pids := self._kept.unkillable:
            run.fail("WorkerUnhealthy", not_killed(pids))
            return False
        return await self._processes.start()

    async def supervise(self) -> None:
        """Wait until a worker fails, all have ended, or a stop ends them."""
        if self._pooled is None:
            self._coordinator.on_keep = self._run.wake.set
            await self._processes.supervise(is_handed_over=self._are_kept)
            if not self._are_kept():
                return
            self._pooled = self._adopt()
        await self._pooled.supervise()

    async def finish(self) -> GenerationEnd:
        """Bring kept workers back to the barrier, or end the processes; and name the end."""
        pooled, pool = self._pooled, self._pool
        if pooled is None or pool is None:
            end = await self._processes.finish()
            return replace(end, stuck=(*end.stuck, *self._kept.unkillable))
        lives_on = self._lives_on(pooled, pool)
        if self._run.fault is not None and self._run.is_ending:
            self._kept.keeps_after_fault = lives_on
        if lives_on:
            end = await pooled.finish()
            if not pool.is_closing:
                return end
        return await self._end_processes(pooled, pool)

    def close(self) -> None:
        """Leave kept workers to the pool; remove the files of others."""
        self._coordinator.on_keep = lambda: None
        if self._pooled is None:
            self._processes.close()
        else:
            self._pooled.close()

    def _begin_run(self) -> None:
        self._has_begun = True
        start = self._run.start
        self._coordinator.begin_run(start, progress=start.progress, is_fresh=True)

    def _pooled_workers(self, pool: WorkerPool) -> PooledWorkers:
        return PooledWorkers(
            self._runtime.settings, self._run, pool=pool, coordinator=self._coordinator,
            begins_successors=self._kept.keeps_after_fault,
        )  # fmt: skip

    def _are_kept(self) -> bool:
        return self._run.fault is None and self._coordinator.kept_state is not None

    def _adopt(self) -> PooledWorkers:
        run, processes = self._run, self._processes
        assert run.group is not None
        self._pool = self._kept.adopt(run.group, processes.directory, run.start, processes.tap)
        pooled = self._pooled_workers(self._pool)
        pooled.take_over()
        return pooled

    def _lives_on(self, pooled: PooledWorkers, pool: WorkerPool) -> bool:
        """Tell whether the stop leaves the workers their processes. Those that have all exited with 0 wanted it so.

        Nobody waits for workers that drain late and whose pod goes.
        """
        run, outcome = self._run, pooled.outcome()
        if pool.is_closing or outcome is Outcome.COMPLETED or (pooled.is_late and pool.group.file.leaves()):
            return False
        if not run.is_ending:  # the event came through another pod, and the stop is on its way here
            return outcome is Outcome.DRAINED and bool(pool.group.living)
        if run.fault is None and not pool.group.living:
            return False
        return keeps_processes(run.restart_mode, is_graceful=run.is_draining)

    async def _end_processes(self, pooled: PooledWorkers, pool: WorkerPool) -> GenerationEnd:
        run = self._run
        await run.end_monitors()
        outcome, is_late = pooled.outcome(), pooled.is_late
        run.progress()  # the last one, before the worker file is closed
        pooled.close()
        self._kept.close()
        await self._kept.wait_until_ended()
        note = LATE_DRAIN if is_late else ""
        if outcome is Outcome.COMPLETED:
            note = await run.run_post_script()
        successors = None
        if is_followed_by_new_processes(outcome, run.restart_mode, leaves=run.leaves):
            successors = before_generation(run.start.nnodes, run.start.run_generation)
        return GenerationEnd(
            outcome=outcome, is_late=is_late, note=note, stuck=tuple(pool.stuck), successors=successors
        )
