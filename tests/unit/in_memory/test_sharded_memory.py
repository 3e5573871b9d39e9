"""One rank's part of a sharded state, without other ranks: what it keeps, and what it hands over."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from elastipod.errors import ElastipodError
from elastipod.in_memory import sharded_memory
from elastipod.in_memory.agent_link import Fate
from elastipod.in_memory.members import Members, TensorShape
from elastipod.in_memory.memory_state import WorldLost
from elastipod.in_memory.mesh_plan import MeshPlan
from elastipod.in_memory.parts import PartContent, ShardedShape, UnknownSharding, part_of
from elastipod.in_memory.phase_limit import PhaseLimit
from elastipod.in_memory.phases import Phase
from elastipod.in_memory.rank import RankState
from elastipod.in_memory.shard_copies import Copies
from elastipod.in_memory.shard_exchange import PartsDiffer
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
        self.limited: list[str] = []  # when the limit of the phase is suspended
        self.live = 5.0
        self.members = Members({"model": nn.Linear(1, 1)})
        limit = mock.MagicMock(spec=PhaseLimit)
        limit.paused.side_effect = self._paused
        self.limit = limit
        self.memory = ShardedMemory(self.members, limit, mock.Mock(), MeshPlan.of(mesh or {"shard": -1}), copies)
        self.own = part_of(3, rank)
        self.memory._part = self.own
        self.memory.rank = RankState(phase, 1, frozenset({self.own}), 5)
        self.memory._is_live = True
        monkeypatch.setattr(sharded_memory, "live_part", lambda _, part: content(part, self.live))
        monkeypatch.setattr(sharded_memory, "part_content", self._part_content)
        monkeypatch.setattr(sharded_memory, "exchange_parts", self._exchange)
        self.said = [False, False]
        monkeypatch.setattr(sharded_memory, "any_raised", self._any_raised)
        monkeypatch.setattr(sharded_memory, "_rank", lambda: rank)
        monkeypatch.setattr(gc, "collect", lambda: self.calls.append("garbage"))
        self.taken: list[list[PartContent]] = []

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self.limited.append("paused")
        try:
            yield
        finally:
            self.limited.append("resumed")

    def _part_content(self, _: Members, part: int, progress: Callable[[], None]) -> PartContent:
        progress()
        return content(part, self.live)

    def _exchange(self, *given: Any) -> list[PartContent]:
        self.calls.append(given)
        return self.taken.pop(0) if self.taken else []

    def _any_raised(self, *flags: bool) -> list[bool]:
        self.calls.append("agreed")
        return self.said[: len(flags)]

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

    def broken(*_: bool) -> None:
        raise RuntimeError("closed")

    monkeypatch.setattr(sharded_memory, "any_raised", broken)
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
    assert copies.take.mock_calls == [mock.call(5, part.members, part.own, part.limit.progress, part.memory._make_room)]
    assert part.numbers() == {5: {part_of(3, 0): 1.0, part_of(3, 2): 2.0}}
    assert part.memory.rank.images == {5: {part_of(3, 0), part_of(3, 2)}}
    for step, kept in ((6, {5}), (7, set())):
        part.memory.rank = part.memory.rank.reduced()
        part.memory.commit()
        assert (part.memory.rank.completed, set(part.numbers())) == (step, kept)
    copies.take.side_effect = RuntimeError("closed")
    with pytest.raises(WorldLost, match="the shards of step 7 could not be copied: closed"):
        part.memory.copy()


def test_copies_that_some_rank_calls_wrong_do_not_count_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The images of the step before stay, as long as there is no newer copy of every part."""
    part = Part(monkeypatch, copies=Copies(1 << 20))
    with_images(part, 4, complete={4})
    monkeypatch.setattr(part.memory._copies, "take", lambda *_: [content(part_of(3, 0))])
    monkeypatch.setattr(part.memory._copies, "end", lambda step: False)
    part.memory.copy()
    part.memory.prepare(mock.Mock())
    part.memory.commit()
    assert (part.memory.rank.completed, set(part.numbers())) == (6, {4})


def test_a_step_without_copies_is_ended_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part(monkeypatch)
    copies = part.memory._copies = mock.Mock(take=mock.Mock(return_value=[]))
    part.memory.copy()
    assert copies.end.mock_calls == []


def with_images(part: Part, *steps: int, complete: set[int]) -> None:
    """Have images of two parts of each step; each takes 8 bytes."""
    for step in steps:
        part.memory._keep(step, content(part_of(3, 0)))
        part.memory._keep(step, content(part_of(3, 1)))
    part.memory._copies._complete = complete


@pytest.mark.parametrize(
    ("limit", "kept"),
    [(48, [2, 3, 4]), (47, [2, 3]), (32, [2, 3]), (31, [3]), (16, [3]), (15, []), (-8, [])],
)
def test_images_make_room_those_that_were_not_copied_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, limit: int, kept: list[int]
) -> None:
    part = Part(monkeypatch, copies=Copies(1 << 20))
    with_images(part, 2, 3, 4, complete={2, 3})
    part.memory._make_room(limit)
    assert sorted(part.numbers()) == sorted(part.memory.rank.images) == kept
    assert len([each for each in caplog.records if "goes before the next copies" in each.getMessage()]) == 3 - len(kept)


# ---- leaving


STAY, LEAVE = Fate.STAYS, Fate.LEAVES


def test_who_leaves_hands_over_to_who_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 leaves; rank 1 will need its part, and a second holder is chosen for each part."""
    part = Part(monkeypatch, rank=1, copies=Copies(1 << 20))
    seconds = {part_of(3, 0): 1}
    monkeypatch.setattr(part.memory._copies, "held_by_ranks", lambda _: [[], [], []])
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
    assert second_holders.mock_calls == [mock.call(holders, [0, 1], part.members, part.own, 0)]
    assert part.numbers() == {5: {part_of(3, 2): 2.0, part_of(3, 0): 1.0}}


def test_images_of_former_steps_count_when_second_holders_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before the newest copied step go: all ranks have stopped, so all have ended its copies."""
    part = Part(monkeypatch, rank=1, copies=Copies(1 << 20))
    with_images(part, 2, 3, complete={2, 3})
    monkeypatch.setattr(part.memory._copies, "held_by_ranks", lambda _: [[], [], []])
    second_holders = mock.Mock(return_value={})
    part.memory._copies.second_holders = second_holders  # type: ignore[method-assign]
    assert part.memory.hand_over([STAY, STAY, LEAVE]) is True
    ((_, _, _, _, older_bytes),) = [call.args for call in second_holders.mock_calls]
    assert (older_bytes, set(part.numbers())) == (16, {3})


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


def with_optimizer(part: Part) -> torch.optim.Optimizer:
    """Have an optimizer that keeps something of one of two parameters."""
    optimizer = torch.optim.SGD(part.members.model.parameters())
    part.members.take({"model": part.members.model, "optimizer": optimizer})
    optimizer.state[next(part.members.model.parameters())] = {"factor": torch.zeros(1), "runs": 1}
    part.memory._built_groups = part.memory._parameter_groups()
    return optimizer


def test_what_optimizers_keep_is_looked_at_when_they_have_made_more(monkeypatch: pytest.MonkeyPatch) -> None:
    part, seen = Part(monkeypatch), list[int]()
    optimizer = with_optimizer(part)
    monkeypatch.setattr(sharded_memory, "can_move", lambda tensor: not seen.append(tensor.numel()))  # type: ignore[func-returns-value]

    def commit() -> int:
        part.memory.prepare(mock.Mock())
        part.memory.commit()
        return len(seen)

    assert [commit(), commit()] == [1, 1]
    optimizer.state[list(part.members.model.parameters())[1]] = {"factor": torch.zeros(1)}
    assert [commit(), commit()] == [3, 3]
    monkeypatch.setattr(sharded_memory, "can_move", lambda _: False)
    monkeypatch.setattr(sharded_memory, "live_part", mock.Mock(side_effect=UnknownSharding("factor is placed")))
    assert commit() == 3, "nothing new"
    part.memory._num_checked = 0
    with pytest.raises(UnknownSharding, match="factor is placed"):
        commit()
    assert (part.memory.rank.phase, part.memory.rank.is_prepared) == (Phase.TRAINING, False), "the step is complete"


def test_a_state_that_cannot_move_is_not_handed_over_but_saved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    part = Part(monkeypatch)
    with_optimizer(part)
    monkeypatch.setattr(sharded_memory, "can_move", lambda _: False)
    monkeypatch.setattr(
        sharded_memory, "live_part", mock.Mock(side_effect=UnknownSharding("optimizer.factor is placed"))
    )
    assert part.memory.hand_over([STAY, STAY, LEAVE]) is False
    assert part.calls == [], "no rank begins a collective"
    assert "optimizer.factor is placed; the ranks save a checkpoint" in caplog.text


def test_a_peer_that_is_lost_meanwhile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part(monkeypatch)
    monkeypatch.setattr(sharded_memory, "exchange_parts", mock.Mock(side_effect=RuntimeError("closed")))
    with pytest.raises(WorldLost, match="the shards of those who leave could not be handed over: closed"):
        part.memory.hand_over([STAY, STAY, LEAVE])


def test_shards_that_arrive_wrong_are_not_taken_for_those_that_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    part = Part(monkeypatch)
    monkeypatch.setattr(sharded_memory, "exchange_parts", mock.Mock(side_effect=PartsDiffer("they differ")))
    assert part.memory.hand_over([STAY, STAY, LEAVE]) is False
    assert part.numbers() == {}
    assert "they differ; the ranks save a checkpoint" in caplog.text


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
        part.limited.append("applied")
        part.live = 6.0
        if error is not None:
            raise error

    part.memory.prepare(apply)
    part.memory.rank = part.memory.rank.stopped()
    part.memory.release()
    held = part.memory._held
    assert held is not None
    assert held.part == part.own
    assert part.limited[:3] == ["paused", "applied", "resumed"], "a large optimizer takes longer than the phase may"
    assert part.limit.progress.call_count == (1 if error else 2), "the copies of the part before the step and after it"
    assert part.memory.rank.is_prepared is False
    if error is None:
        assert (part.memory.rank.completed, float(held.tensors["model.w"][0])) == (6, 6.0)
        assert part.numbers() == {5: {part.own: 5.0}}
        assert part.memory.rank.images == {5: {part.own}}
    else:
        assert (part.memory.rank.completed, float(held.tensors["model.w"][0])) == (5, 5.0)
        assert part.numbers() == {}
