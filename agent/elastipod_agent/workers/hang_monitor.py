"""Monitors workers for hangs: workers that report steps and report none for too long. Their stacks are dumped, then it is a fault."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from elastipod.worker_file import Progress
from elastipod_agent.core.hang import Hang, Sample
from elastipod_agent.core.hang_culprits import SuspectWorker, hang_culprits
from elastipod_agent.core.hang_message import WorkerActivity, cut, hang_message
from elastipod_agent.settings import Settings
from elastipod_agent.workers.failure import MAX_MESSAGE_BYTES
from elastipod_agent.workers.group import WorkerGroup, WorkerProcess
from elastipod_agent.workers.monitors import Finding
from elastipod_agent.workers.process_table import descendants, snapshot, uses_device
from elastipod_agent.workers.stack_dumps import request_stacks

_MAX_LOG_LINES = 4000


class HangMonitor:
    """Monitors the workers of one generation: those whose process has reported a step, in this generation or in one before.

    print_line: prints one line to the agent's log. is_ending: tells whether a stop is under way. before: number of reports by local rank
    that processes older than the generation had made.
    """

    def __init__(
        self,
        settings: Settings,
        group: WorkerGroup,
        print_line: Callable[[str], None],
        is_ending: Callable[[], bool],
        before: Mapping[int, int] | None = None,
    ) -> None:
        self._settings = settings
        self._group = group
        self._print_line = print_line
        self._is_ending = is_ending
        self._before = before or {}
        self._last: dict[int, Progress] = {}
        self._detector = group.hangs
        self._detector.begin_generation()
        self._explanation: asyncio.Task[Finding | None] | None = None

    async def run(self) -> Finding:
        """Return once workers hang: WorkerUnhealthy, with the steps at which they stopped and their stacks."""
        loop = asyncio.get_running_loop()
        while True:
            hang = self._detector.observe(loop.time(), self._samples(), is_ending=self._is_over())
            if hang is not None:
                finding = await self._explained(hang)
                if finding is not None:
                    return finding
                self._detector.excuse(hang)
                self._explanation = None
            await asyncio.sleep(self._detector.poll_interval_s)

    async def culprits(self) -> frozenset[int]:
        """Give, when a stop comes from elsewhere, the local ranks that hang by themselves.

        Another pod may have seen the hang a little sooner, or only the ranks that wait for one here: what it takes two observations to
        see is a hang then.
        """
        if self._explanation is None:
            early_s = 2 * self._detector.poll_interval_s
            hang = self._detector.observe(asyncio.get_running_loop().time(), self._samples(), early_s=early_s)
            if hang is None:
                return frozenset()
            finding = await self._explained(hang)
        else:
            finding = await asyncio.shield(self._explanation)
        return frozenset() if finding is None else finding.culprits

    async def _explained(self, hang: Hang) -> Finding | None:
        """Explain a hang, once; None if it is none."""
        self._explanation = asyncio.ensure_future(self._explain(hang))
        try:
            return await asyncio.shield(self._explanation)
        except asyncio.CancelledError:
            self._explanation.cancel()
            raise

    def _is_over(self) -> bool:
        """True if no more steps are expected; a drain may also have come through another pod."""
        acknowledged = any(self._group.file.acknowledged(worker.local_rank) for worker in self._group.workers)
        return acknowledged or self._is_ending()

    def _samples(self) -> list[Sample]:
        samples: list[Sample] = []
        for worker in self._group.living:
            rank = worker.local_rank
            num_reports = self._group.file.num_reports(rank)
            has_reported = num_reports > self._before.get(rank, 0)
            num_reports -= worker.reports_before
            progress = self._group.file.progress(rank) or self._last.get(rank)  # None while a report is half-written
            if num_reports > 0 and progress is not None:
                self._last[rank] = progress
                is_in_checkpoint = self._group.file.is_in_checkpoint(rank)
                samples.append(Sample(rank, num_reports, progress.step, progress.time, is_in_checkpoint, has_reported))
        return samples

    async def _explain(self, hang: Hang) -> Finding | None:
        """Request the stacks of all living workers, print them, and give the most informative part and whom the stacks accuse.

        None, and nothing is printed, where all may only wait for new processes.
        """
        living = self._group.living
        answers = await request_stacks(self._group.file, {worker.local_rank: worker.child.pid for worker in living})
        lines: list[str] = []
        activities: list[WorkerActivity] = []
        suspects: list[SuspectWorker] = []
        processes = snapshot()
        for worker in living:
            answer = answers[worker.local_rank]
            activities.append(WorkerActivity(self._group.global_rank(worker), answer.stacks, answer.facts))
            family = [worker.child.pid, *(child.pid for child in descendants(processes, worker.child.pid))]
            has_device = any(map(uses_device, family))
            suspects.append(SuspectWorker(worker.local_rank, answer.stacks, answer.is_unresponsive, has_device))
            lines += [self._prefix(worker) + line for line in (answer.stacks or answer.facts).splitlines()]
        culprits = hang_culprits(hang, suspects)
        if hang.awaits_first_step and not culprits:
            return None
        for line in lines[:_MAX_LOG_LINES]:
            self._print_line(line)
        if len(lines) > _MAX_LOG_LINES:
            self._print_line(f"hyperpodrun: {len(lines) - _MAX_LOG_LINES} more lines of stacks are left out")
        ranks = {worker.local_rank: self._group.global_rank(worker) for worker in self._group.workers}
        message = cut(hang_message(hang, ranks, activities), MAX_MESSAGE_BYTES)
        return Finding("WorkerUnhealthy", message, culprits)

    def _prefix(self, worker: WorkerProcess) -> str:
        return self._settings.logs.prefix.safe_substitute(
            role_name=self._settings.layout.role, rank=self._group.global_rank(worker), local_rank=worker.local_rank
        )
