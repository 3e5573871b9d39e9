"""What events make of one rank; tests/sim/in_memory has them in every order that a model checker finds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastipod.in_memory.offers import Offer
from elastipod.in_memory.phases import Phase
from elastipod.in_memory.rank import RankState

P = frozenset({0})
TRAINING = RankState(Phase.TRAINING, 3, P, 5, False, {4: P})


def test_a_rank_that_has_not_begun_offers_nothing() -> None:
    rank = RankState()
    assert (rank.phase, rank.generation, rank.resume) == (Phase.PARKED, 0, None)
    assert rank.offer() == Offer(frozenset(), None, False, {})


def test_an_optimizer_that_raised_leaves_images_only() -> None:
    """Some tensors have the step and some have not, so the rank may give its state to nobody."""
    torn = TRAINING.reduced().failed_inside_optimizer()
    assert torn.phase is Phase.QUIESCED
    assert torn.offer() == Offer(P, None, False, {4: P})
    assert torn.generation == 3


def test_a_step_that_every_rank_has_prepared_is_committed_and_older_images_go() -> None:
    prepared = RankState(Phase.TRAINING, 3, P, 5, False, {3: P, 4: P, 5: P}).reduced()
    assert prepared.is_prepared
    assert prepared.committed().offer() == Offer(P, 6, False, {5: P})
    assert prepared.committed(keep_from=4).offer() == Offer(P, 6, False, {4: P, 5: P})
    assert prepared.committed(keep_from=9).images == {5: P}, "that of the last step always stays"
    assert prepared.committed().phase is Phase.TRAINING


def test_a_prepared_rank_without_a_world_completes_its_step_and_keeps_what_was_before() -> None:
    alone = TRAINING.reduced().stopped().completed_alone()
    assert alone.phase is Phase.QUIESCED
    assert alone.offer() == Offer(P, 6, False, {4: P, 5: P})
    other = frozenset({1})
    both = RankState(Phase.QUIESCED, 3, P, 5, True, {5: other}).completed_alone()
    assert both.images == {5: P | other}


def test_a_new_generation_takes_a_rank_through_its_phases() -> None:
    rank = TRAINING.stopped()
    assert rank.phase is Phase.QUIESCED
    rank = rank.detached()
    assert rank.phase is Phase.PARKED
    with pytest.raises(AssertionError, match="no older generation"):
        rank.assigned(3)
    rank = rank.assigned(4)
    assert (rank.phase, rank.generation) == (Phase.CONNECTING, 4)
    rank = rank.connected()
    assert rank.phase is Phase.AGREEING
    assert rank.offer() == TRAINING.offer()


def agree(own: RankState, *others: Offer) -> RankState | None:
    rank = own.stopped().detached().assigned(4).connected()
    return rank.agreed((rank.offer(), *others), 0, P, P)


def test_ranks_at_the_same_step_only_forget_images_of_steps_to_come() -> None:
    other = frozenset({1})
    own = RankState(Phase.TRAINING, 3, P, 5, False, {4: P, 6: P}).stopped().detached().assigned(4).connected()
    rank = own.agreed((own.offer(), Offer(other, 5, False, {4: other})), 0, P, P | other)
    assert rank is not None
    assert rank.phase is Phase.FILLING
    assert rank.resume is not None
    assert rank.resume.step == 5
    assert rank.offer() == Offer(P, 5, False, {4: P})
    filled = rank.filled(P)
    assert (filled.phase, filled.completed, filled.parts) == (Phase.VERIFYING, 5, P)
    trains = filled.verified()
    assert (trains.phase, trains.resume) == (Phase.TRAINING, None)


def test_a_rank_that_is_behind_is_filled_and_keeps_its_state_until_the_world_trains() -> None:
    behind = RankState(Phase.TRAINING, 3, P, 4, False, {3: P})
    rank = agree(behind, TRAINING.offer())
    assert rank is not None
    assert rank.completed is None
    assert rank.images == {3: P, 4: P}
    assert rank.filled(P).completed == 5


def test_a_part_that_stays_is_kept_as_an_image_where_the_others_may_go_back_to_its_step() -> None:
    """Rank 1 has been handed an image of this part, and this rank one of rank 1's. Both overwrite their tensors with the next step."""
    other = frozenset({1})
    own = RankState(Phase.TRAINING, 3, P, 5, False, {5: other}).stopped().detached().assigned(4).connected()
    for mine in (own, replace(own, images={})):
        rank = mine.agreed((mine.offer(), Offer(other, 5, False, {5: P})), 0, P, P | other)
        assert rank is not None
        assert rank.images == {5: P | mine.images.get(5, frozenset())}
    nobody = replace(own, images={}).agreed((replace(own, images={}).offer(), Offer(other, 5)), 0, P, P | other)
    assert nobody is not None
    assert nobody.images == {}, "nobody can go back to this step once a rank has made the next one"


def test_a_rank_that_holds_all_of_the_state_needs_no_image_of_it() -> None:
    rank = agree(TRAINING, Offer(P, 5, False, {5: P}))
    assert rank is not None
    assert rank.images == {4: P}


def test_memory_without_any_whole_step_leaves_it_to_storage() -> None:
    assert agree(RankState(Phase.TRAINING, 3, frozenset(), None), Offer(frozenset(), None, False, {})) is None
