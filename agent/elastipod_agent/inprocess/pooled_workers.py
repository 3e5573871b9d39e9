"""Workers that live over generations: released from the barrier into one generation, and brought back to the barrier after it."""

from __future__ import annotations

import time

from elastipod_agent.core.exits import Outcome, StopMode, WorkerExit, classify
from elastipod_agent.core.inprocess_restart import (
    RankInRun,
    RankPosition,
    RunState,
    parse_restart_mode,
    ranks_to_replace,
    run_state,
)
from elastipod_agent.generation.faults import LATE_CALLED_BACK, GenerationEnd
from elastipod_agent.generation.generation_run import GenerationRun
from elastipod_agent.inprocess.worker_pool import WorkerPool
from elastipod_agent.ipc.run_coordinator import RunCoordinator
from elastipod_agent.settings import Settings

LATE_RETURN_S = 30.0  # for workers that a drain has given its time already


class PooledWorkers:
    """Starts and ends no process: the pool does that between generations. See `GenerationWorkers`.

    A fault leaves the other workers alone. `supervise` then waits for the stop that says what to do with them, and `finish`
    returns when all ranks are at the barrier again. begins_successors: whether dead workers are succeeded before the stop.
    """

    def __init__(
        self,
        settings: Settings,
        run: GenerationRun,
        *,
        pool: WorkerPool,
        coordinator: RunCoordinator,
        begins_successors: bool = True,
    ) -> None:
        self._settings = settings
        self._run = run
        self._pool = pool
        self._coordinator = coordinator
        self._begins_successors = begins_successors
        self._local_ranks = range(settings.layout.nproc)
        self._join_by = 0.0  # monotonic
        self._has_ended = False  # all workers have left the run

    async def start(self) -> bool:
        """Release the barrier once every rank has a process; a rank that is on its way to the barrier follows."""
        run, pool = self._run, self._pool
        pool.on_change = run.wake.set
        while not pool.is_releasable and not run.is_ending and not pool.is_closing:
            await run.wait_for_change()
        if run.is_ending or pool.is_closing:
            return False  # no worker has seen anything of this run
        if pool.fault is not None:
            run.set_fault(pool.fault)
            await self._wait_for_stop()
            return False
        run.group = pool.group
        pool.left.clear()
        run.reports_before = {rank: pool.group.file.num_reports(rank) for rank in self._local_ranks}
        pool.tap.target = run.output_tap
        if run.output_tap is not None:
            pool.group.tap = pool.tap  # also where nobody read the output before
        pool.release(run.start)
        self._join_by = time.monotonic() + self._settings.inprocess_timeout_s
        run.begin_monitors(pool.group)
        return True

    def take_over(self) -> None:
        """Supervise a run that is under way, instead of starting one."""
        self._pool.on_change = self._run.wake.set
        self._pool.left.clear()
        self._join_by = time.monotonic() + self._settings.inprocess_timeout_s

    async def supervise(self) -> None:
        """Wait until all workers have left the run, or a stop ends it."""
        run = self._run
        while not self._must_end and not run.is_late():
            state = self._state()
            self._has_ended = state is RunState.ENDED
            if self._has_ended:
                return
            if await self._set_fault(state):
                await run.end_monitors()
                if state is RunState.CRASHED and self._may_begin_successors():
                    self._pool.begin_successors()
                await self._wait_for_stop()
                return
            left_s = self._join_by - time.monotonic()
            await run.wait_for_change(limit_s=left_s if left_s > 0 and not run.has_deadline else None)

    async def finish(self) -> GenerationEnd:
        """Bring the ranks back as the stop asks, and name the end of the run."""
        run, pool = self._run, self._pool
        if not pool.is_closing and run.fault is None:
            await pool.end_culprits(await run.hang_culprits())
        await run.end_monitors()
        pool.tap.target = None
        outcome = self.outcome()
        if pool.is_closing:
            return self._end(outcome)
        if outcome is Outcome.COMPLETED:
            self._coordinator.end_run(is_faulty=False)  # training is done: no process is started before the next stop
            note = await run.run_post_script()
            if not run.is_ending or pool.is_closing:
                return self._end(outcome, note=note)
            outcome = Outcome.STOPPED  # during the script
        if outcome is Outcome.DRAINED:
            pool.recall(self._to_replace(), is_faulty=False)
            return self._end(outcome)  # ready at once: the next start waits for new processes
        return await self._gather(outcome)

    def close(self) -> None:
        """Let the pool keep the workers."""
        self._pool.on_change = lambda: None
        self._run.group = None
        self._pool.left.set()

    async def _gather(self, outcome: Outcome) -> GenerationEnd:
        """Wait until every rank is at the barrier again; those that the stop or a fault names get a new process.

        A pod whose processes are all new is ready before they are there: the operator's next start is on its way while they build.

        A script that does not know of elastic events listens for faults: a drain that runs out of time returns it to the barrier as one.
        """
        run, pool = self._run, self._pool
        is_late, replace = self.is_late, self._to_replace()
        run.drop_deadline()
        pool.recall(replace, is_faulty=not self._has_ended, within_s=LATE_RETURN_S if is_late else None)
        while not pool.may_get_start and not pool.is_closing:
            await run.wait_for_change()
            if not self._to_replace() <= replace:  # a later stop goes deeper
                replace = self._to_replace()
                pool.recall(replace, is_faulty=False)
        return self._end(outcome, is_late=is_late, note=LATE_CALLED_BACK if is_late else "")

    def _end(self, outcome: Outcome, *, is_late: bool = False, note: str = "") -> GenerationEnd:
        return GenerationEnd(outcome=outcome, is_late=is_late, note=note, stuck=tuple(self._pool.stuck))

    def _state(self) -> RunState:
        group = self._pool.group
        exits = {one.local_rank: one for one in group.exits()}
        ranks = [
            RankInRun(
                position=RankPosition.NO_PROCESS if rank in exits else self._coordinator.position(rank),
                status=exits[rank].status if rank in exits else None,
                is_failure=rank in exits and exits[rank].is_failure,
                has_joined=self._coordinator.has_joined(rank),
                acknowledged=group.file.acknowledged(rank),
            )
            for rank in self._local_ranks
        ]
        return run_state(ranks, is_draining=self._run.is_draining, now=time.monotonic(), join_by=self._join_by)

    async def _set_fault(self, state: RunState) -> bool:
        """Record the fault that there is; False if there is none."""
        run, group = self._run, self._pool.group
        failed = group.first_failure()
        if state is RunState.CRASHED and failed is not None:
            for one in group.exits():
                if one.is_failure:
                    self._coordinator.mark_failed(one.local_rank)
            await run.fail_with(group, failed)
        elif run.reported_fault is not None:
            run.set_fault(run.reported_fault)
        elif run.finding is not None:
            run.fail(run.finding.reason, run.finding.message)
            await self._pool.end_culprits(run.finding.culprits)
        elif state is RunState.START_MISSED:
            names = ", ".join(str(rank) for rank in self._local_ranks if not self._coordinator.has_joined(rank))
            waited = f"{self._settings.inprocess_timeout_s:g} s"
            run.fail("WorkerUnhealthy", f"local rank {names} did not reach hyperpod_barrier() within {waited}")
        else:
            return False
        return True

    @property
    def is_late(self) -> bool:
        """True if a drain ran out of time."""
        run = self._run
        return run.is_draining and run.group is not None and not self._has_ended and run.fault is None

    def outcome(self) -> Outcome:
        """Name the end. A rank that is back at the barrier has ended its run like one that exited with 0."""
        if self._run.fault is not None:
            return Outcome.CRASHED
        if not self._has_ended:
            return Outcome.STOPPED
        group = self._pool.group
        back = [WorkerExit(one.local_rank, 0, group.file.acknowledged(one.local_rank)) for one in group.living]
        return classify([*group.exits(), *back], self._run.stop_mode)

    def _to_replace(self) -> frozenset[int]:
        """Give the local ranks that get a new process, as the stop or a fault says."""
        mode = parse_restart_mode(self._run.restart_mode)
        return ranks_to_replace(mode, len(self._local_ranks), self._requested_replacement())

    def _requested_replacement(self) -> frozenset[int]:
        """Give the local ranks whose workers asked for a new process."""
        return frozenset() if self._run.fault is None else frozenset(self._run.replaced_by_request)

    def _may_begin_successors(self) -> bool:
        """Tell whether the next run probably goes on with this pod's living processes: nobody asks for more, and the pod stays."""
        run = self._run
        return self._begins_successors and not (run.is_ending or run.is_last or run.reported_fault or run.finding)

    async def _wait_for_stop(self) -> None:
        """Wait until the operator stops the run; in a drain it has already."""
        while not self._run.is_ending and not self._pool.is_closing:
            await self._run.wait_for_change()

    @property
    def _must_end(self) -> bool:
        return self._run.stop_mode is StopMode.HARD or self._pool.is_closing
