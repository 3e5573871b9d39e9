"""One rank's part of a sharded state, without other ranks: how it agrees on a step, starts anew and is filled."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.unit.in_memory.test_sharded_memory import SHAPE, Part, content
from torch import nn

from elastipod.errors import StateDiffersError
from elastipod.in_memory import sharded_memory
from elastipod.in_memory.members import Content, TensorShape
from elastipod.in_memory.memory_state import WorldLost
from elastipod.in_memory.mesh_plan import MeshPlan
from elastipod.in_memory.offer_wire import RankOffer
from elastipod.in_memory.offers import Offer, ResumePlan
from elastipod.in_memory.parts import PartContent, ShardedShape, part_of
from elastipod.in_memory.phases import Phase
from elastipod.in_memory.rank import RankState
from elastipod.in_memory.shard_plan import Need


def offers_of(*given: Offer) -> list[RankOffer]:
    return [RankOffer(each, origin) for origin, each in enumerate(given, start=3)]


def parked(monkeypatch: pytest.MonkeyPatch) -> Part:
    part = Part(monkeypatch, phase=Phase.AGREEING)
    part.memory._held = content(part.own, 5.0)
    part.memory._is_live = False
    return part


def test_two_of_three_agree_on_the_step_that_all_parts_are_there_of(monkeypatch: pytest.MonkeyPatch) -> None:
    part = parked(monkeypatch)
    own = Offer(frozenset({part_of(3, 0)}), 5)
    other = Offer(frozenset({part_of(3, 1)}), 5, False, {5: frozenset({part_of(3, 2)})})
    resume = part.memory.begin_filling(offers_of(own, other), 0)
    assert resume is not None
    assert (resume.step, resume.donors) == (5, {part_of(3, 0): (0,), part_of(3, 1): (1,), part_of(3, 2): (1,)})
    assert part.memory._part == part_of(2, 0)
    assert part.numbers() == {5: {part_of(3, 0): 5.0}}, "what is overwritten stays until the new world trains"
    assert part.memory.origin == 4
    assert part.memory.donor_of(resume) == 0
    assert part.memory.rank.phase is Phase.FILLING
    part.memory.finish_filling()
    assert part.memory.rank.parts == {part_of(2, 0)}
    assert (part.memory.rank.completed, part.memory._is_live) == (5, True)
    part.memory.move(part.memory.rank.verified())
    assert part.memory._held is None, "the members hold it now"


def test_a_part_that_stays_is_kept_beside_the_images_that_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    part = parked(monkeypatch)
    parts = [frozenset({part_of(3, index)}) for index in range(3)]
    others = (Offer(parts[1], 5), Offer(parts[2], 5, False, {5: parts[0]}))
    assert part.memory.begin_filling(offers_of(Offer(parts[0], 5), *others), 0) is not None
    assert part.memory._part == part.own
    assert part.numbers() == {5: {part.own: 5.0}}


@pytest.mark.parametrize("offers", [[Offer()], [Offer(frozenset({part_of(3, 0)}), 5), Offer()]])
def test_without_all_parts_of_any_step_nothing_is_resumed(monkeypatch: pytest.MonkeyPatch, offers: list[Offer]) -> None:
    part = parked(monkeypatch)
    before = part.memory.rank
    assert part.memory.begin_filling(offers_of(*offers), 0) is None
    assert (part.memory.rank, part.numbers()) == (before, {})


@pytest.mark.parametrize(
    ("rank", "is_loaded", "holders"), [(0, True, 4), (3, True, 4), (0, False, 2), (1, False, 2), (2, False, 2)]
)
def test_a_new_start_offers_what_was_loaded_or_what_the_first_group_has_built(
    monkeypatch: pytest.MonkeyPatch, rank: int, is_loaded: bool, holders: int
) -> None:
    part = Part(monkeypatch, rank=rank, mesh={"replicate": -1, "shard": 2}, phase=Phase.AGREEING)
    part.memory.rank = RankState(Phase.AGREEING, 1)
    found = part.memory.begin_anew(9, rank, 4, loaded_by=range(4) if is_loaded else None)
    parts = [part_of(2, each % 2) for each in range(4)]
    assert found == [Offer(frozenset({each}), 9) if at < holders else Offer() for at, each in enumerate(parts)]
    held = part.memory._held
    if rank < holders:
        assert part.memory.rank.parts == {parts[rank]}
        assert part.memory.rank.completed == 9
        assert held is not None
        assert held.part == parts[rank]
        assert part.limit.progress.call_count == 1, "the copy of a large part takes longer than the limit"
    else:
        assert (part.memory.rank.parts, held) == (frozenset(), None)


@pytest.mark.parametrize(("completed", "loaded_by", "is_said"), [(5, None, 1), (5, range(2), 0), (None, None, 0)])
def test_a_rank_whose_training_is_lost_says_so(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    completed: int | None,
    loaded_by: range | None,
    is_said: int,
) -> None:
    part = Part(monkeypatch, phase=Phase.AGREEING)
    part.memory.rank = RankState(Phase.AGREEING, 1, completed=completed)
    part.memory.begin_anew(0, 0, 2, loaded_by=loaded_by)
    assert (
        caplog.text.count("this one its part of step 5, and there is no checkpoint: the training starts from")
        == is_said
    )


def test_what_each_rank_needs_and_has(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part(monkeypatch)
    donors = {part_of(3, 0): (0, 1), part_of(3, 1): (1,), part_of(3, 2): (2,)}
    resume = ResumePlan(5, (), donors)
    assert part.memory._needs(resume, 4) == [
        Need(0, part_of(4, 0), frozenset({part_of(3, 0)})),
        Need(1, part_of(4, 1), frozenset({part_of(3, 0), part_of(3, 1)})),
        Need(2, part_of(4, 2), frozenset({part_of(3, 2)})),
        Need(3, part_of(4, 3), frozenset()),
    ]


def test_what_a_rank_holds_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    part = parked(monkeypatch)
    part.memory._keep(4, content(part_of(3, 1), 4.0))
    part.memory._keep(5, content(part_of(3, 2), 2.0))
    found = {step: sorted(part.memory._parts_at(step)) for step in (3, 4, 5)}
    assert found == {3: [], 4: [part_of(3, 1)], 5: [part_of(3, 0), part_of(3, 2)]}
    part.memory._parts_at(5).clear()
    assert len(part.memory._parts_at(5)) == 2, "a dictionary of its own"


@pytest.fixture
def filling(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Part]:
    """Give a single rank that fills its one part from two of its own; the comparison of layouts says what the test wants."""

    def fill(differing: str) -> Part:
        part = Part(monkeypatch, phase=Phase.FILLING)
        part.memory.rank = RankState(Phase.FILLING, 2, frozenset({part_of(2, 0)}), 5)
        part.memory._held = content(part_of(2, 0), 7.0)
        part.memory._keep(5, content(part_of(2, 1), 8.0))
        part.memory._part, part.memory._mesh = part_of(1, 0), "the mesh"
        live = torch.zeros(6)

        def room(*given: Any) -> Content:
            part.calls.append(("room", *given))
            return Content({"model.w": live}, "")

        def compare(
            shapes: Any, sources: Any, given: Any, target: Any, own: Any, progress: Any, *, await_all: Any
        ) -> str:
            assert await_all.__self__ is progress.__self__, "the ranks meet meanwhile"
            part.calls.append(("compared", shapes, given, own))
            return differing

        monkeypatch.setattr(sharded_memory, "room_for", room)
        monkeypatch.setattr(sharded_memory, "compare_layouts", compare)

        def load(loaded: Content) -> None:
            part.calls.append(("loaded", loaded.tensors["model.w"].tolist(), loaded.values))

        monkeypatch.setattr(part.members, "load", load)
        resume = mock.Mock(step=5, donors={part_of(2, 0): (0,), part_of(2, 1): (0,)})
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        part.memory.fill(resume, [RankOffer(Offer(), 0)], part.limit.progress)
        return part

    return fill


def test_a_part_is_filled_from_others_and_compared(filling: Callable[[str], Part]) -> None:
    part = filling("")
    assert part.calls == [
        ("room", (SHAPE,), part_of(1, 0), part.members, "the mesh"),
        ("compared", (SHAPE,), [part_of(2, 0), part_of(2, 1)], part_of(1, 0)),
        ("loaded", [7.0, 7.0, 7.0, 8.0, 8.0, 8.0], "values"),
    ]
    copied, planned, met, written = 2, 1, 2, 1
    assert part.limit.progress.call_count == copied + planned + met + written


def test_a_change_that_lost_something_is_refused_by_name(filling: Callable[[str], Part]) -> None:
    with pytest.raises(StateDiffersError) as caught:
        filling("model.w")
    assert str(caught.value) == "after the change to 1 ranks the state of step 5 is not what it was, in model.w"


@pytest.mark.parametrize("has_own", [True, False])
def test_buffers_that_a_newcomer_gets_are_compared_with_the_holders(
    monkeypatch: pytest.MonkeyPatch, has_own: bool
) -> None:
    part = Part(monkeypatch, phase=Phase.FILLING)
    shape = ShardedShape(TensorShape("model.seen", "float32", (1,)), None)
    part.memory._held = PartContent(part_of(1, 0), (shape,), {shape.key: torch.ones(1)}, "values")
    part.memory.rank = RankState(Phase.FILLING, 2, frozenset({part_of(1, 0)}), 5)
    part.memory._part = part_of(1, 0)
    own = frozenset({part_of(1, 0)}) if has_own else frozenset()
    received = torch.zeros(1)  # not what was sent
    monkeypatch.setattr(part.memory, "_needs", lambda *_: [Need(0, part_of(1, 0), own)])
    monkeypatch.setattr(sharded_memory, "room_for", lambda *_: Content({shape.key: received}, ""))
    monkeypatch.setattr(sharded_memory, "copy_own", lambda *_: None)
    monkeypatch.setattr(sharded_memory, "exchange", lambda *_, **__: None)
    load = mock.Mock()
    monkeypatch.setattr(part.members, "load", load)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    resume = mock.Mock(step=5, donors={part_of(1, 0): (0,)})
    if has_own:
        part.memory.fill(resume, [RankOffer(Offer(), 0)], part.limit.progress)
    else:
        with pytest.raises(StateDiffersError, match=r"rank 0 sent model\.seen, and other content has arrived"):
            part.memory.fill(resume, [RankOffer(Offer(), 0)], part.limit.progress)
    assert load.called is has_own


# ---- building


def test_members_are_built_once_for_a_world_and_the_mesh_too(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part(monkeypatch)
    made = (nn.Linear(1, 1),)
    build = part.memory._build = mock.Mock(return_value=made)
    monkeypatch.setattr(gc, "freeze", lambda: part.calls.append("frozen"))
    monkeypatch.setattr(
        sharded_memory, "check_meshes", lambda members, mesh: part.calls.append(f"looked at {members.model} on {mesh}")
    )
    monkeypatch.setattr(MeshPlan, "build", lambda self, size: part.calls.append(size) or f"mesh of {size}")  # type: ignore[func-returns-value]
    part.memory.build()
    assert build.mock_calls == [], "there are members"
    for _ in range(2):
        part.members.clear()
        part.memory._mesh = None
        part.memory.build_mesh(3)
        part.memory.build_mesh(3)
        part.memory.build()
        assert part.members.model is made[0]
    assert build.mock_calls == [mock.call("mesh of 3")] * 2
    looked = f"looked at {made[0]} on mesh of 3"
    assert part.calls == [3, "garbage", "frozen", looked, 3, looked]
    monkeypatch.setattr(MeshPlan, "build", mock.Mock(side_effect=RuntimeError("closed")))
    part.memory._mesh = None
    with pytest.raises(WorldLost, match="the mesh could not be built: closed"):
        part.memory.build_mesh(3)


def test_no_limit_runs_while_the_groups_of_a_mesh_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for each other's members as long as the script allows: a member that hangs must not end all the others."""
    part = Part(monkeypatch)
    monkeypatch.setattr(MeshPlan, "build", lambda *_: part.limited.append("built"))
    part.memory._mesh = None
    part.memory.build_mesh(3)
    assert part.limited == ["paused", "built", "resumed"]
