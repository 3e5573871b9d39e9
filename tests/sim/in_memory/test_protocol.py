"""The in-memory protocol over every interleaving of ranks, faults and the operator (docs/design/in-memory.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.long_runs import LongRun
from tests.sim.in_memory.explore import Explored, explore
from tests.sim.in_memory.rules import Optimizer, Rules
from tests.sim.in_memory.world import Violation

from elastipod.in_memory.mesh_plan import MeshPlan
from elastipod.in_memory.rank import RankState

DDP = Rules()
SHARDED = Rules(mesh=MeshPlan.of({"shard": -1}), every=1)
HSDP = Rules(size=4, mesh=MeshPlan.of({"replicate": -1, "shard": 2}), optimizer=Optimizer.ALONE)
FAULTS = {"kill", "raise in the optimizer of", "sees its peers fail"}


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(replace(DDP, last_step=2), id="replicated state, a fault anywhere"),
        pytest.param(replace(DDP, resize_to=2), id="replicated state, a fault anywhere in a shrink"),
        pytest.param(replace(DDP, resize_to=4), id="replicated state, a fault anywhere in a growth"),
        pytest.param(replace(SHARDED, last_step=2), id="sharded state, a fault anywhere"),
        pytest.param(replace(SHARDED, resize_to=2), id="sharded state, a fault anywhere in a shrink"),
        pytest.param(replace(SHARDED, num_faults=0, resize_to=4), id="sharded state, a growth"),
        pytest.param(replace(SHARDED, every=2, last_step=3), id="copies of every second step, a fault anywhere"),
        pytest.param(HSDP, id="two replicas of two shards, a fault anywhere"),
    ],
)
def test_every_interleaving_ends_in_memory(rules: Rules) -> None:
    seen = explore(rules)
    assert seen.num_ends > 0
    assert seen.num_from_storage == 0
    expected = {"agrees", "is filled", "trains", "the operator allocates a generation"}
    if rules.is_sharded and rules.num_faults:
        expected.add("sees its peers fail and completes its step alone")
        if rules.optimizer is Optimizer.EITHER:
            expected.add("sees its peers fail and cannot complete its step alone")
    if rules.num_faults:
        expected |= FAULTS
    if rules.resize_to:
        expected |= {"arrives at the stop step", "the operator plans a resize"}
        if rules.is_sharded:
            expected |= {"hands over", "stops as planned"}
    if rules.every:
        expected |= {"copies step", "ends the copies of step"}
    assert expected <= set(seen.names), "moves that were never taken"


@pytest.mark.long("inmemory-model")
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("name", "rules"),
    [
        pytest.param(name, rules, id=name.replace("_", " "))
        for name, rules in {
            "replicated_two_faults": replace(DDP, num_faults=2, last_step=2),
            "replicated_two_faults_in_a_shrink": replace(DDP, num_faults=2, resize_to=2),
            "replicated_two_faults_in_a_growth": replace(DDP, num_faults=2, resize_to=4),
            "sharded_two_faults": replace(SHARDED, num_faults=2),
            "sharded_a_fault_in_a_growth": replace(SHARDED, resize_to=4),
            "sharded_two_faults_in_a_shrink": replace(SHARDED, num_faults=2, resize_to=2),
            "every_second_step_a_fault_in_a_shrink": replace(SHARDED, every=2, last_step=3, resize_to=2),
            "every_second_step_a_fault_in_a_replacement": replace(SHARDED, every=2, last_step=2, resize_to=3),
            "every_second_step_two_faults": replace(SHARDED, every=2, last_step=2, num_faults=2),
            "hsdp_a_fault_in_a_growth": replace(HSDP, size=2, resize_to=4),
            "hsdp_a_fault_in_a_shrink_without_copies": replace(HSDP, resize_to=2),
            "hsdp_a_fault_in_a_shrink_with_copies": replace(HSDP, resize_to=2, every=1),
            "hsdp_two_faults": replace(HSDP, num_faults=2),
        }.items()
    ],
)
def test_larger_cases(name: str, rules: Rules, long_run: LongRun) -> None:
    """State comes from storage when every rank that held a part of it is gone, and never else."""
    seen = explore(rules)
    long_run.count(**{name: seen.num_states})
    assert seen.num_ends > seen.num_from_storage
    assert bool(seen.num_from_storage) == (rules.num_faults >= rules.num_holders)


SMALL = {
    "replicated state": DDP,
    "replicated state, a shrink": replace(DDP, resize_to=2),
    "sharded state": SHARDED,
    "sharded state, a shrink": replace(SHARDED, resize_to=2),
    "two shards, two faults": replace(SHARDED, size=2, num_faults=2),
    "two shards, copies of every second step": replace(SHARDED, size=2, every=2, last_step=3),
    "a growth to two replicas": replace(HSDP, size=2, num_faults=0, resize_to=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("rules", [pytest.param(rules, id=name) for name, rules in SMALL.items()])
def test_what_is_left_out_of_the_interleavings_shows_nothing_else(rules: Rules) -> None:
    """Every final state is reached with and without the reductions, in which a killed rank stands for one that hangs until it is killed."""
    reduced, whole = explore(rules), explore(replace(rules, is_reduced=False))
    assert reduced.num_states < whole.num_states
    assert reduced.finals == whole.finals
    hangs = {"hang", "the agent kills which hangs"} if rules.num_faults else set()
    assert set(whole.names) - set(reduced.names) == hangs


def _found(rules: Rules, message: str) -> None:
    with pytest.raises(Violation, match=message):
        explore(rules)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("breaks", "rules"),
    [
        ("leave alone", replace(DDP, num_faults=0, resize_to=2)),
        ("leave before the hand-over ends", replace(SHARDED, num_faults=0, resize_to=2)),
    ],
)
def test_who_leaves_before_the_others_breaks_a_planned_change(breaks: str, rules: Rules) -> None:
    """The reductions rely on this rule, so it is shown without them."""
    _found(replace(rules, breaks=frozenset({breaks}), is_reduced=False), "broken off without a fault")


@pytest.mark.slow
@pytest.mark.parametrize("is_reduced", [True, False])
@pytest.mark.parametrize(
    ("breaks", "rules", "message"),
    [
        ("trust aborted collectives", DDP, "gradients of an aborted collective"),
        ("leave hung ranks", DDP, r"the end cannot be reached|nothing can happen"),
        ("commit alone", HSDP, "holds no step"),
        ("keep no image of the last step", SHARDED, "holds no step"),
        ("no copies", SHARDED, "holds no step"),
        ("let leavers go at once", replace(SHARDED, resize_to=2), "holds no step"),
        ("no second holders", replace(SHARDED, resize_to=2), "holds no step"),
        ("drop images before the copies end", replace(SHARDED, every=2, last_step=2), "holds no step"),
    ],
)
def test_protocols_without_one_of_the_rules_are_found_out(
    breaks: str, rules: Rules, message: str, is_reduced: bool
) -> None:
    _found(replace(rules, breaks=frozenset({breaks}), is_reduced=is_reduced), message)


def test_without_copies_nobody_is_a_second_holder() -> None:
    """A fault takes the state then, whatever is handed over; without one nothing is lost."""
    assert explore(replace(SHARDED, every=0, num_faults=0, resize_to=2)).num_from_storage == 0
    assert explore(replace(SHARDED, every=0, resize_to=2)).num_from_storage > 0


@pytest.mark.slow
def test_an_optimizer_that_needs_its_peers_needs_an_image_of_the_step_before() -> None:
    """What a fault between the optimizers of two ranks costs: FSDP2 has its copies; HSDP has none, which is a limit of it."""
    assert explore(replace(SHARDED, optimizer=Optimizer.NEEDS_PEERS)).num_from_storage == 0
    _found(replace(HSDP, optimizer=Optimizer.NEEDS_PEERS), "holds no step any more after 1 faults")


Change = Callable[[RankState, RankState, frozenset[int]], RankState]
Plant = Callable[[Change], None]


@pytest.fixture
def agreed(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Change what a rank holds once all have agreed: a function of the rank before and after, and of the parts that it is to hold."""
    own: Callable[..., RankState | None] = RankState.agreed

    def plant(change: Change) -> None:
        def changed(self: RankState, *args: Any) -> RankState | None:
            after = own(self, *args)
            return after and change(self, after, args[2])

        monkeypatch.setattr(RankState, "agreed", changed)

    return plant


def _without_new_images(before: RankState, after: RankState, _: frozenset[int]) -> RankState:
    return replace(after, images={step: before.images[step] for step in after.images if step in before.images})


@pytest.mark.slow
def test_a_state_that_is_overwritten_without_an_image_may_be_the_last(agreed: Plant) -> None:
    """A rank that lost its gradients is filled by the one that completed the step. When that one dies meanwhile, nothing is left."""
    agreed(_without_new_images)
    _found(replace(DDP, num_faults=2), "holds no step")


@pytest.mark.slow
def test_a_part_that_stays_must_be_kept_beside_the_images_of_the_others(agreed: Plant) -> None:
    """What a hand-over has left with second holders is of no use without the parts that the first step of the new world overwrites."""
    agreed(
        lambda *ranks: (
            ranks[1] if ranks[1].completed is None or ranks[0].parts != ranks[2] else _without_new_images(*ranks)
        )
    )
    _found(replace(HSDP, resize_to=2, every=1), "holds no step")


@pytest.mark.long("inmemory-model")
@pytest.mark.timeout(3000)
def test_images_of_steps_that_are_computed_again_must_go(agreed: Plant) -> None:
    agreed(lambda before, after, _: replace(after, images={**before.images, **after.images}))
    _found(replace(SHARDED, num_faults=2, last_step=2), r"differ|different histories")


def test_a_rank_that_completes_its_step_alone_still_offers_the_copies_that_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    completed_alone = RankState.completed_alone
    monkeypatch.setattr(RankState, "completed_alone", lambda self: replace(completed_alone(self), images={}))
    _found(SHARDED, "or holds some that it does not offer")


def test_the_size_of_an_exploration_is_bounded() -> None:
    seen: Explored = explore(DDP)
    with pytest.raises(AssertionError, match="more than"):
        explore(DDP, limit=seen.num_states - 1)
