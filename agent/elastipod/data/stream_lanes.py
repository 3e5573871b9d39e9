"""Samples of streams whose lengths nobody knows: a fixed number of lanes, each a stream that keeps its own position.

Every step takes the same number of samples from each lane, so the position of a lane changes only with the steps. When the world
size changes, other ranks continue the lanes at their saved positions. A lane that ends begins again: lanes end at different
steps, so there is no common epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

from elastipod.data.elastic_batches import Batch, ElasticBatches
from elastipod.errors import BatchSizeError, DataError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Stream(Iterable[T_co], Protocol[T_co]):
    """Samples one after the other, such as an IterableDataset of Hugging Face's datasets.

    state_dict gives, as JSON values, the position after the sample that the iterator gave last; an iterator that is made after
    load_state_dict begins there.
    """

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class StreamLanes(Generic[T]):
    """Reads the lanes whose samples this rank trains. Each process makes its own, and reads in the process that trains."""

    def __init__(self, open_lane: Callable[[int], Stream[T]], lanes: int, *, global_batch: int) -> None:
        """open_lane: opens a lane (from 0) at its beginning. global_batch: samples of a step, a multiple of ``lanes``.

        Keep both numbers for the life of the job. Raises BatchSizeError for numbers that do not fit together.
        """
        if not 0 < lanes <= global_batch or global_batch % lanes:
            raise BatchSizeError(f"{lanes} lanes cannot share a global batch of {global_batch}; use a divisor of it")
        self._layout = {"v": 1, "lanes": lanes, "global_batch": global_batch}
        self._open_lane, self.lanes, self.grain = open_lane, lanes, global_batch // lanes
        self._saved: dict[str, Any] = {}  # by lane, as text: JSON has no other keys
        self._open: dict[str, tuple[Stream[T], Iterator[T]]] = {}
        self._own: set[str] = set()  # the lanes of the batch that was read last
        self._step = 0

    def plan(self, steps: int) -> ElasticBatches:
        """Give the plan of so many steps. Iterate over it with ``grain=lanes.grain``; its indices are places in the batch."""
        return ElasticBatches(self.lanes * self.grain, self.lanes * self.grain, epochs=steps, shuffle=False)

    def read(self, batch: Batch) -> list[T]:
        """Give this rank's samples of the batch after the one that was read last; a pass trains ``samples[part.rows]``.

        Raises BatchSizeError when there are more ranks than lanes, DataError for batches out of order, for one that divides a
        lane between two ranks, and for a lane without samples.
        """
        if batch.world_size > self.lanes:
            raise BatchSizeError(f"{batch.world_size} ranks have {self.lanes} lanes; use more lanes or fewer ranks")
        if batch.first % self.grain or len(batch.indices) % self.grain:
            raise DataError(f"two ranks would read one lane; iterate over the plan with grain={self.grain}")
        if batch.step != self._step + 1:
            raise DataError(f"the lanes are after step {self._step}, not {batch.step - 1}; load their state first")
        order = [str(index // self.grain) for index in batch.indices]
        self._step, self._own = batch.step, {*order}
        return [self._next(lane) for lane in order]

    def state_dict(self, step: int) -> dict[str, Any]:
        """Give the positions of all lanes after ``step`` as JSON values, the same on every rank. Collective.

        Raises DataError when the next batch has been read already.
        """
        from elastipod.collectives import all_gather_json  # it loads torch

        if step != self._step:
            raise DataError(f"the lanes are after step {self._step}, not {step}; read a batch in its own step")
        positions = dict(self._saved)
        for own in all_gather_json(lambda: {at: self._open[at][0].state_dict() for at in self._own}):
            positions.update(own)
        return {**self._layout, "step": step, "positions": positions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at positions that a world of any size saved. Raises DataError when they belong to other lanes."""
        for name, now in self._layout.items():
            if state.get(name) != now:
                raise DataError(f"the lanes were saved with {name} {state.get(name)!r}, but now it is {now}; keep it")
        self._saved, self._step = dict(state["positions"]), state["step"]
        self._open, self._own = {}, set()

    def _next(self, lane: str) -> T:
        positions = [self._saved.get(lane), None] if lane not in self._open else [None]
        while True:
            for sample in self._open[lane][1] if lane in self._open else ():
                return sample
            if not positions:
                raise DataError(f"lane {lane} has no sample; use fewer lanes, so that each has data")
            stream = self._open_lane(int(lane))
            if (position := positions.pop(0)) is not None:
                stream.load_state_dict(position)
            self._open[lane] = stream, iter(stream)
