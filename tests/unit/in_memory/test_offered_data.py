"""What ranks tell of their data with their offers: whether their plans are the same, and how far they have trained."""

from __future__ import annotations

import json

import pytest

from elastipod.data import ElasticBatches
from elastipod.in_memory.offer_wire import RankData
from elastipod.in_memory.offered_data import offered_data, position_text
from elastipod.in_memory.rank import RankState

PLAN = ElasticBatches(dataset_size=48, global_batch=12, seed=1, epochs=2)
CUT = [1, []]
TRAINED = RankState(parts=frozenset({0}), completed=2)


def told(plan: ElasticBatches, cut: list[object]) -> str:
    return offered_data(plan, cut, None, RankState()).plan


def test_plans_are_the_same_wherever_they_resume() -> None:
    assert told(PLAN, CUT) == told(ElasticBatches(48, 12, seed=1, epochs=2), [1, []])
    assert told(PLAN.resumed(PLAN.state_dict(3)), CUT) == told(PLAN, CUT)


@pytest.mark.parametrize(
    ("plan", "cut"),
    [
        (ElasticBatches(47, 12, seed=1, epochs=2), CUT),
        (ElasticBatches(48, 6, seed=1, epochs=2), CUT),
        (ElasticBatches(48, 12, seed=2, epochs=2), CUT),
        (ElasticBatches(48, 12, seed=1, epochs=3), CUT),
        (ElasticBatches(48, 12, seed=1, epochs=2, shuffle=False), CUT),
        (PLAN, [2, []]),
        (PLAN, [1, [4, 8]]),
    ],
)
def test_plans_that_cut_other_batches_are_others(plan: ElasticBatches, cut: list[object]) -> None:
    assert told(plan, cut) != told(PLAN, CUT)


def test_a_rank_that_has_trained_tells_the_samples_of_each_step_that_it_may_give() -> None:
    rank = RankState(parts=frozenset({0}), completed=5, images={4: frozenset({0})})
    assert offered_data(PLAN, CUT, PLAN, rank).samples == {5: 60, 6: 72, 4: 48}
    assert offered_data(PLAN, CUT, PLAN, RankState(images={3: frozenset({0})})).samples == {3: 36}
    last = RankState(parts=frozenset({0}), completed=PLAN.total_steps)
    assert offered_data(PLAN, CUT, PLAN, last).samples == {8: 96}, "no step follows it"
    later = PLAN.resumed(PLAN.state_dict(5))
    assert offered_data(PLAN, CUT, later, rank).samples == {5: 60, 6: 72}, "what was before is not known"


def test_a_newcomer_tells_its_plan_alone() -> None:
    assert offered_data(PLAN, CUT, None, TRAINED) == RankData(told(PLAN, CUT))


def test_the_position_is_the_one_that_the_rank_which_trained_would_tell() -> None:
    for step in (0, 3, 8):
        position = position_text(PLAN, step, PLAN.samples_after(step))
        assert position == json.dumps(PLAN.state_dict(step))
        assert PLAN.resumed(json.loads(position)) == PLAN.resumed(PLAN.state_dict(step))
