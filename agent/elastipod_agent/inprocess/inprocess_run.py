"""One run of workers that live over generations: released from the barrier, watched, and called back to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastipod.ipc.protocol import RestartMode
from elastipod.worker_file import Progress
from elastipod_agent.core.exits import Outcome, StopMode, WorkerExit, classify
from elastipod_agent.core.inprocess_restart import (
    RankInRun,
    RankPosition,
    RunState,
    parse_restart_mode,
    ranks_to_replace,
    run_state,
)
from elastipod_agent.core.requests import StartRequest
from elastipod_agent.generation import Fault, GenerationEnd, GenerationSupervisor
from elastipod_agent.inprocess.worker_pool import WorkerPool
from elastipod_agent.ipc.run_coordinator import RunCoordinator
from elastipod_agent.settings import Settings
from elastipod_agent.workers.output_pump import OutputPump
from elastipod_agent.workers.reaper import Reaper


class InProcessRun(GenerationSupervisor):
    """A generation that neither starts nor ends processes: the pool does, between runs.

    A fault leaves the living workers alone; `run` then waits for the stop that says what to do with them, and returns
    when all ranks are at the barrier again.
    """

    def __init__(
        self,
        settings: Settings,
        start: StartRequest,
        *,
        root: Path,
        environ: Mapping[str, str],
        reaper: Reaper,
        pump: OutputPump,
        on_fault: Callable[[Fault], None],
        on_saving: Callable[[], None],
        on_unanswered: Callable[[], None],
        pool: WorkerPool,
        coordinator: RunCoordinator,
    ) -> None:
        parts: dict[str, Any] = {"root": root, "environ": environ, "reaper": reaper, "pump": pump}
        heard: dict[str, Any] = {"on_saving": on_saving, "on_unanswered": on_unanswered}
        super().__init__(settings, start, **parts, on_fault=on_fault, **heard)
        self._pool = pool
        self._coordinator = coordinator
        self._restart_mode = ""
        self._join_by = 0.0  # monotonic
        self._has_left = False

    def stop(self, mode: StopMode, timeout_s: float, restart_mode: str = "", *, leaves: bool | None = None) -> None:
        """Ask for the end; restart_mode says, as in /stop, which workers may come back and which are started anew."""
        self._restart_mode = restart_mode
        super().stop(mode, timeout_s, leaves=leaves)

    async def run(self) -> GenerationEnd:
        """Run to the end, up to where all ranks wait for the next start. Raises for mistakes of ours only."""
        self._pool.on_change = self._wake.set
        try:
            if await self._begin():
                await self._supervise_run()
            return await self._leave()
        finally:
            self.progress()
            self._pool.on_change = lambda: None
            self._group = None

    def progress(self) -> Progress | None:
        """Give the last report of local rank 0 in this run; its process may have reported in earlier ones too."""
        if self._group is not None and self._group.file.num_reports(0) == self._reports_before.get(0, 0):
            return None
        return super().progress()

    async def _begin(self) -> bool:
        """Release the barrier, once every rank has a process; ranks that are still on their way follow."""
        while not self._pool.has_all_processes and self._stop is StopMode.NONE and not self._pool.is_closing:
            await self._wait_for_change()
        if self._stop is not StopMode.NONE or self._pool.is_closing:
            return False  # no worker has seen anything of this run
        if self._pool.fault is not None:
            self._set_fault(self._pool.fault)
            await self._wait_for_stop()
            return False
        self._group = self._pool.group
        self._reports_before = {one: self._group.file.num_reports(one) for one in self._local_ranks}
        self._pool.tap = None if self._log_monitor is None else self._log_monitor.take
        self._pool.release(self.start)
        self._join_by = time.monotonic() + self._settings.inprocess_timeout_s
        self._monitors.begin(self._wanted_monitors())
        return True

    async def _supervise_run(self) -> None:
        """Watch until the workers have left, or a stop wants them to."""
        while not self._must_end and not self._is_late():
            state = self._run_state()
            self._has_left = state is RunState.ENDED
            if self._has_left:
                return
            if await self._note_fault(state):
                await self._monitors.end()
                await self._wait_for_stop()
                return
            left_s = self._join_by - time.monotonic()
            await self._wait_for_change(limit_s=left_s if left_s > 0 and self._deadline is None else None)

    async def _note_fault(self, state: RunState) -> bool:
        group = self._pool.group
        failed = group.first_failure()
        if state is RunState.CRASHED and failed is not None:
            for one in group.exits():
                if one.is_failure:
                    self._coordinator.mark_failed(one.local_rank)
            await self._report_failure(group, failed)
        elif self._reported_fault is not None:
            self._set_fault(self._reported_fault)
        elif self._finding is not None:
            self._fail(self._finding.reason, self._finding.message)
        elif state is RunState.START_MISSED:
            names = ", ".join(str(one) for one in self._local_ranks if not self._coordinator.has_joined(one))
            waited = f"{self._settings.inprocess_timeout_s:g} s"
            self._fail("WorkerUnhealthy", f"local rank {names} did not come to hyperpod_barrier() within {waited}")
        else:
            return False
        return True

    async def _leave(self) -> GenerationEnd:
        """Call the ranks back as the stop wants it, and name the end of the run."""
        await self._monitors.end()
        self._pool.tap = None
        outcome = self._outcome()
        if self._pool.is_closing:
            return self._end(outcome)
        if outcome is Outcome.COMPLETED:
            self._coordinator.end_run(is_faulty=False)  # nobody is started anew before the next stop: training is done
            script = self._settings.post_script
            note = "" if script is None else await self._post_train(script)
            if self._stop is StopMode.NONE or self._pool.is_closing:
                return self._end(outcome, note=note)
            outcome = Outcome.STOPPED  # during the script
        if outcome is Outcome.DRAINED:
            self._pool.recall(frozenset(), is_faulty=False)
            return self._end(outcome)  # ready at once: the next start waits for those who come anew
        has_begun = self._group is not None
        is_late = self._stop is StopMode.GRACEFUL and has_begun and not self._has_left and self._fault is None
        mode = RestartMode.PROCESS_LEVEL_RESTART if is_late else parse_restart_mode(self._restart_mode)
        replace = ranks_to_replace(mode, len(self._local_ranks), self._requested_replacement())
        self._deadline = None
        self._pool.recall(replace, is_faulty=not self._has_left)
        while not self._pool.is_gathered and not self._pool.is_closing:
            await self._wait_for_change()
        note = "the workers did not drain in the time that the stop gave them and were killed" if is_late else ""
        return self._end(outcome, is_late=is_late, note=note)

    def _end(self, outcome: Outcome, *, is_late: bool = False, note: str = "") -> GenerationEnd:
        return GenerationEnd(outcome=outcome, is_late=is_late, note=note, stuck=tuple(self._pool.stuck))

    def _run_state(self) -> RunState:
        group = self._pool.group
        exits = {one.local_rank: one for one in group.exits()}
        ranks = [
            RankInRun(
                position=RankPosition.NO_PROCESS if one in exits else self._coordinator.position(one),
                status=exits[one].status if one in exits else None,
                is_failure=one in exits and exits[one].is_failure,
                has_joined=self._coordinator.has_joined(one),
                acknowledged=group.file.acknowledged(one),
            )
            for one in self._local_ranks
        ]
        return run_state(ranks, is_draining=self.is_draining, now=time.monotonic(), join_by=self._join_by)

    def _outcome(self) -> Outcome:
        """Name the end; a rank that is back at the barrier has ended its run as well as one that exited with 0."""
        if self._fault is not None:
            return Outcome.CRASHED
        if not self._has_left:
            return Outcome.STOPPED
        group = self._pool.group
        back = [WorkerExit(one.local_rank, 0, group.file.acknowledged(one.local_rank)) for one in group.living]
        return classify([*group.exits(), *back], self._stop)

    def _requested_replacement(self) -> frozenset[int]:
        """Give the local rank whose worker asked for another process in its place."""
        fault = self._fault
        if fault is None or fault.restart_mode is not RestartMode.LOCAL_PRL or fault.failure.local_rank is None:
            return frozenset()
        return frozenset({fault.failure.local_rank})

    async def _wait_for_stop(self) -> None:
        """Wait for the operator's word; a fault during a drain has it already."""
        while self._stop is StopMode.NONE and not self._pool.is_closing:
            await self._wait_for_change()

    @property
    def _must_end(self) -> bool:
        return self._stop is StopMode.HARD or self._pool.is_closing

    @property
    def _local_ranks(self) -> range:
        return range(self._settings.layout.nproc)
