"""One rank's part of a sharded state, without other ranks: what it keeps, hands over, needs and offers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elastipod.errors import ElastipodError, StateDiffersError
from elastipod.in_memory import sharded_memory
from elastipod.in_memory.agent_link import Fate
from elastipod.in_memory.members import Content, Members, TensorShape
from elastipod.in_memory.memory_state import WorldLost
from elastipod.in_memory.mesh_plan import MeshPlan
from elastipod.in_memory.offer_wire import RankOffer
from elastipod.in_memory.offers import Offer, ResumePlan
from elastipod.in_memory.parts import PartContent, ShardedShape, part_of
from elastipod.in_memory.phase_limit import PhaseLimit
from elastipod.in_memory.phases import Phase
from elastipod.in_memory.rank import RankState
from elastipod.in_memory.shard_copies import Copies
from elastipod.in_memory.shard_plan import Need
from elastipod.in_memory.sharded_memory import ShardedMemory

SHAPE = ShardedShape(TensorShape("model.w", "float32", (6,)), 0)


def content(part: int, number: float = 0.0) -> PartContent:
    return PartContent(part, (SHAPE,), {"model.w": torch.full(SHAPE.local_sizes(part), number)}, "values")


class Part:
    """The part that one of three ranks has at step 5, with what it calls played."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        rank: int = 0,
        copies: Copies | None = None,
        mesh: dict[str, int] | None = None,
        phase: Phase = Phase.TRAINING,
    ) -> None:
        self.calls: list[Any] = []
        self.live = 5.0
        self.members = Members({"model": nn.Linear(1, 1)})
        limit = mock.MagicMock(spec=PhaseLimit)
        self.limit = limit
        self.memory = ShardedMemory(self.members, limit, mock.Mock(), MeshPlan.of(mesh or {"shard": -1}), copies)
        self.own = part_of(3, rank)
        self.memory._part = self.own
        self.memory.rank = RankState(phase, 1, frozenset({self.own}), 5)
        self.memory._is_live = True
        monkeypatch.setattr(sharded_memory, "part_content", lambda _, part: content(part, self.live))
        monkeypatch.setattr(sharded_memory, "exchange_parts", self._exchange)
        monkeypatch.setattr(sharded_memory, "agree_on_flag", lambda: self.calls.append("agreed"))
        monkeypatch.setattr(sharded_memory, "_rank", lambda: rank)
        monkeypatch.setattr(gc, "collect", lambda: self.calls.append("garbage"))
        self.taken: list[list[PartContent]] = []

    def _exchange(self, *given: Any) -> list[PartContent]:
        self.calls.append(given)
        return self.taken.pop(0) if self.taken else []

    def numbers(self) -> dict[int, dict[int, float]]:
        """Give the images that it keeps: by step and part, the number in them."""
        kept = self.memory._kept
        return {step: {part: float(one.tensors["model.w"][0]) for part, one in of.items()} for step, of in kept.items()}


# ---- one step


def test_a_rank_is_prepared_only_with_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part(monkeypatch)
    part.memory.prepare(apply := mock.Mock())
    assert (part.calls, part.memory.rank.is_prepared, part.memory.rank.phase) == (["agreed"], True, Phase.PREPARED)
    assert part.memory._apply is apply
    part.memory.commit()
    assert (part.memory.rank.completed, part.memory.rank.phase, apply.mock_calls) == (6, Phase.TRAINING, [])

    def broken() -> None:
        raise RuntimeError("closed")

    monkeypatch.setattr(sharded_memory, "agree_on_flag", broken)
    with pytest.raises(WorldLost, match="the ranks could not agree that all gradients are good: closed"):
        part.memory.prepare(apply)
    assert part.memory.rank.is_prepared


def test_images_are_kept_under_their_step_until_a_commit_drops_them(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part(monkeypatch)
    copies = mock.Mock()
    copies.take.return_value = [content(part_of(3, 0), 1.0), content(part_of(3, 2), 2.0)]
    copies.newest.return_value = None
    part.memory._copies = copies
    part.memory.copy()
    assert copies.take.mock_calls == [mock.call(5, part.members, part.own, part.limit.progress)]
    assert part.numbers() == {5: {part_of(3, 0): 1.0, part_of(3, 2): 2.0}}
    assert part.memory.rank.images == {5: {part_of(3, 0), part_of(3, 2)}}
    for step, kept in ((6, {5}), (7, set())):
        part.memory.rank = part.memory.rank.reduced()
        part.memory.commit()
        assert (part.memory.rank.completed, set(part.numbers())) == (step, kept)
    copies.take.side_effect = RuntimeError("closed")
    with pytest.raises(WorldLost, match="the shards of step 7 could not be copied: closed"):
        part.memory.copy()


# ---- leaving


STAY, LEAVE = Fate.STAYS, Fate.LEAVES


def test_who_leaves_hands_over_to_who_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 leaves; rank 1 will need its part, and a second holder is chosen for each part."""
    part = Part(monkeypatch, rank=1, copies=Copies(1 << 20))
    seconds = {part_of(3, 0): 1}
    second_holders = mock.Mock(return_value=seconds)
    part.memory._copies.second_holders = second_holders  # type: ignore[method-assign]
    part.taken = [[content(part_of(3, 2), 2.0)], [content(part_of(3, 0), 1.0)]]
    assert part.memory.hand_over([STAY, STAY, LEAVE]) is True
    takers, orphans = {part_of(3, 2): 1}, {part_of(3, 2): 2}
    first = {part_of(3, 0): 0, part_of(3, 1): 1, part_of(3, 2): 2}
    progress = part.limit.progress
    assert part.calls == [
        (part.members, part.own, takers, orphans, progress), (part.members, part.own, seconds, first, progress), "agreed",
    ]  # fmt: skip
    holders = [(part_of(3, 0), 0), (part_of(3, 1), 1), (part_of(3, 2), 1)]
    assert second_holders.mock_calls == [mock.call(holders, [0, 1], part.members, part.own)]
    assert part.numbers() == {5: {part_of(3, 2): 2.0, part_of(3, 0): 1.0}}


@pytest.mark.parametrize(
    ("fates", "is_kept", "exchanges"),
    [
        ([STAY, STAY, STAY], True, 1),
        ([LEAVE, LEAVE, LEAVE], False, 0),
        ([STAY, STAY, Fate.UNKNOWN], False, 0),
        ([STAY, LEAVE, Fate.KEPT], False, 0),
        ([STAY, LEAVE, LEAVE], True, 2),
    ],
)
def test_a_state_is_handed_over_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, fates: list[Fate], is_kept: bool, exchanges: int
) -> None:
    part = Part(monkeypatch)
    assert part.memory.hand_over(fates) is is_kept
    assert len([call for call in part.calls if call != "agreed"]) == exchanges
    assert part.calls.count("agreed") == is_kept


def test_what_a_replica_has_need_not_be_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks, two of which hold each part: those of the second group leave."""
    part = Part(monkeypatch, mesh={"replicate": -1, "shard": 2})
    assert part.memory.hand_over([STAY, STAY, LEAVE, LEAVE]) is True
    assert part.calls[0][2:4] == ({}, {})
    both = {part_of(2, 0), part_of(2, 1)}
    assert set(part.calls[1][3]) == both
    part.calls.clear()
    assert part.memory.hand_over([STAY, LEAVE, LEAVE, LEAVE]) is True
    assert part.calls[0][2:4] == ({part_of(2, 1): 0}, {part_of(2, 1): 3})


def test_a_peer_that_is_lost_meanwhile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part(monkeypatch)
    monkeypatch.setattr(sharded_memory, "exchange_parts", mock.Mock(side_effect=RuntimeError("closed")))
    with pytest.raises(WorldLost, match="the shards of those who leave could not be handed over: closed"):
        part.memory.hand_over([STAY, STAY, LEAVE])


@pytest.mark.parametrize("is_live", [True, False])
def test_a_world_that_ends_leaves_plain_tensors_and_no_modules(monkeypatch: pytest.MonkeyPatch, is_live: bool) -> None:
    part, released = Part(monkeypatch, phase=Phase.QUIESCED), [nn.Linear(1, 1)][:0]
    model = part.members.model
    monkeypatch.setattr(sharded_memory, "release_shard_groups", released.append)
    monkeypatch.setattr(sharded_memory, "drop_sharding_caches", lambda: part.calls.append("caches"))
    forget = part.memory._copies.forget_world = mock.Mock()  # type: ignore[method-assign]
    part.memory._is_live, part.memory._mesh = is_live, "a mesh"
    part.memory.release()
    held = part.memory._held
    assert (held and held.part) == (part.own if is_live else None)
    assert (released, bool(part.members), part.calls, forget.call_count) == ([model], False, ["caches", "garbage"], 1)
    assert (part.memory._is_live, part.memory._mesh) == (False, None)
    part.memory.release()
    assert len(released) == 1


def test_a_rank_whose_optimizer_failed_keeps_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part(monkeypatch, phase=Phase.QUIESCED)
    part.memory.rank = RankState(Phase.QUIESCED, 1, frozenset({part.own}), None)
    monkeypatch.setattr(sharded_memory, "release_shard_groups", lambda _: None)
    part.memory.release()
    assert part.memory._held is None


@pytest.mark.parametrize("error", [None, RuntimeError("needs peers"), ElastipodError("needs peers")])
def test_a_prepared_rank_completes_its_step_alone_and_keeps_the_one_before(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    part = Part(monkeypatch)
    monkeypatch.setattr(sharded_memory, "release_shard_groups", lambda _: None)

    def apply() -> None:
        part.live = 6.0
        if error is not None:
            raise error

    part.memory.prepare(apply)
    part.memory.rank = part.memory.rank.stopped()
    part.memory.release()
    held = part.memory._held
    assert held is not None
    assert held.part == part.own
    assert part.memory.rank.is_prepared is False
    if error is None:
        assert (part.memory.rank.completed, float(held.tensors["model.w"][0])) == (6, 6.0)
        assert part.numbers() == {5: {part.own: 5.0}}
        assert part.memory.rank.images == {5: {part.own}}
    else:
        assert (part.memory.rank.completed, float(held.tensors["model.w"][0])) == (5, 5.0)
        assert part.numbers() == {}


# ---- joining


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
    found = part.memory.begin_anew(9, rank, 4, is_loaded=is_loaded)
    parts = [part_of(2, each % 2) for each in range(4)]
    assert found == [Offer(frozenset({each}), 9) if at < holders else Offer() for at, each in enumerate(parts)]
    held = part.memory._held
    if rank < holders:
        assert part.memory.rank.parts == {parts[rank]}
        assert part.memory.rank.completed == 9
        assert held is not None
        assert held.part == parts[rank]
    else:
        assert (part.memory.rank.parts, held) == (frozenset(), None)


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

        def compare(shapes: Any, sources: Any, given: Any, target: Any, own: Any) -> str:
            part.calls.append(("compared", shapes, given, own))
            return differing

        monkeypatch.setattr(sharded_memory, "room_for", room)
        monkeypatch.setattr(sharded_memory, "compare_layouts", compare)

        def load(loaded: Content) -> None:
            part.calls.append(("loaded", loaded.tensors["model.w"].tolist(), loaded.values))

        monkeypatch.setattr(part.members, "load", load)
        resume = mock.Mock(step=5, donors={part_of(2, 0): (0,), part_of(2, 1): (0,)})
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        part.memory.fill(resume, [Offer()], part.limit.progress)
        return part

    return fill


def test_a_part_is_filled_from_others_and_compared(filling: Callable[[str], Part]) -> None:
    part = filling("")
    assert part.calls == [
        ("room", (SHAPE,), part_of(1, 0), part.members, "the mesh"),
        ("compared", (SHAPE,), [part_of(2, 0), part_of(2, 1)], part_of(1, 0)),
        ("loaded", [7.0, 7.0, 7.0, 8.0, 8.0, 8.0], "values"),
    ]


def test_a_change_that_lost_something_is_refused_by_name(filling: Callable[[str], Part]) -> None:
    with pytest.raises(StateDiffersError) as caught:
        filling("model.w")
    assert str(caught.value) == "after the change to 1 ranks the state of step 5 is not what it was, in model.w"


# ---- building


def test_members_are_built_once_for_a_world_and_the_mesh_too(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part(monkeypatch)
    made = (nn.Linear(1, 1),)
    build = part.memory._build = mock.Mock(return_value=made)
    monkeypatch.setattr(gc, "freeze", lambda: part.calls.append("frozen"))
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
    assert part.calls == [3, "garbage", "frozen", 3]
    monkeypatch.setattr(MeshPlan, "build", mock.Mock(side_effect=RuntimeError("closed")))
    part.memory._mesh = None
    with pytest.raises(WorldLost, match="the mesh could not be built: closed"):
        part.memory.build_mesh(3)
