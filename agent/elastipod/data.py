"""Data by global position: which samples each rank trains on at each step, whatever the number of ranks.

There is one canonical order per epoch. The place of a job in its data is one number, the optimizer steps it completed,
so a resize needs no bookkeeping: every rank computes its part of the next global batch from that number. Nothing is
dropped and nothing is padded: an epoch's last batch may be short, shares may differ by one sample, and the weights
below make the averaged gradient the one that a single process would compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elastipod.shuffle import Shuffle


def share(size: int, rank: int, world_size: int) -> range:
    """Give the part of ``size`` samples that one rank owns, as a half-open range.

    Over all ranks the ranges cover 0..size once, in rank order, and differ by at most one sample; ranks beyond the size
    get none. Raises ValueError when the rank is outside the world.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside a world of {world_size}")
    return range(size * rank // world_size, size * (rank + 1) // world_size)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples of one forward and backward pass on one rank.

    indices: dataset indices, never empty. weight: what to multiply their *mean* loss by before backward(). is_last: the
    pass in which gradients are reduced over the ranks.
    A rank whose share is used up gets one sample with weight 0: its pass takes part in the collectives that DDP and
    FSDP2 need from every rank, and adds nothing to the gradient.
    """

    indices: Sequence[int]
    weight: float
    is_last: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's part of one global batch.

    step: the optimizer step that it makes, counted over the job from 1; epoch: from 0; indices: this rank's samples as
    dataset indices, possibly none; global_size: samples of all ranks together; samples_seen: of the job, after this step.
    """

    step: int
    epoch: int
    indices: Sequence[int]
    global_size: int
    samples_seen: int
    world_size: int
    spare_index: int  # a sample of this batch, for the passes of a rank that has none left

    @property
    def weight(self) -> float:
        """What to multiply this rank's mean loss by, so that the mean over ranks is the mean over all samples."""
        return self.world_size * len(self.indices) / self.global_size

    def micro_batches(self, size: int) -> Iterator[MicroBatch]:
        """Cut this rank's samples into passes of at most ``size``, the same number of passes on every rank.

        With gradients summed over the passes and averaged over the ranks (what DDP and FSDP2 do) the result is the
        gradient of the mean loss over the global batch. Keep ``size`` fixed while the world changes: then only the order
        of summation differs. Raises ValueError for a size below 1.
        """
        if size < 1:
            raise ValueError(f"size is {size}; a micro-batch holds at least one sample")
        largest_share = -(-self.global_size // self.world_size)
        passes = -(-largest_share // size)
        for number in range(passes):
            own = self.indices[number * size : (number + 1) * size]
            weight = self.world_size * len(own) / self.global_size
            yield MicroBatch(own or (self.spare_index,), weight, is_last=number == passes - 1)


@dataclass(frozen=True, slots=True)
class ElasticBatches:
    """The global batches of a whole job: `epochs` passes over `dataset_size` samples, `global_batch` at a time.

    The plan is the same on every rank, in every generation and at every world size; only `iterate` and `batch` look at
    the world. Epochs do not share batches. Raises ValueError for a size, batch or count below 1.
    """

    dataset_size: int
    global_batch: int
    seed: int = 0
    epochs: int = 1
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name in ("dataset_size", "global_batch", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch; the last may be a short one."""
        return -(-self.dataset_size // self.global_batch)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole job."""
        return self.steps_per_epoch * self.epochs

    def samples_after(self, step: int) -> int:
        """Give the samples that the job has consumed once ``step`` steps are complete."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        return epochs * self.dataset_size + min(steps * self.global_batch, self.dataset_size)

    def iterate(self, rank: int, world_size: int, start_step: int = 0) -> Iterator[Batch]:
        """Give this rank's batches from the one after ``start_step`` completed steps to the end of the job.

        start_step: completed optimizer steps, as a checkpoint has them; beginning there costs no more than at 0. Raises
        ValueError when it is beyond the job's end, which means that the plan is not the one that was saved.
        """
        if not 0 <= start_step <= self.total_steps:
            raise ValueError(
                f"start_step is {start_step}, but this job has {self.total_steps} steps; was its data changed?"
            )
        return (self.batch(step, rank, world_size) for step in range(start_step + 1, self.total_steps + 1))

    def batch(self, step: int, rank: int, world_size: int) -> Batch:
        """Give one rank's part of the batch that makes optimizer step ``step`` (from 1)."""
        if not 1 <= step <= self.total_steps:
            raise ValueError(f"step is {step}; this job has steps 1 to {self.total_steps}")
        epoch, number = divmod(step - 1, self.steps_per_epoch)
        first = number * self.global_batch
        size = min(self.global_batch, self.dataset_size - first)
        order = self._order(epoch)
        return Batch(
            step=step,
            epoch=epoch,
            indices=tuple(order[first + offset] for offset in share(size, rank, world_size)),
            global_size=size,
            samples_seen=self.samples_after(step),
            world_size=world_size,
            spare_index=order[first],
        )

    def _order(self, epoch: int) -> Shuffle | range:
        return Shuffle(self.dataset_size, self.seed, epoch) if self.shuffle else range(self.dataset_size)
