"""Loading with worker processes by global position; prefetched data is never part of the position.

Worker processes fetch ahead of the training, but the position counts only batches that the loop has taken completely. So a drain
or a crash loses no prefetched sample: the next generation fetches it again, divided among its own ranks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import tee
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from elastipod.data.elastic_batches import Batch, ElasticBatches, MicroBatch
from elastipod.data.tokens import TokenWindows
from elastipod.errors import DataError
from elastipod.mesh import place_of
from elastipod.rank_in_world import RankInWorld
from elastipod.shuffle import splitmix64

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
_SET_BY_THE_PLAN = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")  # options of a DataLoader
_IN_ORDER = "take all passes of a batch before the next one"
CutBatch = tuple[Batch, tuple[MicroBatch, ...]]


class ElasticBatchSampler(Sampler[list[int]]):
    """A `batch_sampler` for torch's DataLoader or torchdata's StatefulDataLoader: one list of indices for each pass of one rank.

    Its state, and the state of a StatefulDataLoader with it, is the global position: any rank of any world can load it. A step
    counts once all its passes were given out; otherwise it is repeated from its first pass. Leave `in_order` True and
    `snapshot_every_n_steps` of StatefulDataLoader 1, and do not change its number of workers.
    """

    def __init__(
        self,
        plan: ElasticBatches,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        dp_mesh: DeviceMesh | None = None,
        micro_batch: int,
        start_step: int = 0,
        local_sizes: Sequence[int] = (),
    ) -> None:
        """micro_batch: maximum number of samples in one pass. The other arguments are those of `ElasticBatches.iterate`."""
        self._plan, self._micro_batch = plan, micro_batch
        self._place = place_of(rank, world_size, dp_mesh, local_sizes)
        self._start_step = start_step or plan.first_step

    def __iter__(self) -> PassIterator:
        return PassIterator(self, self.passes(), self._start_step)

    def batches(self) -> Iterator[Batch]:
        """Give the batches of an iteration from the current position to the end of the job. Load a state before you call it."""
        return self._plan.iterate_at(self._place, self._start_step)

    def passes(self) -> Iterator[CutBatch]:
        """Give the same batches, each with its micro-batches."""
        return ((batch, tuple(batch.micro_batches(self._micro_batch))) for batch in self.batches())

    @property
    def total_steps(self) -> int:
        """Steps of the whole job, given the position that was loaded."""
        return self._plan.total_steps

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Give the position after ``step`` completed steps; by default where the next iteration begins."""
        return self._plan.state_dict(self._start_step if step is None else step)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the next iteration at a saved position. Raises DataError when it belongs to other data."""
        self._plan = self._plan.resumed(state_dict)
        self._start_step = int(state_dict["step"])


class PassIterator(Iterator[list[int]]):
    """One iteration over the passes. Its state counts the steps whose passes were all given out."""

    def __init__(self, sampler: ElasticBatchSampler, batches: Iterator[CutBatch], start_step: int) -> None:
        self._sampler, self._batches = sampler, batches
        self._passes: Iterator[MicroBatch] = iter(())
        self.step = start_step  # steps whose passes were all given out
        self.samples = 0  # of this rank, given out

    def __iter__(self) -> PassIterator:
        return self

    def __next__(self) -> list[int]:
        part = next(self._passes, None)
        if part is None:
            self._passes = iter(next(self._batches)[1])
            part = next(self._passes)
        self.step += part.is_last
        self.samples += len(part.indices) if part.weight else 0
        return list(part.indices)

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.state_dict(self.step)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state_dict)
        self._batches, self._passes, self.step = self._sampler.passes(), iter(()), int(state_dict["step"])


class ElasticLoader(Generic[T]):
    """Gives a rank's batches with their data, which worker processes prefetch.

    ``for batch, passes in loader: for micro_batch, data in passes: ...`` The data of a pass is what `collate_fn` makes of its
    samples. A batch counts as trained once its last pass was taken, so the loop may save a checkpoint in that pass. Each rank
    creates its own loader, for one generation.

    As a member of `elastipod.State`, it is made without a rank, which State tells it in each generation, and gives the data of
    the loop's batches: ``for micro_batch, data in state.loader.passes(batch): ...``
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        plan: ElasticBatches,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        dp_mesh: DeviceMesh | None = None,
        micro_batch: int,
        start_step: int = 0,
        local_sizes: Sequence[int] = (),
        **options: Any,
    ) -> None:
        """dataset: gives samples by index. options: of torch's DataLoader (num_workers, collate_fn, prefetch_factor, ...).

        The other arguments are those of `ElasticBatchSampler`; without rank, world_size and dp_mesh, `set_world` tells the place.
        Raises DataError for a dataset without access by index or with fewer samples than the plan needs, for options that the plan
        decides, and for in_order=False, which would give passes the data of other passes.
        """
        _check_dataset(dataset, plan)
        if planned := [name for name in _SET_BY_THE_PLAN if name in options]:
            raise DataError(f"{planned[0]} cannot be given: the plan decides the order of the samples; leave it out")
        if not options.get("in_order", True):
            raise DataError("in_order=False gives passes the data of other passes; leave it out")
        self._dataset, self._plan, self._options = dataset, plan, options
        self._place = None
        if (rank, world_size, dp_mesh) != (None, None, None):
            self._place = place_of(rank, world_size, dp_mesh, local_sizes)
        self._local_sizes = tuple(local_sizes)
        self._follows_worlds = False
        self._micro_batch = micro_batch
        self._step = start_step or plan.first_step
        self._handed_out: PassIterator | None = None
        self._taken_samples = 0
        self._running: Generator[tuple[Batch, Iterator[tuple[MicroBatch, T]]], None, None] | None = None

    _place: RankInWorld | None

    @property
    def step(self) -> int:
        """Completed steps: those before this loader, and those whose last pass the loop has taken."""
        return self._step

    @property
    def total_steps(self) -> int:
        """Steps of the whole job, given the position that was loaded."""
        return self._plan.total_steps

    @property
    def prefetched(self) -> int:
        """Samples of this rank that are requested or fetched and not taken yet. The next generation fetches them again."""
        return self._handed_out.samples - self._taken_samples if self._handed_out else 0

    def state_dict(self) -> dict[str, Any]:
        """Give the global position after the last completed step as JSON values, the same on every rank."""
        return self._plan.state_dict(self._step)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a position that any rank of any world saved.

        Raises DataError for other data, or after iteration began, unless `set_world` has been called.
        """
        if self._follows_worlds:
            self.close()
        if self._running is not None:
            raise DataError("a data position can be loaded before the first batch only; make a new loader")
        self._plan = self._plan.resumed(state_dict)
        self._step = int(state_dict["step"])

    def __iter__(self) -> Iterator[tuple[Batch, Iterator[tuple[MicroBatch, T]]]]:
        """Give the batches up to the end of the job. A second iteration continues where the first one stopped."""
        self.close()
        self._running = self._run()
        return self._running

    def set_world(self, rank: int, world_size: int) -> None:
        """Give the batches of this rank from now on; `State` calls it in each generation. Prefetched data is dropped."""
        self.close()
        self._place, self._follows_worlds = RankInWorld(rank, world_size, self._local_sizes), True

    def passes(self, batch: Batch) -> Iterator[tuple[MicroBatch, T]]:
        """Give the passes of a batch of a loop that has its batches from elsewhere, as that of `State.steps`, with their data.

        The data of the batches that follow in the plan is prefetched meanwhile; where a loop goes elsewhere, prefetching starts again.
        The batch counts as trained at once: where its step is broken off, `State` puts the position back. Raises DataError when
        the loader's plan has another batch at this step, and TypeError before `set_world`.
        """
        if self._running is None or batch.step != self._step + 1:
            self.close()
            self._step = batch.step - 1
            self._running = self._run()
        own, parts = next(self._running, (None, iter(())))
        if own is None or own.indices != batch.indices:
            self.close()
            raise DataError(
                f"the loader's plan has other samples at step {batch.step} than the loop's; give State.steps and the loader the same "
                "plan and the same local_sizes, and no grain"
            )
        self._step = batch.step
        return parts

    def close(self) -> None:
        """End the worker processes. Prefetched data is dropped and will be fetched again."""
        if self._running is not None:
            self._running.close()
        self._running, self._handed_out, self._taken_samples = None, None, 0

    def __enter__(self) -> ElasticLoader[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> Generator[tuple[Batch, Iterator[tuple[MicroBatch, T]]], None, None]:
        if self._place is None:
            raise TypeError(
                "the loader has no rank yet; give it rank and world_size, or dp_mesh, or make it a member of State"
            )
        sampler = ElasticBatchSampler(
            self._plan,
            rank=self._place.rank,
            world_size=self._place.world_size,
            micro_batch=self._micro_batch,
            start_step=self._step,
            local_sizes=self._place.local_sizes,
        )
        to_load, to_give = tee(sampler.passes())
        self._handed_out = PassIterator(sampler, to_load, self._step)
        # Otherwise torch would draw the workers' seed from its own random state, which resuming has just restored.
        seed = splitmix64(splitmix64(splitmix64(torch.initial_seed()) ^ self._step) ^ self._place.rank)
        options = {"generator": torch.Generator().manual_seed(seed), **self._options}
        loaded = [
            _load_passes(self._dataset, self._handed_out, options)
        ]  # the only reference: the processes end with it
        try:
            for batch, passes in to_give:
                parts = _Passes(batch.step, self._parts(batch, passes, loaded))
                yield batch, parts
                parts.skip()
        finally:
            loaded.clear()

    def _parts(
        self, batch: Batch, passes: Iterable[MicroBatch], loaded: list[Iterator[T]]
    ) -> Iterator[tuple[MicroBatch, T]]:
        for part in passes:
            if not loaded:
                raise DataError(f"step {batch.step} belongs to an iteration that has ended; {_IN_ORDER}")
            data = next(loaded[0])
            self._taken_samples += len(part.indices) if part.weight else 0
            if part.is_last:
                self._step = batch.step
            yield part, data


class _Passes(Iterator[tuple[MicroBatch, T]]):
    """The passes of one batch. A loop may leave them early; one that looks ahead and comes back to them would train nothing."""

    def __init__(self, step: int, parts: Iterator[tuple[MicroBatch, T]]) -> None:
        self._step, self._parts = step, parts
        self._was_skipped = False

    def __next__(self) -> tuple[MicroBatch, T]:
        if self._was_skipped:
            raise DataError(
                f"the data of step {self._step} was skipped, because the next batch was taken first; {_IN_ORDER}"
            )
        return next(self._parts)

    def skip(self) -> None:
        """Take what is left, so that the data of the next batch comes next."""
        for _ in self._parts:
            self._was_skipped = True


def _check_dataset(dataset: object, plan: ElasticBatches) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"a {type(dataset).__name__} does not give samples by index, so a resize could not divide them; for data "
            "that is read sequentially use Shards and a ShardReader, or StreamLanes"
        )
    try:
        size = len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return  # its length is not known
    if size < plan.num_indices:
        raise DataError(
            f"the dataset has {size} samples, but the plan has indices up to {plan.num_indices - 1}; was the data changed?"
        )


def _load_passes(dataset: Any, passes: PassIterator, options: Mapping[str, Any]) -> Iterator[Any]:
    """Give the data of passes as torch's DataLoader would, with worker processes if the options ask for them.

    Without worker processes it does not use the DataLoader's iterator, which costs as much as loading a small batch.
    """
    loader = DataLoader(dataset, batch_sampler=passes, **options)  # raises for options that exclude each other
    if loader.num_workers or loader.pin_memory:
        with _frozen_garbage():
            return iter(loader)
    if (
        type(dataset) is TokenWindows and options.get("collate_fn") is None
    ):  # a batch at once, instead of single windows
        return (dataset.batch(indices) for indices in passes)
    fetch: Callable[[list[int]], Any] = getattr(dataset, "__getitems__", None) or (lambda at: [dataset[i] for i in at])
    collate: Callable[[Any], Any] = loader.collate_fn
    return (collate(fetch(indices)) for indices in passes)


@contextmanager
def _frozen_garbage() -> Iterator[None]:
    """Keep processes that are forked inside the block from collecting garbage that exists already.

    The process group of the last generation may be garbage in a reference cycle. In a forked process, which has none of its
    threads, its destructor would wait for them for ever. The documentation of the gc module advises this.
    """
    if gc.get_freeze_count():  # the fork server froze most objects for good, so collecting the rest is quick
        gc.collect()
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
