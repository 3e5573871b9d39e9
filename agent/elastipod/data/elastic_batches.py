"""Data by global position: which samples each rank uses at each step, for any number of ranks.

Each epoch has one canonical order. The position of a job in its data is one number, the samples that it has trained on, which
follows from its optimizer steps. So a resize needs no bookkeeping: every rank computes its part of the next global batch from
that number. Nothing is dropped and nothing is padded. The last batch of an epoch may be short and the parts of ranks may differ
in size; the weights below make the averaged gradient equal to that of a single process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from elastipod.data.batch_split import BatchSplit
from elastipod.data.plan_check import check_same_plan
from elastipod.data.sources import MapSource, Order, Source, as_int, indices_at
from elastipod.errors import DataError
from elastipod.mesh import place_of
from elastipod.rank_in_world import RankInWorld

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_MAX_LOOKUP = 4096  # samples that are looked up at once, which takes about a millisecond


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples of one forward and backward pass on one rank.

    indices: dataset indices, never empty. weight: multiply the *mean* loss over them by it before backward(). is_last: gradients
    are reduced over the ranks in this pass. rows: the slice of the batch's `indices_or_spare` that holds the indices, for
    slicing tensors that were loaded for the whole batch.
    A rank without samples left gets one sample with weight 0: its pass takes part in the collectives that DDP and FSDP2 need
    from every rank, and adds nothing to the gradient.
    """

    indices: Sequence[int]
    weight: float
    is_last: bool
    rows: slice = field(compare=False)  # it has no hash


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's part of one global batch.

    Train it with `micro_batches` or `accumulate`, which handle every batch correctly. A rank may have no sample: the last batch
    of an epoch can have fewer samples than there are ranks, and local sizes may be 0. The mean loss over no ``indices`` is NaN,
    and NaN times the weight 0 is NaN too, so use `indices_or_spare` to load a batch as a whole.

    step: the optimizer step that the batch makes, counted over the job from 1. epoch: from 0. indices: this rank's samples as
    dataset indices, possibly none. global_size: samples of all ranks together. samples_seen: by the job, after this step.
    spare_index: a sample of this batch for the passes of a rank without samples. first: position of this rank's first sample in
    the global batch. largest_share: samples of the rank that has most.
    """

    step: int
    epoch: int
    indices: Sequence[int]
    global_size: int
    samples_seen: int
    world_size: int
    spare_index: int
    first: int
    largest_share: int

    @property
    def weight(self) -> float:
        """Factor on the mean loss over `indices_or_spare`; with it the mean over the ranks is the mean over all samples."""
        return self.world_size * len(self.indices) / self.global_size

    @property
    def indices_or_spare(self) -> Sequence[int]:
        """This rank's samples, or one sample of another rank if it has none (``weight`` is 0 then). Never empty."""
        return self.indices or (self.spare_index,)

    def num_passes(self, size: int | None) -> int:
        """Give the number of passes of at most ``size`` samples (None: one pass), the same on every rank."""
        if size is None:
            return 1
        if as_int("size", size) < 1:
            raise ValueError(f"size is {size}; a micro-batch holds at least one sample")
        return -(-self.largest_share // size)

    def micro_batches(self, size: int | None = None) -> Iterator[MicroBatch]:
        """Divide this rank's samples into passes of at most ``size`` (None: one pass); every rank gets the same number of passes.

        Gradients that are summed over the passes and averaged over the ranks, as DDP and FSDP2 do, are the gradient of the mean
        loss over the global batch. Keep ``size`` fixed when the world size changes; then only the order of summation differs.
        Raises ValueError for a size below 1.
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
    """The position of a batch: it begins at ``first`` in its epoch. part: this rank's positions, relative to ``first``."""

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

    The plan is the same on every rank, in every generation and at every world size; only `iterate` and `batch` depend on the
    world. A batch never spans two epochs.
    source: defines the order, see `ElasticBatches.over`; by default a dataset that gives any sample by its index, shuffled by
    (seed, epoch). first_step, first_sample: where this plan continues another one that has another global batch (`with_batch`).
    Raises ValueError for a size, batch or count below 1, and TypeError for a value that is not a whole number.
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
        """Give the plan for a source with an order of its own: `Shards` or `Mixture`. Raises TypeError for a dataset."""
        if not hasattr(source, "order"):
            raise TypeError(
                f"a {type(source).__name__} is no source with an order of its own (Shards, Mixture); of a dataset it is "
                "ElasticBatches(len(dataset), global_batch)"
            )
        return cls(len(source), global_batch, epochs=epochs, source=source)

    @property
    def num_indices(self) -> int:
        """The least number of samples that the data must have; all indices in batches are below it."""
        found: int = getattr(self.source, "num_indices", self.dataset_size)
        return found

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch; the last one may have a short batch."""
        return -(-self.dataset_size // self.global_batch)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole job."""
        whole_epochs, rest = divmod(self.dataset_size * self.epochs - self.first_sample, self.dataset_size)
        return self.first_step + -(-rest // self.global_batch) + whole_epochs * self.steps_per_epoch

    def samples_after(self, step: int) -> int:
        """Give the samples that the job has trained on after ``step`` completed steps. Any rank may call it."""
        steps = step - self.first_step
        rest = -self.first_sample % self.dataset_size  # of the epoch in which this plan begins
        rest_steps = -(-rest // self.global_batch)
        if steps <= rest_steps:
            return self.first_sample + min(steps * self.global_batch, rest)
        epochs, steps = divmod(steps - rest_steps, self.steps_per_epoch)
        return self.first_sample + rest + epochs * self.dataset_size + min(steps * self.global_batch, self.dataset_size)

    def with_batch(self, global_batch: int, *, after_step: int) -> ElasticBatches:
        """Give the plan that continues with another global batch after ``after_step`` completed steps. The order stays the same.

        For jobs whose batch grows with the world. Raises ValueError for a step outside this plan.
        """
        self._check_step(after_step)
        return replace(
            self, global_batch=global_batch, first_step=after_step, first_sample=self.samples_after(after_step)
        )

    def iterate(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        start_step: int = 0,
        *,
        dp_mesh: DeviceMesh | None = None,
        local_sizes: Sequence[int] = (),
        grain: int = 1,
    ) -> Iterator[Batch]:
        """Give this rank's batches from the one after ``start_step`` completed steps to the end of the job.

        rank, world_size: of the data-parallel ranks; dp_mesh: a mesh that says both, as `build_mesh` makes it, or the data-parallel part
        of one, such as ``mesh["dp"]``. start_step: completed optimizer steps, from the checkpoint; starting there
        costs no more than starting at 0. local_sizes: samples of each rank in a full batch, for uneven parts (`plan_batch`).
        grain: divide the batch only between groups of this many samples (`fixed_order_passes`).
        Raises ValueError when start_step is after the end of the job (then this is not the plan that was saved), for a rank
        outside the world, and for local sizes that do not sum up to the global batch. When world_size is that of
        torch.distributed's default group, the first call also raises DataError if other ranks have another plan or the same rank.
        """
        return self.iterate_at(place_of(rank, world_size, dp_mesh, local_sizes), start_step, grain=grain)

    def iterate_at(
        self, place: RankInWorld, start_step: int = 0, *, grain: int = 1, is_compared: bool = False
    ) -> Iterator[Batch]:
        """As `iterate`, for a caller that keeps rank, world size and local sizes together.

        is_compared: the caller knows that all ranks have this plan, and places of their own.
        """
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
        if not is_compared:
            check_same_plan({**self._source().describe(), **position, **cut}, place)
        return self._batches(range(start_step + 1, self.total_steps + 1), place.rank, split)

    def batch(
        self, step: int, rank: int | None = None, world_size: int | None = None, *, dp_mesh: DeviceMesh | None = None
    ) -> Batch:
        """Give one rank's part of the batch of optimizer step ``step`` (from 1); arguments as for `iterate`.

        Raises ValueError outside the job.
        """
        if not self.first_step < step <= self.total_steps:
            raise ValueError(f"step is {step}; this job has steps {self.first_step + 1} to {self.total_steps}")
        place = place_of(rank, world_size, dp_mesh)
        return next(self._batches(range(step, step + 1), place.rank, BatchSplit.of(place.world_size)))

    def state_dict(self, step: int) -> dict[str, Any]:
        """Give the position after ``step`` completed steps as JSON values for a checkpoint, the same on every rank.

        Raises ValueError for a step before the one that this plan was resumed at.
        """
        if step < self.first_step:
            raise ValueError(
                f"step is {step}, but this plan begins after step {self.first_step}; until its first step is complete, give "
                f"first_step ({self.first_step})"
            )
        return {
            "v": 1,
            "step": step,
            "samples": self.samples_after(step),
            "epochs": self.epochs,
            "source": self._source().describe(),
        }

    def resumed(self, state: Mapping[str, Any]) -> ElasticBatches:
        """Give this plan from the position in ``state`` on, whatever the global batch and world size before.

        state: from `state_dict`. `iterate` of the new plan needs no start_step. Raises DataError when the state belongs to other
        data or is not a state of this kind.
        """
        try:
            version, step, samples, epochs = (int(state[name]) for name in ("v", "step", "samples", "epochs"))
            was = dict(state["source"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"this is not a data position of elastipod: {error!r} in {str(state)[:200]}") from error
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
        """Give batches. If the order can look up many samples at once, the samples of more and more steps are looked up together."""
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
        known: dict[int, tuple[range, int]] = {}  # nearly all batches have the same size
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
    """Look up the samples of batches of one epoch, and give the batches."""
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
