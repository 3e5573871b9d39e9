"""The in-memory protocol over every interleaving of ranks, faults and the operator (docs/design/in-memory.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.sim.in_memory.explore import explore
from tests.sim.in_memory.world import Rules, Violation

from elastipod.in_memory import rank
from elastipod.in_memory.rank import RankState

DDP = Rules(last_step=1, num_faults=1)
SHARDED = replace(DDP, num_parts=3)


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(replace(DDP, last_step=2), id="replicated state, a fault anywhere"),
        pytest.param(replace(DDP, resize_to=2), id="replicated state, a fault anywhere in a shrink"),
        pytest.param(replace(SHARDED, last_step=2), id="sharded state, a fault anywhere"),
        pytest.param(replace(SHARDED, resize_to=2), id="sharded state, a fault anywhere in a shrink"),
        pytest.param(replace(SHARDED, num_faults=0, resize_to=4), id="sharded state, a growth"),
    ],
)
def test_every_interleaving_ends_in_memory(rules: Rules) -> None:
    seen = explore(rules)
    assert seen.num_ends > 0
    assert seen.num_from_storage == 0
    expected = {"agrees", "is filled", "trains", "the operator allocates a generation"}
    if rules.is_sharded and rules.num_faults:
        expected |= {
            f"sees its peers fail and {what}" for what in ("completes its step alone", "cannot complete its step alone")
        }
    if rules.num_faults:
        expected |= {"kill", "hang", "raise in the optimizer of", "sees its peers fail", "the agent kills which hangs"}
    if rules.resize_to:
        expected |= {"arrives at the stop step", "the operator plans a resize"}
    assert expected <= set(seen.names), "moves that were never taken"


@pytest.mark.long("inmemory-model")
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(replace(DDP, num_faults=2, last_step=2), id="replicated state, two faults"),
        pytest.param(replace(DDP, resize_to=4), id="replicated state, a fault in a growth"),
        pytest.param(replace(SHARDED, resize_to=4), id="sharded state, a fault in a growth"),
        pytest.param(replace(SHARDED, num_faults=2), id="sharded state, two faults"),
        pytest.param(replace(DDP, num_faults=2, resize_to=2), id="replicated state, two faults in a shrink"),
    ],
)
def test_two_faults(rules: Rules) -> None:
    """State comes from storage when every rank that held a part of it is gone, and never else."""
    seen = explore(rules)
    assert seen.num_ends > seen.num_from_storage
    assert bool(seen.num_from_storage) == (rules.num_faults >= rules.num_holders)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("breaks", "rules", "message"),
    [
        ("trust aborted collectives", DDP, "gradients of an aborted collective"),
        ("leave hung ranks", DDP, r"the end cannot be reached|nothing can happen"),
        ("leave alone", replace(DDP, num_faults=0, resize_to=2), "broken off without a fault"),
        ("commit alone", replace(SHARDED, last_step=2), "holds no step"),
        ("drop images early", SHARDED, "holds no step"),
        ("no copies", replace(SHARDED, last_step=2), "holds no step"),
        ("let leavers go at once", replace(SHARDED, resize_to=2), "holds no step"),
    ],
)
def test_protocols_without_one_of_the_rules_are_found_out(breaks: str, rules: Rules, message: str) -> None:
    with pytest.raises(Violation, match=message):
        explore(replace(rules, breaks=frozenset({breaks})))


@pytest.mark.slow
def test_a_state_that_is_overwritten_without_an_image_may_be_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that lost its gradients is filled by the one that completed the step. When that one dies meanwhile, nothing is left."""
    agreed = RankState.agreed

    def without_image(self: RankState, *args: object) -> RankState | None:
        after = agreed(self, *args)  # type: ignore[arg-type]
        return after and replace(
            after, images={step: parts for step, parts in after.images.items() if step in self.images}
        )

    monkeypatch.setattr(rank.RankState, "agreed", without_image)
    with pytest.raises(Violation, match="holds no step"):
        explore(replace(DDP, num_faults=2))


@pytest.mark.long("inmemory-model")
@pytest.mark.timeout(3000)
def test_images_of_steps_that_are_computed_again_must_go(monkeypatch: pytest.MonkeyPatch) -> None:
    agreed = RankState.agreed

    def with_newer_images(self: RankState, *args: object) -> RankState | None:
        after = agreed(self, *args)  # type: ignore[arg-type]
        return after and replace(after, images={**self.images, **after.images})

    monkeypatch.setattr(rank.RankState, "agreed", with_newer_images)
    with pytest.raises(Violation, match=r"donors of part . at step . differ|different histories"):
        explore(replace(SHARDED, num_faults=2, last_step=2))


def test_a_rank_that_completes_its_step_alone_still_offers_the_copies_that_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    completed_alone = RankState.completed_alone
    monkeypatch.setattr(RankState, "completed_alone", lambda self: replace(completed_alone(self), images={}))
    with pytest.raises(Violation, match="or holds some that it does not offer"):
        explore(SHARDED)
