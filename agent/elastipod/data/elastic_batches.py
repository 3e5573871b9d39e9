"""Data by global position: which samples each rank trains on at each step, whatever the number of ranks.

There is one canonical order per epoch. The place of a job in its data is one number, the samples it has trained on
(which follows from its optimizer steps), so a resize needs no bookkeeping: every rank computes its part of the next
global batch from that number. Nothing is dropped and nothing is padded: an epoch's last batch may be short, shares may
differ, and the weights below make the averaged gradient the one that a single process would compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from elastipod.data.batch_split import BatchSplit
from elastipod.data.plan_check import check_same_plan
from elastipod.data.sources import MapSource, Order, Source, as_int, indices_at
from elastipod.errors import DataError
from elastipod.rank_in_world import RankInWorld

_MAX_LOOKUP = 4096  # samples that are looked up together: a millisecond or so, once in so many


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples of one forward and backward pass on one rank.

    indices: dataset indices, never empty. weight: what to multiply their *mean* loss by before backward(). is_last: the
    pass in which gradients are reduced over the ranks. rows: where the indices lie in the batch's `indices_or_spare`, to
    cut tensors with that were loaded for the whole batch.
    A rank whose share is used up gets one sample with weight 0: its pass takes part in the collectives that DDP and
    FSDP2 need from every rank, and adds nothing to the gradient.
    """

    indices: Sequence[int]
    weight: float
    is_last: bool
    rows: slice = field(compare=False)  # it has no hash


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's part of one global batch.

    Train it by `micro_batches` (or `accumulate`), which are right for every batch. A rank may have no sample at all: at the end
    of an epoch a batch can have fewer samples than there are ranks, and local sizes may be 0. The mean loss over
    ``indices`` is then NaN, and so is NaN times the weight 0; use `indices_or_spare` where a batch is loaded as a whole.

    step: the optimizer step that it makes, counted over the job from 1; epoch: from 0; indices: this rank's samples as
    dataset indices, possibly none; global_size: samples of all ranks together; samples_seen: of the job, after this step;
    first: place of this rank's first sample in the global batch; largest_share: samples of the rank that has most.
    """

    step: int
    epoch: int
    indices: Sequence[int]
    global_size: int
    samples_seen: int
    world_size: int
    spare_index: int  # a sample of this batch, for the passes of a rank that has none left
    first: int
    largest_share: int

    @property
    def weight(self) -> float:
        """What to multiply the mean loss over `indices_or_spare` by, so that the mean over ranks is that over all samples."""
        return self.world_size * len(self.indices) / self.global_size

    @property
    def indices_or_spare(self) -> Sequence[int]:
        """This rank's samples, or one sample of another rank where it has none (``weight`` is 0 then): never empty."""
        return self.indices or (self.spare_index,)

    def num_passes(self, size: int | None) -> int:
        """Give the passes of at most ``size`` samples (None: all at once) that this batch takes, the same on every rank."""
        if size is None:
            return 1
        if size < 1:
            raise ValueError(f"size is {size}; a micro-batch holds at least one sample")
        return -(-self.largest_share // size)

    def micro_batches(self, size: int | None = None) -> Iterator[MicroBatch]:
        """Cut this rank's samples into passes of at most ``size`` (None: one pass), equally many on every rank.

        With gradients summed over the passes and averaged over the ranks (what DDP and FSDP2 do) the result is the
        gradient of the mean loss over the global batch. Keep ``size`` fixed while the world changes: then only the order
        of summation differs. Raises ValueError for a size below 1.
        """
        passes = self.num_passes(size)
        size = size or self.largest_share
        for number in range(passes):
            rows = slice(number * size, min((number + 1) * size, len(self.indices)))
            own = self.indices[rows]
            weight = self.world_size * len(own) / self.global_size
            indices, rows = (own, rows) if own else (self.indices_or_spare[:1], slice(0, 1))
            yield MicroBatch(indices, weight, number == passes - 1, rows)


class _BatchPosition(NamedTuple):
    """Where a batch lies: from place ``first`` of its epoch on; part: this rank's places, counted from there."""

    step: int
    epoch: int
    first: int
    size: int
    part: range
    largest_share: int
    samples_seen: int


@dataclass(frozen=True, slots=True)
class ElasticBatches:
    """The global batches of a whole job: `epochs` passes over `dataset_size` samples, `global_batch` at a time.

    The plan is the same on every rank, in every generation and at every world size; only `iterate` and `batch` look at
    the world. Epochs do not share batches.
    source: where the order comes from, `ElasticBatches.over` makes a plan of one; by default a dataset that gives any
    sample by its index, shuffled by (seed, epoch). first_step, first_sample: where this plan takes over from another one
    with another global batch (`with_batch`).
    Raises ValueError for a size, batch or count below 1.
    """

    dataset_size: int
    global_batch: int
    seed: int = 0
    epochs: int = 1
    shuffle: bool = True
    source: Source | None = None
    first_step: int = 0
    first_sample: int = 0

    def __post_init__(self) -> None:
        for name in ("dataset_size", "global_batch", "epochs", "seed"):
            object.__setattr__(self, name, as_int(name, getattr(self, name)))
        for name in ("dataset_size", "global_batch", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.source is not None and len(self.source) != self.dataset_size:
            raise ValueError(f"dataset_size is {self.dataset_size}, but the source has {len(self.source)} samples")

    @classmethod
    def over(cls, source: Source, global_batch: int, *, epochs: int = 1) -> ElasticBatches:
        """Make the plan of a source that has an order of its own: `Shards`, `Mixture`. Raises TypeError for a dataset."""
        if not hasattr(source, "order"):
            raise TypeError(
                f"a {type(source).__name__} is no source with an order of its own (Shards, Mixture); of a dataset it is "
                "ElasticBatches(len(dataset), global_batch)"
            )
        return cls(len(source), global_batch, epochs=epochs, source=source)

    @property
    def num_indices(self) -> int:
        """Give how many samples the data must have at least: the indices in all batches are below it."""
        found: int = getattr(self.source, "num_indices", self.dataset_size)
        return found

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one whole epoch; the last may be a short one."""
        return -(-self.dataset_size // self.global_batch)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole job."""
        whole_epochs, rest = divmod(self.dataset_size * self.epochs - self.first_sample, self.dataset_size)
        return self.first_step + -(-rest // self.global_batch) + whole_epochs * self.steps_per_epoch

    def samples_after(self, step: int) -> int:
        """Give the samples that the job has consumed once ``step`` steps are complete. Any rank may call it."""
        steps = step - self.first_step
        rest = -self.first_sample % self.dataset_size  # of the epoch that this plan takes over in
        rest_steps = -(-rest // self.global_batch)
        if steps <= rest_steps:
            return self.first_sample + min(steps * self.global_batch, rest)
        epochs, steps = divmod(steps - rest_steps, self.steps_per_epoch)
        return self.first_sample + rest + epochs * self.dataset_size + min(steps * self.global_batch, self.dataset_size)

    def with_batch(self, global_batch: int, *, after_step: int) -> ElasticBatches:
        """Give the plan that goes on with another global batch after so many completed steps: no sample moves.

        For jobs whose batch grows with the world. Raises ValueError for a step that is not in this plan.
        """
        self._check_step(after_step)
        return replace(
            self, global_batch=global_batch, first_step=after_step, first_sample=self.samples_after(after_step)
        )

    def iterate(
        self, rank: int, world_size: int, start_step: int = 0, *, local_sizes: Sequence[int] = (), grain: int = 1
    ) -> Iterator[Batch]:
        """Give this rank's batches from the one after ``start_step`` completed steps to the end of the job.

        start_step: completed optimizer steps, as a checkpoint has them; beginning there costs no more than at 0.
        local_sizes: samples of every rank in a full batch, where the parts shall not be even (`plan_batch`). grain: hand
        out whole groups of so many samples (`fixed_order_passes`). world_size: of the data-parallel ranks.
        Raises ValueError when start_step is beyond the job's end, which means that the plan is not the one that was
        saved, and for local sizes that do not sum up to the global batch. Where the world is that of torch.distributed's default
        group, the first call there also raises DataError when other ranks have another plan, or another has this rank.
        """
        place = RankInWorld(rank, world_size, tuple(local_sizes))
        return self.iterate_at(place, start_step, grain=grain)

    def iterate_at(self, place: RankInWorld, start_step: int = 0, *, grain: int = 1) -> Iterator[Batch]:
        """As `iterate`, for callers that keep rank, world size and local sizes together."""
        start_step = as_int("start_step", start_step or self.first_step)
        rank, world_size = as_int("rank", place.rank), as_int("world_size", place.world_size)
        place = RankInWorld(rank, world_size, place.local_sizes)
        self._check_step(start_step)
        split = BatchSplit.of(place.world_size, place.local_sizes, grain)
        if place.local_sizes and sum(place.local_sizes) != self.global_batch:
            raise ValueError(
                f"local_sizes sum up to {sum(place.local_sizes)}, but the global batch is {self.global_batch}"
            )
        split.part(self.global_batch, place.rank)  # refuses a rank outside the world now and not at the first batch
        position = {
            "start_step": start_step,
            "samples before it": self.samples_after(start_step),
            "epochs": self.epochs,
        }
        cut = {"global_batch": self.global_batch, "local_sizes": list(place.local_sizes), "grain": grain}
        check_same_plan({**self._source().describe(), **position, **cut}, place)
        return self._batches(range(start_step + 1, self.total_steps + 1), place.rank, split)

    def batch(self, step: int, rank: int, world_size: int) -> Batch:
        """Give one rank's part of the batch that makes optimizer step ``step`` (from 1)."""
        if not self.first_step < step <= self.total_steps:
            raise ValueError(f"step is {step}; this job has steps {self.first_step + 1} to {self.total_steps}")
        return next(self._batches(range(step, step + 1), rank, BatchSplit.of(world_size)))

    def state_dict(self, step: int) -> dict[str, Any]:
        """Give the place after ``step`` completed steps as JSON values, the same on every rank: for a checkpoint."""
        return {
            "v": 1,
            "step": step,
            "samples": self.samples_after(step),
            "epochs": self.epochs,
            "source": self._source().describe(),
        }

    def resumed(self, state: Mapping[str, Any]) -> ElasticBatches:
        """Give this plan from the place that `state_dict` described, whatever global batch and world it was reached with.

        It begins there: `iterate` needs no start_step.
        Raises DataError, in one sentence, when the state is of other data or is no such state.
        """
        try:
            version, step, samples, epochs = (int(state[name]) for name in ("v", "step", "samples", "epochs"))
            was = dict(state["source"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"this is no data position of elastipod: {error!r} in {str(state)[:200]}") from error
        if version != 1:
            raise DataError(f"the data position has version {version}; this elastipod knows version 1")
        now = self._source().describe()
        for name in sorted({*was, *now}):
            if was.get(name) != now.get(name):
                raise DataError(
                    f"the data position was saved with {name} {was.get(name)!r}, but now it is {now.get(name)!r}; resume "
                    "with the same data, or start from the beginning"
                )
        if not 0 <= samples <= self.dataset_size * self.epochs:
            raise DataError(
                f"the data position is after {samples} samples, but {self.epochs} epochs of {self.dataset_size} have "
                f"{self.dataset_size * self.epochs}; it was saved with {epochs} epochs"
            )
        return replace(self, first_step=step, first_sample=samples)

    def _batches(self, steps: range, rank: int, split: BatchSplit) -> Iterator[Batch]:
        """Make batches. Where the order knows many samples at once, those of ever more steps ahead are looked up together."""
        ahead: list[_BatchPosition] = []
        samples, enough = 0, 1
        for cut in self._positions(steps, rank, split):
            if ahead and (samples >= enough or cut.epoch != ahead[0].epoch):
                order = self._order(ahead[0].epoch)
                yield from _batches_at(ahead, order, split.world_size)
                samples, enough = 0, min(2 * enough, _MAX_LOOKUP) if hasattr(order, "take") else 1
                ahead.clear()
            ahead.append(cut)
            samples += max(1, len(cut.part))
        if ahead:
            yield from _batches_at(ahead, self._order(ahead[0].epoch), split.world_size)

    def _positions(self, steps: range, rank: int, split: BatchSplit) -> Iterator[_BatchPosition]:
        before = self.samples_after(steps.start - 1)
        known: dict[int, tuple[range, int]] = {}  # nearly all batches are of one size
        for step in steps:
            epoch, first = divmod(before, self.dataset_size)
            size = min(self.global_batch, self.dataset_size - first)
            if size not in known:
                known[size] = split.part(size, rank), split.largest(size)
            part, largest_share = known[size]
            before += size
            yield _BatchPosition(step, epoch, first, size, part, largest_share, before)

    def _check_step(self, step: int) -> None:
        if not self.first_step <= step <= self.total_steps:
            begin = f" and this plan begins after step {self.first_step}" if self.first_step else ""
            raise ValueError(
                f"start_step is {step}, but this job has {self.total_steps} steps{begin}; was its data changed?"
            )

    def _source(self) -> Source:
        return self.source or MapSource(self.dataset_size, self.seed, self.shuffle)

    def _order(self, epoch: int) -> Order:
        return self._source().order(epoch)


def _batches_at(cuts: Sequence[_BatchPosition], order: Order, world_size: int) -> Iterator[Batch]:
    """Look up the samples of batches of one epoch."""
    indices = indices_at(order, [cut.first + offset for cut in cuts for offset in cut.part])
    start = 0
    for cut in cuts:
        end = start + len(cut.part)
        yield Batch(
            step=cut.step,
            epoch=cut.epoch,
            indices=tuple(indices[start:end]),
            global_size=cut.size,
            samples_seen=cut.samples_seen,
            world_size=world_size,
            spare_index=indices[start] if cut.part else order[cut.first],
            first=cut.part.start,
            largest_share=cut.largest_share,
        )
        start = end
