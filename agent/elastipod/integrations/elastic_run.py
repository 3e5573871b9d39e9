"""One generation of a training loop that a framework drives: what all integrations have in common."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from elastipod.audit.sample_log import SampleLog
from elastipod.batches.batch_plan import BatchPlan, plan_batch
from elastipod.checkpoint.drain import checkpoint_call
from elastipod.data.elastic_batches import Batch, ElasticBatches, MicroBatch
from elastipod.elastic_event import elastic_event_detected
from elastipod.errors import BatchSizeError, DataError
from elastipod.integrations.marks import Marked, MarkedCheckpoints
from elastipod.progress import report
from elastipod.rank_in_world import RankInWorld


class ElasticRun:
    """The plan of the samples, this rank's part of it, and what is told to the agent, to the log and in checkpoints.

    Make it once the process group exists. `step_done`, `begin_save` and `finish_save` are collective.
    """

    def __init__(
        self,
        plan: ElasticBatches,
        checkpoints: MarkedCheckpoints,
        *,
        max_micro_batch: int,
        sample_log: str | os.PathLike[str] | None = None,
        equal_passes: bool = False,
    ) -> None:
        """max_micro_batch: samples of one pass that fit into a rank's memory. sample_log: folder for sample logs, None for none.

        equal_passes: all passes of all ranks must have the same number of samples; sizes at which they cannot are refused.

        Raises BatchSizeError, with world sizes that work, when the global batch has fewer samples than there are ranks, and
        DataError when the newest checkpoint belongs to other data or another global batch.
        """
        self.place = RankInWorld.current()
        self.plan, self.checkpoints = plan, checkpoints
        cut = equal_cut if equal_passes else _cut
        self.cut: BatchPlan = cut(plan, self.place.world_size, max_micro_batch)
        self.resumed: Marked | None = checkpoints.newest()
        if self.resumed is not None:
            plan.resumed(self.resumed.data)  # refuses a position in other data
            _check_batch(self.resumed, plan)
        self.step = self.resumed.step if self.resumed else 0
        plan.iterate_at(self.place, self.step)  # checks that all ranks have the same plan
        self.is_leaving = False
        self.saved_step: int | None = None  # of the newest checkpoint that this run has completed
        self._saving = ExitStack()
        self._loss: float | None = None
        self._before = time.monotonic()
        self._log = sample_log and SampleLog(
            sample_log,
            plan,
            generation=checkpoints.generation,
            rank=self.place.rank,
            world_size=self.place.world_size,
            resume=self.resumed,
        )

    def batch(self, step: int) -> Batch:
        """Give this rank's part of the batch of optimizer step ``step`` (from 1)."""
        return self.plan.batch(step, self.place.rank, self.place.world_size)

    def passes(self, step: int) -> list[MicroBatch]:
        """Give this rank's passes of a step; every rank has the same number of them."""
        return list(self.batch(step).micro_batches(self.cut.micro_batch))

    def epoch_passes(self, epoch: int, made: int = 0) -> Iterator[list[int]]:
        """Give the samples of every pass of this rank in one epoch, from the step on that follows ``made`` steps of the epoch."""
        first = epoch * self.plan.steps_per_epoch + made
        batches = islice(self.plan.iterate_at(self.place, first), self.plan.steps_per_epoch - made)
        return (list(part.indices) for batch in batches for part in batch.micro_batches(self.cut.micro_batch))

    def passes_made(self) -> int:
        """Give the passes of this rank in the present epoch that belong to completed steps; all of them at the end of an epoch."""
        made = self.step % self.plan.steps_per_epoch
        return made * self.cut.passes if made or not self.step else self.passes_per_epoch

    @property
    def passes_per_epoch(self) -> int:
        """Passes of each rank in one epoch; the last step may have fewer than the others."""
        full, rest = divmod(self.plan.dataset_size, self.plan.global_batch)
        return full * self.cut.passes + (len(self.passes(full + 1)) if rest else 0)

    def step_done(self, step: int, loss: float | None = None, *, is_last: bool = False) -> bool:
        """Record that the job has made an optimizer step; give True, on every rank, when it must save and leave now.

        loss: of the global batch, where known. is_last: the framework ends here, also where the plan goes on; a training that
        ends does not leave. Call it once per step on every rank, after the optimizer step.
        """
        batch = self.batch(step)
        self._saving.close()
        self.step, self._loss = step, loss if loss is not None else self._loss
        if self._log:
            self._log.step(batch, loss)
        now = time.monotonic()
        rate = batch.global_size / max(now - self._before, 1e-9)
        report(step, batch.samples_seen, self._loss, rate, self.plan.total_steps)
        self._before = now
        is_last = is_last or step >= self.plan.total_steps
        self.is_leaving = not is_last and elastic_event_detected()
        return self.is_leaving

    def note_loss(self, loss: float) -> None:
        """Remember the newest loss that the framework has computed, for the reports of the steps to come."""
        self._loss = loss

    def sign_of_life(self) -> None:
        """Tell the agent, in a phase without steps, that this rank is alive."""
        report(self.step, self.plan.samples_after(self.step), self._loss)

    def begin_save(self, path: Path, *, is_certain: bool = True) -> None:
        """Call it before the framework writes a checkpoint of the present step. Raises FencedError.

        is_certain: it will be written now, so that this rank's silence is not taken for a hang.
        """
        if self._log:
            self._log.sync()
        self.checkpoints.begin(path)
        if is_certain:
            self._saving.close()
            self._saving.enter_context(checkpoint_call())

    def finish_save(self, path: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Call it once the framework has returned from writing it. The checkpoint counts from now on."""
        state = self.plan.state_dict(self.step)
        self.checkpoints.finish(path, self.step, state, {"global_batch": self.plan.global_batch, **(extra or {})})
        self.saved_step = self.step
        self._saving.close()
        if self._log:
            self._log.saved(self.step)

    def end(self, why: Literal["drained", "completed"] | None) -> None:
        """Close the sample log. why: None when the run ends before its plan, by a decision of the framework."""
        if self._log:
            if why is not None:
                self._log.end(self.step, why)
            self._log.close()


def equal_cut(plan: ElasticBatches, world_size: int, max_micro_batch: int) -> BatchPlan:
    """Give the passes of a step, all of one size on all ranks: the largest size that divides a rank's share of the batch.

    Raises BatchSizeError, with what would work, when a rank's share or the last batch of an epoch would be another one.
    """
    even = plan_batch(plan.global_batch, world_size, max_micro_batch=max_micro_batch, even=True)
    rest = plan.dataset_size % plan.global_batch
    if rest:
        raise BatchSizeError(
            f"all passes must have the same number of samples, but an epoch of {plan.dataset_size} samples ends with a batch of "
            f"{rest} instead of {plan.global_batch}; leave {rest} samples out, or take a global batch that divides {plan.dataset_size}"
        )
    share = even.local_sizes[0]
    micro_batch = next(size for size in range(min(share, max_micro_batch), 0, -1) if share % size == 0)
    return replace(even, micro_batch=micro_batch, passes=share // micro_batch)


def _cut(plan: ElasticBatches, world_size: int, max_micro_batch: int) -> BatchPlan:
    return plan_batch(plan.global_batch, world_size, max_micro_batch=max_micro_batch)


def _check_batch(resumed: Marked, plan: ElasticBatches) -> None:
    was = resumed.extra.get("global_batch")
    if was != plan.global_batch:
        raise DataError(
            f"{resumed.path} was saved with a global batch of {was}, but now it is {plan.global_batch}; the framework counts its "
            f"position in steps, so keep the global batch of {was}, or start in another directory"
        )
