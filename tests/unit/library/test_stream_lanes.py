"""Streams of unknown length: at every world size each lane is read on from where it was, and nothing is read twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastipod.data import ElasticBatches
from elastipod.data.stream_lanes import StreamLanes
from elastipod.errors import BatchSizeError, DataError


class Lines:
    """A stream that keeps its position, and does not know its length."""

    def __init__(self, lane: int, length: int) -> None:
        self._lane, self._length, self._place = lane, length, 0

    def __iter__(self) -> Iterator[str]:
        while self._place < self._length:
            self._place += 1
            yield f"{self._lane}/{self._place - 1}"

    def state_dict(self) -> dict[str, Any]:
        return {"place": self._place}

    def load_state_dict(self, state: Any) -> None:
        self._place = state["place"]


def lanes_of(lengths: list[int], per_lane: int = 1) -> StreamLanes[str]:
    return StreamLanes(lambda lane: Lines(lane, lengths[lane]), len(lengths), global_batch=len(lengths) * per_lane)


def train(lengths: list[int], per_lane: int, steps: int, worlds: list[tuple[int, int]]) -> list[list[str]]:
    """Give the samples of each step. worlds: (size, step after which it leaves), one generation after the other."""
    found: list[list[str]] = []
    state: dict[str, Any] | None = None
    for world_size, until in worlds:
        ranks = [lanes_of(lengths, per_lane) for _ in range(world_size)]
        plan = ranks[0].plan(steps)
        if state is not None:
            plan = plan.resumed(state["data"])
            for each in ranks:
                each.load_state_dict(json.loads(json.dumps(state["lanes"])))
        iterators = [plan.iterate(rank, world_size, grain=ranks[0].grain) for rank in range(world_size)]
        for step in range(plan.first_step + 1, until + 1):
            batches = [next(each) for each in iterators]
            found.append([sample for each, batch in zip(ranks, batches, strict=True) for sample in each.read(batch)])
            assert {batch.step for batch in batches} == {step}
        before = state["lanes"]["positions"] if state else {}
        positions = dict(before)
        for each in ranks:  # what the collective does among real ranks
            own = each.state_dict(until)
            positions.update({lane: at for lane, at in own["positions"].items() if at != before.get(lane)})
        state = {"data": plan.state_dict(until), "lanes": {**own, "positions": positions}}
    return found


@given(
    lengths=st.lists(st.integers(1, 9), min_size=3, max_size=7),
    per_lane=st.integers(1, 3),
    worlds=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=4),
)
def test_every_step_has_the_same_samples_at_any_sizes(
    lengths: list[int], per_lane: int, worlds: list[tuple[int, int]]
) -> None:
    ends, end = [], 0
    for size, steps in worlds:
        end += steps
        ends.append((size, end))
    found = train(lengths, per_lane, end, ends)
    for step, samples in enumerate(found):
        places = [step * per_lane + at for at in range(per_lane)]
        assert samples == [f"{lane}/{place % length}" for lane, length in enumerate(lengths) for place in places]


def test_a_rank_opens_its_own_lanes_only() -> None:
    opened: list[int] = []

    def open_lane(lane: int) -> Lines:
        opened.append(lane)
        return Lines(lane, 5)

    lanes = StreamLanes(open_lane, 6, global_batch=12)
    batches = lanes.plan(3).iterate(1, 3, grain=lanes.grain)
    assert [lanes.read(next(batches)) for _ in range(2)] == [
        ["2/0", "2/1", "3/0", "3/1"],
        ["2/2", "2/3", "3/2", "3/3"],
    ]
    assert opened == [2, 3]


def refusals() -> Iterator[tuple[str, type[Exception], Any]]:
    def read(lanes: StreamLanes[str], plan: ElasticBatches, world_size: int, grain: int, times: int = 1) -> None:
        batch = next(plan.iterate(world_size - 1, world_size, grain=grain))
        for _ in range(times):
            lanes.read(batch)

    two, three = lanes_of([3, 3], 3), lanes_of([3, 3, 3], 2)
    saved = {"v": 1, "lanes": 3, "global_batch": 6, "step": 1, "positions": {}}
    yield (
        "4 lanes cannot share a global batch of 6; use a divisor of it",
        BatchSizeError,
        lambda: StreamLanes(lambda lane: Lines(lane, 1), 4, global_batch=6),
    )
    yield "3 ranks have 2 lanes; use more lanes or fewer ranks", BatchSizeError, lambda: read(two, two.plan(9), 3, 3)
    yield "iterate over the plan with grain=2", DataError, lambda: read(three, three.plan(9), 2, 1)
    yield (
        "are after step 1, not 0; load their state first",
        DataError,
        lambda: read(lanes_of([3, 3]), lanes_of([3, 3]).plan(9), 1, 1, times=2),
    )
    yield "lane 1 has no sample", DataError, lambda: read(lanes_of([3, 0]), lanes_of([3, 0]).plan(9), 1, 1)
    yield "are after step 0, not 1; read a batch in its own step", DataError, lambda: lanes_of([3]).state_dict(1)
    yield "were saved with lanes 3, but now it is 2", DataError, lambda: lanes_of([3, 3], 3).load_state_dict(saved)


@pytest.mark.parametrize(("text", "kind", "act"), [pytest.param(*each, id=each[0][:30]) for each in refusals()])
def test_what_would_lose_or_repeat_samples_is_refused(text: str, kind: type[Exception], act: Any) -> None:
    with pytest.raises(kind) as caught:
        act()
    assert text in str(caught.value)
