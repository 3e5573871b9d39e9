"""One rank's state over generations, with the other ranks of its world as processes of their own."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from tests.free_ports import free_port
from tests.unit.in_memory.forked_ranks import raised_by, run_ranks, world
from tests.unit.in_memory.models import train, trained

from elastipod.errors import CheckpointError, ElastipodError
from elastipod.in_memory.members import Members, digest_of
from elastipod.in_memory.memory_state import WHOLE, MemoryState, WorldLost, compare_replicas, lost_world
from elastipod.in_memory.offer_wire import RankOffer
from elastipod.in_memory.offers import Offer, ResumePlan
from elastipod.in_memory.phase_limit import PhaseLimit
from elastipod.in_memory.phases import Phase
from elastipod.in_memory.rank import RankState
from elastipod.torch_compat import device_errors


class Limits(PhaseLimit):
    """Notes which phases were begun, and how often it was told of progress."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[Phase] = []
        self.beats: list[str] = []  # the phase of each, empty before the first

    def progress(self) -> None:
        self.beats.append(self.entered[-1] if self.entered else "")

    def enter(self, phase: Phase) -> None:
        self.entered.append(phase)


def state_of(members: Members, completed: int | None, *, origin: int = 0) -> MemoryState:
    """Give the state of a rank that is about to tell the others what it has."""
    memory = MemoryState(members, Limits())
    parts = frozenset() if completed is None else WHOLE
    memory.rank = RankState(Phase.AGREEING, 2, parts, completed)
    memory.origin = origin
    return memory


def join(memory: MemoryState, rank: int) -> tuple[int, int] | None:
    """Be filled and compared; give the step and the number of receivers' beats."""
    offers = memory.exchange_offers()
    resume = memory.begin_filling(offers, rank)
    if resume is None:
        return None
    beats: list[int] = []
    memory.fill(resume, offers, lambda: beats.append(1))
    memory.finish_filling()
    memory.verify(resume.donors[0][0])
    return resume.step, len(beats)


def test_a_newcomer_and_a_rank_that_is_behind_are_filled_from_the_newest() -> None:
    """The rank that is behind keeps what is overwritten until the new world has trained, and tells of each tensor that it copies."""
    port = free_port()
    steps, origins = [3, 4, None], [7, 8, 0]

    def body(rank: int) -> Any:
        completed = steps[rank]
        memory = state_of(trained(completed or 0, seed=3 if completed else 9), completed, origin=origins[rank])
        before = memory.members.digests()
        with world(rank, 3, port):
            found = join(memory, rank)
            kept = {step: image.tensors.keys() >= {"model.0.weight"} for step, image in memory._images.items()}
            images = dict(memory.rank.images)
            for image in memory._images.values():
                other = trained(1, seed=1)
                other.load(image.copied())
                assert other.digests() == before
            digest = digest_of(memory.members.digests())
            memory.move(memory.rank.verified())
            memory.commit()
        assert found is not None
        return [
            found[0], found[1] > 0, memory.origin, digest, [*kept.items()], [*images], memory.completed,
            [*memory.rank.images], [*memory._images], memory.rank.phase, [*memory._limit.entered],  # type: ignore[attr-defined]
            sorted(set(memory._limit.beats)),  # type: ignore[attr-defined]
        ]  # fmt: skip

    found = run_ranks(3, body)
    assert [each[:3] for each in found] == [[4, True, 8]] * 3
    assert len({each[3] for each in found}) == 1
    assert [each[4:6] for each in found] == [[[[3, True]], [3]], [[], []], [[], []]]
    assert [each[6:-1] for each in found] == [[5, [], [], "training", ["filling", "verifying", "training"]]] * 3
    assert [each[-1] for each in found] == [["", "verifying"], ["verifying"], ["verifying"]], "images, and digests"


def test_a_world_without_any_state_resumes_nowhere() -> None:
    port = free_port()

    def body(rank: int) -> Any:
        memory = state_of(trained(0), None)
        with world(rank, 2, port):
            return [join(memory, rank), memory.rank.phase]

    assert run_ranks(2, body) == [[None, "agreeing"]] * 2


def test_offers_come_from_all_ranks_in_their_order() -> None:
    memory = state_of(trained(0), 6, origin=5)
    assert memory.exchange_offers() == [RankOffer(Offer(WHOLE, 6), 5)], "alone"
    port = free_port()

    def body(rank: int) -> Any:
        with world(rank, 2, port):
            offers = state_of(trained(0), 6 + rank, origin=rank).exchange_offers()
        return [[each.offer.completed, each.origin] for each in offers]

    assert run_ranks(2, body) == [[[6, 0], [7, 1]]] * 2


def test_a_rank_that_failed_in_its_optimizer_resumes_from_its_own_image() -> None:
    members = trained(3)
    digests, image = members.digests(), members.content().copied()
    memory = state_of(members, None)
    memory.rank = RankState(Phase.AGREEING, 2, WHOLE, None, images={3: WHOLE})
    memory._images = {3: image}
    train(members, 1)
    assert join(memory, 0) == (3, len(image.tensors)), "each tensor is told of"
    assert memory.members.digests() == digests
    assert memory.completed == 3
    train(members, 1)
    members.load(memory._images[3])
    assert members.digests() == digests, "the image is not what the members train on"


def test_digests_of_a_state_that_an_optimizer_has_left_half_way_are_those_of_now() -> None:
    """Else a newcomer that has followed to that step would say that it holds all of it, and not be filled."""
    memory = state_of(trained(3), 3)
    memory.rank = RankState(Phase.TRAINING, 2, WHOLE, 3)
    memory._at_rest.begin()
    before = memory._at_rest.digests()
    train(memory.members, 1)
    memory.move(memory.rank.failed_inside_optimizer())
    assert memory._at_rest.digests() == memory.members.digests() != before


def test_only_a_change_of_phase_begins_a_limit() -> None:
    memory = state_of(trained(0), 0)
    limits: Limits = memory._limit  # type: ignore[assignment]
    memory.move(memory.rank)
    assert limits.entered == []
    memory.move(memory.rank.stopped())
    assert limits.entered == [Phase.QUIESCED]


def test_images_that_the_protocol_drops_are_gone() -> None:
    memory = state_of(trained(0), 2)
    image = memory.members.content()
    memory._images = {1: image, 2: image}
    memory.rank = RankState(Phase.TRAINING, 2, WHOLE, 2, images={1: WHOLE, 2: WHOLE})
    memory.move(RankState(Phase.TRAINING, 2, WHOLE, 2, images={2: WHOLE}))
    assert [*memory._images] == [2]


def test_replicas_that_differ_are_named_with_their_tensors_on_the_rank_that_differs() -> None:
    port = free_port()

    def body(rank: int) -> Any:
        members = trained(2)
        if rank == 1:
            with torch.no_grad():
                members.model[2].bias[0] += 1  # type: ignore[index]
        if rank == 3:
            train(members, 1)
        with world(rank, 4, port):
            return raised_by(lambda: compare_replicas(members.digests(), 2, "after step 2"))

    found = run_ranks(4, body)
    said = "after step 2 the state of ranks 1,3 differs from that of rank 2"
    assert found[0] == found[2] == ["WorldLost", said]
    assert found[1] == ["StateDiffersError", f"{said}, in model.2.bias"]
    kind, text = found[3]
    assert kind == "StateDiffersError"
    keys, _, more = text.removeprefix(f"{said}, in ").partition(" and ")
    everything = sorted(trained(2).digests())
    assert keys.split(", ") == everything[:5]
    assert more == f"{len(everything) - 5} more"


def test_replicas_that_are_equal_pass() -> None:
    port = free_port()

    def body(rank: int) -> Any:
        with world(rank, 2, port):
            compare_replicas(trained(2).digests(), 0, "now")
        return "equal"

    assert run_ranks(2, body) == ["equal"] * 2


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("closed by peer\nat pair.cc"), "texts are lost: closed by peer"),
        (RuntimeError(), "texts are lost: RuntimeError"),
    ],
)
def test_a_failed_collective_is_a_lost_world_with_one_line(error: RuntimeError, said: str) -> None:
    with pytest.raises(WorldLost) as caught, lost_world("texts are lost"):
        raise error
    assert str(caught.value) == said
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [CheckpointError("x"), ValueError("x"), torch.OutOfMemoryError("x"), device_errors()[-1]("x")]
)
def test_another_failure_is_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)), lost_world("texts are lost"):
        raise error


@pytest.mark.parametrize("how", ["an optimizer that ran in part", "a transfer that was broken off"])
def test_what_is_no_longer_as_it_was_built_is_no_beginning(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Without a whole step anywhere and without a checkpoint, trained tensors must not become step 0: processes begin anew."""
    memory = MemoryState(trained(0), Limits())
    assert len(memory.begin_anew(0, 0, 2, loaded_by=None)) == 2, "what was built is a beginning"
    if how == "an optimizer that ran in part":
        memory.rank = RankState(Phase.TRAINING, 2, WHOLE, 500)
        memory.move(memory.rank.failed_inside_optimizer())
    else:
        memory.rank = RankState(Phase.FILLING, 2)
        monkeypatch.setattr("elastipod.in_memory.memory_state.transfer", mock.Mock(side_effect=RuntimeError("reset")))
        resume = ResumePlan(7, (), {0: (0,)})
        with pytest.raises(WorldLost):
            memory.fill(resume, [RankOffer(Offer(WHOLE, 7), 1), RankOffer(Offer(), 0)], lambda: None)
    for rank in (0, 1):
        with pytest.raises(ElastipodError, match="new processes start from the beginning"):
            memory.begin_anew(0, rank, 2, loaded_by=None)
    assert len(memory.begin_anew(500, 0, 2, loaded_by=range(2))) == 2
    with pytest.raises(ElastipodError, match="new processes"):
        memory.begin_anew(0, 0, 2, loaded_by=None)


@pytest.mark.parametrize(
    ("rank", "loaded_by", "has_changed", "expected"),
    [
        pytest.param(1, (1,), True, [mock.call.forget()], id="one that has loaded it"),
        pytest.param(2, (1,), False, [], id="one that is as it was, such as a newcomer that has followed"),
        pytest.param(2, (1,), True, [mock.call.forget()], id="one whose own image was damaged"),
        pytest.param(2, None, False, [mock.call.forget()], id="nothing was loaded"),
    ],
)
def test_digests_of_what_a_load_has_changed_are_not_those_from_before(
    rank: int, loaded_by: tuple[int, ...] | None, has_changed: bool, expected: list[Any]
) -> None:
    memory = MemoryState(trained(0), Limits())
    memory._at_rest = mock.Mock()
    memory.begin_anew(7, rank, 3, loaded_by=loaded_by, has_changed=has_changed)
    assert memory._at_rest.mock_calls == expected


@pytest.mark.parametrize(("rank", "completed"), [(0, None), (1, 7), (2, None)])
def test_only_ranks_that_have_loaded_offer_what_was_loaded(rank: int, completed: int | None) -> None:
    memory = MemoryState(trained(0), Limits())
    assert memory.begin_anew(7, rank, 3, loaded_by=(1,)) == [Offer(), Offer(WHOLE, 7), Offer()]
    assert memory.rank.completed == completed
    with pytest.raises(ElastipodError, match="new processes start from the beginning"):
        memory.begin_anew(0, rank, 3, loaded_by=None)
