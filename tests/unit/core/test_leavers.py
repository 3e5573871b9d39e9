"""Who leaves in a planned change: decided and recorded before the workers stop, and kept to when they have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import (
    NOW,
    acts,
    agent,
    context,
    job,
    observed,
    pid,
    pod,
    policy,
    ready,
    running,
    seconds,
    trains,
    transition,
)

from elastipod_operator.core.actions import DeletePod, Plan, StartWorkers, StopWorkers
from elastipod_operator.core.leavers import choose_leavers, kept_until_the_start
from elastipod_operator.core.names import PodId
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Depth, Record, TransitionKind
from elastipod_operator.core.record_codec import decode, encode
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import AgentState, ObservedAgent, ObservedPod, Policy, SpecLimits

SHARDS: dict[str, Any] = {"memory_state": "sharded"}
TRAINS = running(1, step=5, **SHARDS)
GOES: dict[str, Any] = {"disruption": "taint spot:NoExecute"}
TWO_SPECS = (SpecLimits("base", 2), SpecLimits("extra", 2))
BASE, EXTRA = pid(0, spec="base"), pid(0, spec="extra")
BY_TWO = policy(sizes=Sizes((2, 4), 2))

Seen = tuple[ObservedPod, ObservedAgent]


def parked(**changes: Any) -> ObservedAgent:
    """Give an agent whose workers wait at the barrier with their shards."""
    return ready(1, **SHARDS, num_kept=1, drained=True, **changes)


def members(size: int = 4, **changes: dict[str, Any]) -> list[Seen]:
    """Give members that train. changes: of their pods, by `p` and ordinal."""
    return [(pod(n, **changes.get(f"p{n}", {})), TRAINS) for n in range(size)]


@pytest.mark.parametrize(
    ("seen", "record", "wishes", "size", "leavers"),
    [
        pytest.param(members(), trains(4), policy(), 2, (pid(2), pid(3)), id="the last ranks"),
        pytest.param(members(), trains(4), policy(), 4, (), id="nobody"),
        pytest.param(members(p1=GOES), trains(4), policy(), 3, (pid(1),), id="who must go"),
        pytest.param(members(p0=GOES), trains(4), BY_TWO, 2, (pid(0), pid(3)), id="who must go takes another along"),
        pytest.param(
            [*members(p1=GOES), (pod(4), ready(0))], trains(4), policy(), 4, (pid(1),), id="a newcomer takes its place"
        ),
        pytest.param(
            members(2, p1=GOES), trains(2), policy(2, 2), 2, (pid(1),), id="too few are left: the other waits for a replacement"
        ),
        pytest.param(
            [(pod(BASE), TRAINS), (pod(EXTRA), TRAINS), (pod(pid(1, spec="base")), ready(0))],
            trains(members=(BASE, EXTRA)), policy(2, 2, specs=TWO_SPECS), 2, (EXTRA,), id="the base comes first",
        ),
        pytest.param(members(3), trains(4), policy(), 3, (pid(3),), id="one that is not listed any more"),
    ],
)  # fmt: skip
def test_the_leavers_are_those_whom_the_next_generation_does_not_take(
    seen: list[Seen], record: Record, wishes: Policy, size: int, leavers: tuple[PodId, ...]
) -> None:
    assert choose_leavers(record, context(observed(job(record, wishes), seen)), size) == leavers


def test_members_whose_quota_is_lost_leave_even_if_their_agents_are_silent() -> None:
    silent = agent(**SHARDS, last_answer=NOW - seconds(60))
    seen = [*members(3), (pod(3), silent)]
    now = context(observed(job(trains(4)), seen), quota_lost={pid(3).slot: ("Preempted", "a higher class")})
    assert choose_leavers(trains(4), now, 3) == (pid(3),)


def shrink(*agents: Seen, record: Record | None = None, wishes: Policy | None = None) -> Plan:
    return plan(observed(job(record or trains(4), wishes or policy(2, 2)), agents))


def leaves(todo: Plan) -> list[bool | None]:
    return [one.leaves for one in acts(todo, StopWorkers)]


def test_a_shrink_of_sharded_state_is_in_memory_and_another_operator_says_the_same_of_it() -> None:
    todo = shrink(*members())
    begun = todo.record.transition
    assert begun is not None
    assert (begun.depth, begun.target_size, begun.leavers) == (Depth.MEMORY, 2, (pid(2), pid(3)))
    assert leaves(todo) == [False, False, True, True]
    assert {(one.graceful, one.keeps) for one in acts(todo, StopWorkers)} == {(True, True)}
    after_crash = shrink(*members(), record=decode(encode(todo.record)), wishes=policy(2, 4))
    assert leaves(after_crash) == [False, False, True, True], "whatever the user wishes by now"


def test_one_that_must_go_since_is_told_so_while_it_stops() -> None:
    """Its workers may not have reached the stop step yet. Who was told so at first is not told again."""
    record = trains(4, transition=transition(depth=Depth.MEMORY, leavers=(pid(3),)))
    stops = agent(AgentState.STOPPING, **SHARDS)
    seen = [(pod(0), stops), (pod(1, **GOES), stops), (pod(2), stops), (pod(3, **GOES), stops)]
    told = acts(shrink(*seen, record=record), StopWorkers)
    assert [(one.pod, one.leaves, one.graceful) for one in told] == [(pod(1).name, True, True)]


def start(
    *seen: Seen, wishes: Policy | None = None, leavers: tuple[PodId, ...] | None = (), **changes: Any
) -> list[PodId]:
    """Give the members of the generation that begins after a shrink of four."""
    begun = transition(**{"depth": Depth.MEMORY, "target_size": 2, "leavers": leavers, **changes})
    todo = shrink(*seen, record=trains(4, transition=begun), wishes=wishes)
    assert len(acts(todo, StartWorkers)) == len(todo.record.members)
    return list(todo.record.members)


def stopped(*changed: Seen) -> list[Seen]:
    """Give four members whose workers are at the barrier; some of them changed."""
    by_id = {seen[0].id: seen for seen in [*((pod(n), parked()) for n in range(4)), *changed]}
    return [by_id[each] for each in sorted(by_id)]


LAST_TWO = (pid(2), pid(3))
ROOMY = policy(2, 3, specs=(SpecLimits("workers", 5),))


@pytest.mark.parametrize(
    ("seen", "wishes", "leavers", "begin"),
    [
        pytest.param(stopped(), policy(2, 2), LAST_TWO, (0, 1), id="as it was decided"),
        pytest.param(stopped(), policy(2, 2), (pid(0), pid(2)), (1, 3), id="not by their ranks"),
        pytest.param(stopped((pod(1, **GOES), parked())), policy(2, 4), LAST_TWO, (0, 1, 2), id="one of them must go by now"),
        pytest.param(stopped((pod(1, **GOES), parked())), policy(2, 2), LAST_TWO, (0, 1), id="and nobody else may stay"),
        pytest.param(stopped(), policy(1, 1), LAST_TWO, (0, 1), id="the job must be smaller by now"),
        pytest.param(stopped(), policy(2, 3), LAST_TWO, (0, 1, 2), id="there is room for one that left"),
        pytest.param(stopped((pod(4), ready(0))), ROOMY, LAST_TWO, (0, 1, 4), id="a newcomer before one that left"),
        pytest.param(
            stopped((pod(1, **GOES), parked(terminating=True))), policy(2, 2), LAST_TWO, (0, 2), id="its agent takes no start"
        ),
        pytest.param(stopped((pod(1, **GOES), ready(1))), policy(2, 2), LAST_TWO, (0, 2), id="its processes have ended"),
        pytest.param(stopped(), policy(2, 2), (pid(3),), (0, 1), id="no allowed size has room for all of them"),
        pytest.param(stopped((pod(1), parked(last_answer=NOW - seconds(60)))), policy(2, 2), LAST_TWO, (0, 2), id="it is silent"),
        pytest.param(stopped((pod(1, **GOES), parked())), policy(2, 2), None, (0, 2), id="nobody was told anything"),
    ],
)  # fmt: skip
def test_who_was_told_to_stay_begins_the_next_generation(
    seen: list[Seen], wishes: Policy, leavers: tuple[PodId, ...] | None, begin: tuple[int, ...]
) -> None:
    assert start(*seen, wishes=wishes, leavers=leavers) == [pid(n) for n in begin]


def test_replicated_state_needs_none_of_them() -> None:
    whole = replace(parked(), memory_state="replicated")
    seen = [(pod(0), whole), (pod(1, **GOES), whole), (pod(2), whole), (pod(3), whole)]
    assert start(*seen, leavers=LAST_TWO) == [pid(0), pid(2)]


HOLDS, NEW = ready(1, memory_state="replicated", num_kept=1), ready(1, memory_state="replicated", num_kept=0)
ONE_TWO_OR_FOUR = policy(1, 4, sizes=Sizes((1, 2, 4), 2), specs=TWO_SPECS)


@pytest.mark.parametrize("kind", [TransitionKind.RESIZE, TransitionKind.RECOVERY])
@pytest.mark.parametrize(
    ("first", "second", "begins"),
    [
        pytest.param((pod(0), HOLDS), (pod(1), HOLDS), 0, id="as it was decided"),
        pytest.param((pod(0), NEW), (pod(1), HOLDS), 1, id="its processes have ended"),
        pytest.param(
            (pod(0), NEW), (pod(1, **GOES), HOLDS), 0, id="the other must go, before any could hold its state"
        ),
        pytest.param((pod(0), NEW), (pod(1), NEW), 0, id="nobody holds anything"),
    ],
)
def test_one_that_holds_the_whole_state_begins_the_next_generation(
    kind: TransitionKind, first: Seen, second: Seen, begins: int
) -> None:
    begun = transition(
        kind, depth=Depth.MEMORY, leavers=(pid(1),), target_size=1, graceful=False, is_budget_checked=True
    )
    todo = shrink(first, second, record=trains(2, transition=begun), wishes=policy(1, 1))
    assert todo.record.members == (pid(begins),)


def test_new_pods_of_the_base_do_not_take_the_place_of_the_only_one_that_holds_the_state() -> None:
    begun = transition(TransitionKind.RECOVERY, depth=Depth.MEMORY, target_size=2, is_budget_checked=True)
    second, other = pid(1, spec="base"), pid(1, spec="extra")
    record = trains(members=(BASE, second, EXTRA, other), transition=begun)
    seen = [(pod(PodId("base", n, 1)), ready(0)) for n in range(2)]
    todo = plan(observed(job(record, ONE_TWO_OR_FOUR), [*seen, (pod(EXTRA), HOLDS)]))
    assert EXTRA in todo.record.members
    assert len(todo.record.members) == 2


def test_the_pod_of_the_only_one_that_holds_the_state_stays_until_the_next_generation() -> None:
    begun = transition(depth=Depth.MEMORY, leavers=(pid(1),), target_size=1)
    stops = agent(AgentState.STOPPING, memory_state="replicated")
    for first, stays in ((stops, True), (HOLDS, False)):
        replicas = context(observed(job(trains(2, transition=begun)), [(pod(0), first), (pod(1), HOLDS)])).replicas
        assert (pid(1) in kept_until_the_start(trains(2, transition=begun), replicas, policy(1, 1))) is stays


def test_a_pod_that_must_go_is_replaced_at_once_where_all_were_told_that_they_leave() -> None:
    """In a queue its replacement gets the quota that it still has."""
    begun = transition(depth=Depth.MEMORY, leavers=(pid(0), pid(1)), target_size=2)
    todo = shrink((pod(0), HOLDS), (pod(1, **GOES), HOLDS), record=trains(2, transition=begun), wishes=policy(2, 2))
    assert [one.name for one in acts(todo, DeletePod)] == [pod(1).name]


def test_where_those_who_stay_cannot_train_at_once_all_save_and_wait_with_their_state() -> None:
    """The only copy of the newest steps would otherwise go with the next node that is drained, or with a suspension."""
    whole = replace(TRAINS, memory_state="replicated")
    fixed = policy(2, 2)
    todo = shrink((pod(0, **GOES), whole), (pod(1), whole), record=trains(2), wishes=fixed)
    assert todo.record.transition is not None
    assert todo.record.transition.depth is Depth.MEMORY
    told = acts(todo, StopWorkers)
    assert [(one.graceful, one.leaves, one.keeps) for one in told] == [(True, True, True)] * 2
    replaced = [(pod(0, **GOES), whole), (pod(1), whole), (pod(pid(2)), ready(0))]
    assert leaves(shrink(*replaced, record=trains(2), wishes=policy(2, 2, specs=(SpecLimits("workers", 3),)))) == [
        True,
        False,
    ]
    back = [(pod(pid(0, 1)), ready(0)), (pod(1), HOLDS)]
    assert shrink(*back, record=todo.record, wishes=fixed).record.members == (pid(1), pid(0, 1))
    assert leaves(shrink(*members(2, p0=GOES), record=trains(2), wishes=fixed)) == [True, False], (
        "shards are handed over"
    )


def test_workers_that_were_told_to_stay_come_before_newcomers_of_the_base() -> None:
    """A short drain does not wait for storage where the memory of those who stay holds the step."""
    wishes = policy(1, 2, specs=TWO_SPECS)
    other = pid(1, spec="extra")
    begun = transition(leavers=(other,), depth=Depth.PROCESS)
    record = trains(members=(BASE, EXTRA, other), transition=begun)
    drained = ready(1, drained=True)
    seen = [(pod(BASE), drained), (pod(pid(1, spec="base")), ready(0)), (pod(EXTRA), drained), (pod(other), drained)]
    assert plan(observed(job(record, wishes), seen)).record.members == (BASE, EXTRA)


def test_without_the_base_those_with_shards_do_not_begin() -> None:
    """The base has lost its pod, which took its shard along; the job waits for a replacement of the base."""
    other = pid(1, spec="extra")
    wishes = policy(1, 4, specs=(SpecLimits("base", 1), SpecLimits("extra", 3)))
    record = trains(members=(BASE, EXTRA, other), transition=transition(depth=Depth.MEMORY, leavers=(other,)))
    gone = (pod(BASE, kill_at=NOW + seconds(5)), ready(1, terminating=True))
    todo = plan(observed(job(record, wishes), [gone, (pod(EXTRA), parked()), (pod(other), parked())]))
    assert not acts(todo, StartWorkers)
    fresh = (pod(pid(0, 1, "base")), ready(0))
    todo = plan(observed(job(record, wishes), [fresh, (pod(EXTRA), parked()), (pod(other), parked())]))
    assert todo.record.members == (pid(0, 1, "base"), EXTRA, other)


def test_those_with_shards_drain_when_all_train_where_new_processes_still_start() -> None:
    """They are at no step, so a hard stop would lose none; but then nobody could hand over a shard."""
    imports = running(1)
    todo = shrink(*members(3), (pod(3), imports), wishes=policy(2, 2))
    assert {(one.graceful, one.leaves) for one in acts(todo, StopWorkers)} == {(True, False), (True, True)}
    whole = replace(TRAINS, memory_state="replicated")
    todo = shrink(*((pod(n), whole) for n in range(3)), (pod(3), imports), wishes=policy(2, 2))
    assert {one.graceful for one in acts(todo, StopWorkers)} == {False}


def starting(*agents: ObservedAgent, since_s: float = 1.0, wishes: Policy | None = None) -> Plan:
    """Decide about a generation of which not all run yet; a node is drained meanwhile."""
    seen = [(pod(n, **(GOES if n == 1 else {})), one) for n, one in enumerate(agents)]
    record = trains(2, generation=2, running_since=None, generation_began_at=NOW - seconds(since_s))
    return plan(observed(job(record, wishes or policy(1, 4)), seen))


@pytest.mark.parametrize(
    ("late", "since_s", "waits"),
    [
        pytest.param(parked(), 1.0, True, id="they can hand over once all run"),
        pytest.param(parked(terminating=True), 1.0, False, id="one takes no start"),
        pytest.param(parked(), 61.0, False, id="one has not taken it for a minute"),
        pytest.param(replace(parked(), memory_state="replicated"), 1.0, False, id="each has the whole state"),
    ],
)
def test_a_change_waits_until_those_with_shards_have_begun(late: ObservedAgent, since_s: float, waits: bool) -> None:
    begun = running(2, **{"memory_state": late.memory_state})
    todo = starting(begun, late, since_s=since_s)
    assert (todo.record.transition is None) is waits
    if waits:
        assert acts(todo, StartWorkers) == [StartWorkers(pod(1).name, 1)]
        assert todo.wake_at is not None
        assert todo.wake_at <= NOW + seconds(60 - since_s)
