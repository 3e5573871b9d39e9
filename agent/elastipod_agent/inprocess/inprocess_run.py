"""One run of workers that live over generations: released from the barrier, watched, and called back to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastipod.ipc_wire import RestartMode
from elastipod.worker_file import Progress
from elastipod_agent.core.exits import Outcome, Stop, WorkerExit, classify
from elastipod_agent.core.inprocess_restart import Place, RunningRank, Verdict, judge, spoken_mode, to_replace
from elastipod_agent.core.requests import Start
from elastipod_agent.generation import End, Fault, Generation
from elastipod_agent.inprocess.worker_pool import Keeper
from elastipod_agent.ipc.run_coordinator import Exchange
from elastipod_agent.settings import Settings
from elastipod_agent.workers.output_pump import OutputPump
from elastipod_agent.workers.reaper import Reaper


class InProcessRun(Generation):
    """A generation that neither starts nor ends processes: the keeper does, between runs.

    A fault leaves the living workers alone; `run` then waits for the stop that says what to do with them, and returns
    when all ranks are at the barrier again.
    """

    def __init__(
        self,
        settings: Settings,
        start: Start,
        *,
        root: Path,
        environ: Mapping[str, str],
        reaper: Reaper,
        pump: OutputPump,
        on_fault: Callable[[Fault], None],
        on_saving: Callable[[], None],
        on_unanswered: Callable[[], None],
        keeper: Keeper,
        exchange: Exchange,
    ) -> None:
        parts: dict[str, Any] = {"root": root, "environ": environ, "reaper": reaper, "pump": pump}
        heard: dict[str, Any] = {"on_saving": on_saving, "on_unanswered": on_unanswered}
        super().__init__(settings, start, **parts, on_fault=on_fault, **heard)
        self._keeper = keeper
        self._exchange = exchange
        self._restart_mode = ""
        self._come_by = 0.0  # monotonic
        self._has_left = False

    def stop(self, mode: Stop, timeout_s: float, restart_mode: str = "", *, leaves: bool | None = None) -> None:
        """Ask for the end; restart_mode says, as in /stop, which workers may come back and which are started anew."""
        self._restart_mode = restart_mode
        super().stop(mode, timeout_s, leaves=leaves)

    async def run(self) -> End:
        """Run to the end, up to where all ranks wait for the next start. Raises for mistakes of ours only."""
        self._keeper.on_change = self._wake.set
        try:
            if await self._begin():
                await self._supervise_run()
            return await self._leave()
        finally:
            self.progress()
            self._keeper.on_change = lambda: None
            self._group = None

    def progress(self) -> Progress | None:
        """Give the last report of local rank 0 in this run; its process may have reported in earlier ones too."""
        if self._group is not None and self._group.file.num_reports(0) == self._reports_before.get(0, 0):
            return None
        return super().progress()

    async def _begin(self) -> bool:
        """Release the barrier, once every rank has a process; ranks that are still on their way follow."""
        while not self._keeper.is_staffed and self._stop is Stop.NONE and not self._keeper.is_closing:
            await self._woken()
        if self._stop is not Stop.NONE or self._keeper.is_closing:
            return False  # no worker has seen anything of this run
        if self._keeper.fault is not None:
            self._set_fault(self._keeper.fault)
            await self._until_stopped()
            return False
        self._group = self._keeper.group
        self._reports_before = {one: self._group.file.num_reports(one) for one in self._local_ranks}
        self._keeper.tap = None if self._log_watch is None else self._log_watch.take
        self._keeper.release(self.start)
        self._come_by = time.monotonic() + self._settings.inprocess_timeout_s
        self._watches.begin(self._wanted_watches())
        return True

    async def _supervise_run(self) -> None:
        """Watch until the workers have left, or a stop wants them to."""
        while not self._is_off and not self._is_late():
            verdict = self._judge()
            self._has_left = verdict is Verdict.LEFT
            if self._has_left:
                return
            if await self._note_fault(verdict):
                await self._watches.end()
                await self._until_stopped()
                return
            left_s = self._come_by - time.monotonic()
            await self._woken(limit_s=left_s if left_s > 0 and self._deadline is None else None)

    async def _note_fault(self, verdict: Verdict) -> bool:
        group = self._keeper.group
        failed = group.first_failure()
        if verdict is Verdict.CRASHED and failed is not None:
            for one in group.exits():
                if one.is_failure:
                    self._exchange.mark_failed(one.local_rank)
            await self._report(group, failed)
        elif self._sent is not None:
            self._set_fault(self._sent)
        elif self._finding is not None:
            self._fail(self._finding.reason, self._finding.message)
        elif verdict is Verdict.NEVER_CAME:
            names = ", ".join(str(one) for one in self._local_ranks if not self._exchange.has_come(one))
            waited = f"{self._settings.inprocess_timeout_s:g} s"
            self._fail("WorkerUnhealthy", f"local rank {names} did not come to hyperpod_barrier() within {waited}")
        else:
            return False
        return True

    async def _leave(self) -> End:
        """Call the ranks back as the stop wants it, and name the end of the run."""
        await self._watches.end()
        self._keeper.tap = None
        outcome = self._outcome()
        if self._keeper.is_closing:
            return self._end(outcome)
        if outcome is Outcome.COMPLETED:
            self._exchange.end_run(is_faulty=False)  # nobody is started anew before the next stop: training is done
            script = self._settings.post_script
            note = "" if script is None else await self._post_train(script)
            if self._stop is Stop.NONE or self._keeper.is_closing:
                return self._end(outcome, note=note)
            outcome = Outcome.STOPPED  # during the script
        if outcome is Outcome.DRAINED:
            self._keeper.call_back(frozenset(), is_faulty=False)
            return self._end(outcome)  # ready at once: the next start waits for those who come anew
        has_begun = self._group is not None
        is_late = self._stop is Stop.GRACEFUL and has_begun and not self._has_left and self._fault is None
        mode = RestartMode.PROCESS_LEVEL_RESTART if is_late else spoken_mode(self._restart_mode)
        replace = to_replace(mode, len(self._local_ranks), self._given_up())
        self._deadline = None
        self._keeper.call_back(replace, is_faulty=not self._has_left)
        while not self._keeper.is_gathered and not self._keeper.is_closing:
            await self._woken()
        note = "the workers did not drain in the time that the stop gave them and were killed" if is_late else ""
        return self._end(outcome, is_late=is_late, note=note)

    def _end(self, outcome: Outcome, *, is_late: bool = False, note: str = "") -> End:
        return End(outcome=outcome, is_late=is_late, note=note, stuck=tuple(self._keeper.stuck))

    def _judge(self) -> Verdict:
        group = self._keeper.group
        exits = {one.local_rank: one for one in group.exits()}
        ranks = [
            RunningRank(
                place=Place.GONE if one in exits else self._exchange.place(one),
                status=exits[one].status if one in exits else None,
                is_failure=one in exits and exits[one].is_failure,
                has_come=self._exchange.has_come(one),
                acknowledged=group.file.acknowledged(one),
            )
            for one in self._local_ranks
        ]
        return judge(ranks, is_draining=self.is_draining, now=time.monotonic(), come_by=self._come_by)

    def _outcome(self) -> Outcome:
        """Name the end; a rank that is back at the barrier has ended its run as well as one that exited with 0."""
        if self._fault is not None:
            return Outcome.CRASHED
        if not self._has_left:
            return Outcome.STOPPED
        group = self._keeper.group
        back = [WorkerExit(one.local_rank, 0, group.file.acknowledged(one.local_rank)) for one in group.living]
        return classify([*group.exits(), *back], self._stop)

    def _given_up(self) -> frozenset[int]:
        """Give the local rank whose worker asked for another process in its place."""
        fault = self._fault
        if fault is None or fault.restart_mode is not RestartMode.LOCAL_PRL or fault.failure.local_rank is None:
            return frozenset()
        return frozenset({fault.failure.local_rank})

    async def _until_stopped(self) -> None:
        """Wait for the operator's word; a fault during a drain has it already."""
        while self._stop is Stop.NONE and not self._keeper.is_closing:
            await self._woken()

    @property
    def _is_off(self) -> bool:
        return self._stop is Stop.HARD or self._keeper.is_closing

    @property
    def _local_ranks(self) -> range:
        return range(self._settings.layout.nproc)
