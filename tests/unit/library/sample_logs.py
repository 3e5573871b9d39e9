"""Sample logs of a made-up job, written by the library's own writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, cast

from elastipod.audit.sample_log import SampleLog
from elastipod.checkpoint import Resume
from elastipod.data import Batch, ElasticBatches

PLAN = ElasticBatches(dataset_size=50, global_batch=8, seed=1, epochs=2)  # 7 steps an epoch, the last one short
Sampler = Callable[[int, int, int], Batch]


class Job:
    """A job of several generations; every rank logs what its sampler gives it."""

    def __init__(self, directory: Path, plan: ElasticBatches = PLAN, sampler: Sampler | None = None) -> None:
        self.directory = directory
        self.plan = plan
        self._sampler = sampler or plan.batch

    def run(
        self, generation: int, world_size: int, steps: range, *, resumed_from: int = 0, end: str | None = "drained"
    ) -> None:
        """Log one generation that made ``steps``; with end=None its processes were killed after the last one."""
        resumed_step = steps.start - 1
        resume = Resume(resumed_step, resumed_from, 1, self.directory) if resumed_from else None
        for rank in range(world_size):
            with SampleLog(
                self.directory, self.plan, generation=generation, rank=rank, world_size=world_size, resume=resume
            ) as log:
                if resume:
                    log.loaded(resumed_step, 1.5)
                for step in steps:
                    log.step(self._sampler(step, rank, world_size), loss=1 / step)
                if end in ("drained", "completed"):
                    log.saved(steps.stop - 1, 1.5)
                    log.end(steps.stop - 1, cast(Literal["drained", "completed"], end))

    def file(self, generation: int, rank: int) -> Path:
        return self.directory / f"gen-{generation:06d}-rank-{rank:05d}.jsonl"
