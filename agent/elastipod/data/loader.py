"""Loading with worker processes by global position: what is prefetched is never part of the position.

Workers fetch ahead of the training; the place of a job counts only batches that the loop has taken whole. So a drain or a
crash loses nothing that was prefetched, and the next generation fetches it again, shared out over its own world.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import tee
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from elastipod.data.elastic_batches import Batch, ElasticBatches, MicroBatch
from elastipod.data.tokens import TokenWindows
from elastipod.errors import DataError
from elastipod.rank_in_world import RankInWorld
from elastipod.shuffle import splitmix64

T = TypeVar("T")
_SET_BY_THE_PLAN = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")  # options of a DataLoader
CutBatch = tuple[Batch, tuple[MicroBatch, ...]]


class ElasticBatchSampler(Sampler[list[int]]):
    """The passes of one rank as lists of indices: the `batch_sampler` of torch's DataLoader or torchdata's StatefulDataLoader.

    Its state, and that of a StatefulDataLoader around it, is the global position: it may be loaded on any rank of any world.
    A step of which only some passes were handed out does not count; it is given again from its first pass. Leave
    `in_order` at True, `snapshot_every_n_steps` of StatefulDataLoader at 1, and its number of workers as it was.
    """

    def __init__(
        self,
        plan: ElasticBatches,
        *,
        rank: int,
        world_size: int,
        micro_batch: int,
        start_step: int = 0,
        local_sizes: Sequence[int] = (),
    ) -> None:
        """micro_batch: samples of one pass at most; the other arguments are those of `ElasticBatches.iterate`."""
        self._plan, self._micro_batch = plan, micro_batch
        self._place = RankInWorld(rank, world_size, tuple(local_sizes))
        self._start_step = start_step or plan.first_step

    def __iter__(self) -> PassIterator:
        return PassIterator(self, self.passes(), self._start_step)

    def batches(self) -> Iterator[Batch]:
        """Give the batches whose passes an iteration from here gives, up to the job's end. Call it once a place was loaded."""
        return self._plan.iterate_at(self._place, self._start_step)

    def passes(self) -> Iterator[CutBatch]:
        """Give the same batches, each with its passes."""
        return ((batch, tuple(batch.micro_batches(self._micro_batch))) for batch in self.batches())

    @property
    def total_steps(self) -> int:
        """Steps of the whole job, as it goes on from the place that was loaded."""
        return self._plan.total_steps

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Give the place after ``step`` completed steps, by default where the next iteration begins."""
        return self._plan.state_dict(self._start_step if step is None else step)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the next iteration at a place. Raises DataError when it is one of other data."""
        self._plan = self._plan.resumed(state_dict)
        self._start_step = int(state_dict["step"])


class PassIterator(Iterator[list[int]]):
    """One run through the passes. Its state counts the steps of which all passes were handed out."""

    def __init__(self, sampler: ElasticBatchSampler, batches: Iterator[CutBatch], start_step: int) -> None:
        self._sampler, self._batches = sampler, batches
        self._passes: Iterator[MicroBatch] = iter(())
        self.step = start_step  # all passes were handed out
        self.samples = 0  # of this rank, handed out

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
    """Gives a rank's batches with their data, fetched ahead by worker processes.

    ``for batch, passes in loader: for part, data in passes: ...`` Data of a pass is what `collate_fn` makes of its samples.
    A batch counts as trained from its last pass on, in which the loop may save already. One loader is for one generation; every
    rank makes its own.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        plan: ElasticBatches,
        *,
        rank: int,
        world_size: int,
        micro_batch: int,
        start_step: int = 0,
        local_sizes: Sequence[int] = (),
        **options: Any,
    ) -> None:
        """dataset: gives samples by index. options: of torch's DataLoader (num_workers, collate_fn, prefetch_factor, ...).

        Raises DataError for a dataset with fewer samples than the plan names or none by index, for options that are the
        plan's affair, and for in_order=False, with which data would come to passes that it does not belong to.
        """
        _check_dataset(dataset, plan)
        if planned := [name for name in _SET_BY_THE_PLAN if name in options]:
            raise DataError(f"{planned[0]} cannot be given: the plan says which samples come when; leave it out")
        if not options.get("in_order", True):
            raise DataError("in_order=False gives passes the data of others; leave it out")
        self._dataset, self._plan, self._options = dataset, plan, options
        self._place = RankInWorld(rank, world_size, tuple(local_sizes))
        self._micro_batch = micro_batch
        self._step = start_step or plan.first_step
        self._handed_out: PassIterator | None = None
        self._taken_samples = 0
        self._running: Generator[tuple[Batch, Iterator[tuple[MicroBatch, T]]], None, None] | None = None

    @property
    def step(self) -> int:
        """Completed steps: those before this loader began, and those whose last pass the loop has taken."""
        return self._step

    @property
    def total_steps(self) -> int:
        """Steps of the whole job, as it goes on from the place that was loaded."""
        return self._plan.total_steps

    @property
    def prefetched(self) -> int:
        """Samples of this rank that are being fetched, or fetched and not taken yet. The next generation gets them again."""
        return self._handed_out.samples - self._taken_samples if self._handed_out else 0

    def state_dict(self) -> dict[str, Any]:
        """Give the global position as JSON values, the same on every rank: after the last completed step."""
        return self._plan.state_dict(self._step)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on at a place that any rank of any world has saved. Raises DataError for other data, or once iterating."""
        if self._running is not None:
            raise DataError("a data position can be loaded before the first batch only; make a new loader")
        self._plan = self._plan.resumed(state_dict)
        self._step = int(state_dict["step"])

    def __iter__(self) -> Iterator[tuple[Batch, Iterator[tuple[MicroBatch, T]]]]:
        """Give the batches up to the job's end. A second iteration goes on where the first was left."""
        self.close()
        self._running = self._run()
        return self._running

    def close(self) -> None:
        """End the worker processes; what they have prefetched is dropped and not lost."""
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
        # Otherwise torch would draw the workers' seed from its own random state, which a resume has just restored.
        seed = splitmix64(splitmix64(splitmix64(torch.initial_seed()) ^ self._step) ^ self._place.rank)
        options = {"generator": torch.Generator().manual_seed(seed), **self._options}
        loaded = [
            _load_passes(self._dataset, self._handed_out, options)
        ]  # the only reference: its processes end with it
        try:
            for batch, passes in to_give:
                parts = self._parts(batch, passes, loaded)
                yield batch, parts
                for _ in parts:
                    pass  # the loop left the batch early: the next one still begins at its own data
        finally:
            loaded.clear()

    def _parts(
        self, batch: Batch, passes: Iterable[MicroBatch], loaded: list[Iterator[T]]
    ) -> Iterator[tuple[MicroBatch, T]]:
        for part in passes:
            if not loaded:
                raise DataError(
                    f"step {batch.step} is of an iteration that has ended; take all passes of a batch before"
                )
            data = next(loaded[0])
            self._taken_samples += len(part.indices) if part.weight else 0
            if part.is_last:
                self._step = batch.step
            yield part, data


def _check_dataset(dataset: object, plan: ElasticBatches) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"a {type(dataset).__name__} does not give samples by index, so a resize could not share them out; what is read "
            "from the front goes into Shards and a ShardReader"
        )
    try:
        size = len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return  # one that does not say how long it is
    if size < plan.num_indices:
        raise DataError(
            f"the dataset has {size} samples, but the plan has indices up to {plan.num_indices - 1}; was the data changed?"
        )


def _load_passes(dataset: Any, passes: PassIterator, options: Mapping[str, Any]) -> Iterator[Any]:
    """Give the data of passes by torch's DataLoader; without worker processes by its rules, but not through its iterator.

    That one costs as much as a small batch does. options: the DataLoader's.
    """
    loader = DataLoader(dataset, batch_sampler=passes, **options)  # refuses options that do not go together
    if loader.num_workers or loader.pin_memory:
        with _frozen_garbage():
            return iter(loader)
    if (
        type(dataset) is TokenWindows and options.get("collate_fn") is None
    ):  # not to cut apart what is put together again
        return (dataset.batch(indices) for indices in passes)
    fetch: Callable[[list[int]], Any] = getattr(dataset, "__getitems__", None) or (lambda at: [dataset[i] for i in at])
    collate: Callable[[Any], Any] = loader.collate_fn
    return (collate(fetch(indices)) for indices in passes)


@contextmanager
def _frozen_garbage() -> Iterator[None]:
    """Keep processes that are forked meanwhile from destroying what is garbage already.

    Their collector would: and the destructor of the last generation's process group, which is garbage where it lay in a
    cycle, waits for its threads for ever in a process that has none of them. (What the gc module's documentation advises.)
    """
    if gc.get_freeze_count():  # most is frozen for good, as a warm start does: then the rest is soon gone through
        gc.collect()
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
