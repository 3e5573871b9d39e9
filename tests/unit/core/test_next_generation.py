"""The generation that follows a drain in memory: decided before the workers stop, begun by agents, taken over or withdrawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import (
    NOW,
    Seen,
    acts,
    agent,
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

from elastipod_operator.core.actions import DeletePod, ShutDownAgent, StartWorkers, StopWorkers
from elastipod_operator.core.next_generation import FIRST_STEP_PATIENCE
from elastipod_operator.core.plan import plan
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import Depth, NextGeneration, Record, TransitionKind
from elastipod_operator.core.record_codec import decode, encode
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import AgentState, ObservedAgent, Preparation

KEEPS: dict[str, Any] = {"memory_state": "replicated", "can_begin_next": True}
FOLLOWING = NextGeneration(
    generation=2, members=(pid(0), pid(1), pid(2)), master_addr="10.0.0.0", agents_serve_store=False
)
QUICK = policy(scaling_timeout=seconds(0))


def trains_on(**changes: Any) -> ObservedAgent:
    return running(1, step=5, **(KEEPS | changes))


def newcomer(**changes: Any) -> ObservedAgent:
    return ready(0, can_prepare=True, preparation=Preparation.READY, **(KEEPS | changes))


def drains(**changes: Any) -> ObservedAgent:
    return agent(AgentState.STOPPING, 1, **(KEEPS | {"next_generation": 2} | changes))


def has_begun(*, since_s: float = 0.2, **changes: Any) -> ObservedAgent:
    return agent(generation=2, generation_at=NOW - seconds(since_s), **(KEEPS | changes))


def growing(**changes: Any) -> Record:
    """Give the record of a job of two that grows to three, of which its agents were told."""
    begun = transition(
        target_size=3, depth=Depth.MEMORY, leavers=(), next_generation=FOLLOWING, cause=Reason.CAPACITY_AVAILABLE
    )
    return replace(trains(2), transition=begun, newest_told=2, **changes)


def three(*agents: ObservedAgent) -> list[Seen]:
    return [(pod(number), told) for number, told in enumerate(agents)]


def test_a_growth_is_decided_before_its_workers_stop() -> None:
    todo = plan(observed(job(trains(2), QUICK), three(trains_on(), trains_on(), newcomer())))
    assert todo.record.transition is not None
    assert todo.record.transition.next_generation == FOLLOWING
    assert (todo.record.generation, todo.record.newest_told) == (1, 2), "the present one is the first, until then"
    assert [(stop.pod, stop.generation, stop.next_rank) for stop in acts(todo, StopWorkers)] == [
        ("job-workers-0", 1, 0), ("job-workers-1", 1, 1),
    ]  # fmt: skip
    assert acts(todo, StartWorkers) == [StartWorkers("job-workers-2", 2, is_early=True)]
    assert decode(encode(todo.record)) == todo.record


def test_a_shrink_is_decided_before_its_workers_stop() -> None:
    smaller = policy(2, 2, sizes=Sizes((2,), 2))
    todo = plan(observed(job(trains(3), smaller), three(trains_on(), trains_on(), trains_on())))
    assert [(stop.pod, stop.leaves, stop.next_rank) for stop in acts(todo, StopWorkers)] == [
        ("job-workers-0", False, 0), ("job-workers-1", False, 1), ("job-workers-2", True, None),
    ]  # fmt: skip
    assert acts(todo, StartWorkers) == []


@pytest.mark.parametrize(
    ("agents", "wishes"),
    [
        pytest.param(
            (trains_on(can_begin_next=False), trains_on(), newcomer()), QUICK, id="an agent of a version before"
        ),
        pytest.param((trains_on(memory_state=""), trains_on(memory_state=""), newcomer()), QUICK, id="nothing is kept"),
        pytest.param(
            (trains_on(), trains_on(), newcomer()), replace(QUICK, new_processes=True), id="recovery: Process"
        ),
    ],
)
def test_other_changes_are_decided_when_all_have_stopped(agents: tuple[ObservedAgent, ...], wishes: Any) -> None:
    todo = plan(observed(job(trains(2), wishes), three(*agents)))
    assert todo.record.transition is not None
    assert todo.record.transition.next_generation is None
    assert {stop.next_rank for stop in acts(todo, StopWorkers)} == {None}
    assert acts(todo, StartWorkers) == []


def test_an_agent_is_told_until_it_says_that_it_knows() -> None:
    todo = plan(observed(job(growing()), three(drains(), drains(next_generation=None), newcomer())))
    assert [(stop.pod, stop.next_rank) for stop in acts(todo, StopWorkers)] == [("job-workers-1", 1)]
    assert acts(todo, StartWorkers) == [StartWorkers("job-workers-2", 2, is_early=True)]


def test_a_generation_that_agents_have_begun_is_taken_over_with_its_first_step() -> None:
    begun = three(has_begun(), has_begun(), has_begun())
    waits = plan(observed(job(growing(), policy(2, 3)), begun))
    assert (waits.record.generation, waits.record.transition) == (1, growing().transition), (
        "a write would prolong the pause"
    )
    assert (waits.actions, waits.status_waits) == ((), True)
    assert waits.wake_at is not None
    assert waits.wake_at <= NOW - seconds(0.2) + FIRST_STEP_PATIENCE
    todo = plan(observed(job(growing(resizes_undone=2)), three(has_begun(step=6), has_begun(), has_begun())))
    record = todo.record
    assert (record.generation, record.members, record.transition) == (2, FOLLOWING.members, None)
    assert (record.master_addr, record.generation_began_at, record.resizes_undone) == ("10.0.0.0", NOW, 0)
    assert acts(todo, StartWorkers) == [], "all have begun it"
    (entry,) = todo.history
    assert (entry.generation, entry.from_size, entry.to_size, entry.depth) == (2, 2, 3, Depth.MEMORY)


@pytest.mark.parametrize(
    "agents",
    [
        pytest.param((has_begun(since_s=1.2), has_begun(since_s=1.3), has_begun()), id="no step for a while"),
        pytest.param((has_begun(state=AgentState.FAULTED), has_begun(), has_begun()), id="a worker has failed"),
        pytest.param((has_begun(), has_begun(), has_begun(terminating=True)), id="a newcomer must go"),
    ],
)
def test_it_is_taken_over_without_a_step(agents: tuple[ObservedAgent, ...]) -> None:
    todo = plan(observed(job(growing()), three(*agents)))
    assert (todo.record.generation, todo.record.transition) == (2, None)


def test_a_newcomer_that_has_not_heard_its_start_gets_it_again() -> None:
    begun = has_begun(step=6)
    todo = plan(observed(job(growing()), three(begun, begun, newcomer())))
    assert acts(todo, StartWorkers) == [StartWorkers("job-workers-2", 2)]


@pytest.mark.parametrize(
    ("third", "changes"),
    [
        pytest.param((pod(2, disruption="taint spot:NoExecute"), newcomer()), {}, id="a newcomer must go"),
        pytest.param((pod(2, phase="Failed"), newcomer()), {}, id="a newcomer is lost"),
        pytest.param((pod(2), newcomer()), {"low": 2, "high": 2}, id="the size is allowed no more"),
        pytest.param((pod(2), agent(AgentState.FAULTED, 2, **KEEPS)), {}, id="a newcomer has failed"),
        pytest.param((pod(2), newcomer()), {"suspend": True}, id="the user suspends the job"),
    ],
)
def test_what_could_not_train_is_withdrawn_and_told(third: Seen, changes: dict[str, Any]) -> None:
    seen = [(pod(0), drains()), (pod(1), drains()), third]
    todo = plan(observed(job(growing(), policy(**changes)), seen))
    assert todo.record.transition is not None
    assert todo.record.transition.next_generation is None
    assert todo.record.newest_told == 2, "no other generation gets its number"
    told = [stop for stop in acts(todo, StopWorkers) if stop.graceful]
    assert [(stop.pod, stop.next_rank) for stop in told] == [("job-workers-0", None), ("job-workers-1", None)]
    assert [start for start in acts(todo, StartWorkers) if start.is_early] == []


def test_those_who_stay_with_shards_begin_it_even_if_one_of_them_must_go_by_now() -> None:
    """Those who leave may have handed their shards over to it. The job changes from there."""
    shards = {"memory_state": "sharded"}
    seen = [
        (pod(0), drains(**shards)),
        (pod(1, disruption="taint spot:NoExecute"), drains(**shards)),
        (pod(2), newcomer(memory_state="")),
    ]
    todo = plan(observed(job(growing()), seen))
    assert todo.record.transition is not None
    assert todo.record.transition.next_generation == FOLLOWING


def test_those_who_have_begun_what_is_withdrawn_return_with_what_they_hold() -> None:
    seen = [(pod(0), has_begun()), (pod(1), drains()), (pod(2, disruption="taint spot:NoExecute"), has_begun())]
    stops = {stop.pod: stop for stop in acts(plan(observed(job(growing()), seen)), StopWorkers)}
    assert (stops["job-workers-0"].graceful, stops["job-workers-0"].generation, stops["job-workers-0"].keeps) == (
        False, 2, True,
    )  # fmt: skip
    assert (stops["job-workers-1"].graceful, stops["job-workers-1"].next_rank) == (True, None)
    assert not stops["job-workers-2"].graceful


def test_it_is_withdrawn_if_a_member_has_stopped_and_has_not_begun_it() -> None:
    stopped = ready(1, drained=True, num_kept=0, **KEEPS)
    todo = plan(observed(job(growing(), policy(2, 3)), three(has_begun(), stopped, has_begun())))
    assert todo.record.transition is not None
    assert todo.record.transition.next_generation is None
    assert todo.actions == (), "the record comes first"
    assert todo.wake_at == NOW
    todo = plan(observed(job(todo.record, policy(2, 3)), three(has_begun(), stopped, has_begun())))
    assert [(stop.pod, stop.graceful) for stop in acts(todo, StopWorkers)] == [
        ("job-workers-0", False), ("job-workers-2", False),
    ]  # fmt: skip


def test_the_number_of_a_generation_that_was_withdrawn_is_not_used_again() -> None:
    parked = ready(1, drained=True, num_kept=1, **KEEPS)
    told = growing().transition
    assert told is not None
    record = replace(growing(), transition=replace(told, next_generation=None))
    todo = plan(observed(job(record), three(parked, parked, newcomer())))
    assert todo.record.generation == 3


def test_a_fault_in_the_drain_withdraws_it() -> None:
    failed = agent(AgentState.FAULTED, 1, reason="WorkerCrash", **KEEPS)
    todo = plan(observed(job(growing()), three(failed, drains(), has_begun())))
    assert todo.record.transition is not None
    assert (todo.record.transition.kind, todo.record.transition.next_generation) == (TransitionKind.RECOVERY, None)
    assert {stop.pod for stop in acts(todo, StopWorkers)} == {"job-workers-0", "job-workers-1", "job-workers-2"}


def test_a_leaver_that_is_gone_harms_nobody_once_a_member_has_begun() -> None:
    begun = transition(
        target_size=2,
        depth=Depth.MEMORY,
        leavers=(pid(2),),
        next_generation=replace(FOLLOWING, members=(pid(0), pid(1))),
    )
    record = replace(trains(3), transition=begun, newest_told=2)
    todo = plan(observed(job(record), [(pod(0), has_begun()), (pod(1), drains())]))
    assert todo.record.transition is not None
    assert todo.record.transition.kind is TransitionKind.RESIZE


def test_newcomers_that_train_already_are_not_ended() -> None:
    seen = [(pod(0), has_begun()), (pod(1), has_begun()), (pod(2, kill_at=NOW + seconds(30)), has_begun())]
    todo = plan(observed(job(growing()), seen))
    assert acts(todo, DeletePod) == []
    assert acts(todo, ShutDownAgent) == []


def test_agents_tell_of_generations_that_a_lost_record_does_not_know() -> None:
    told = observed(job(trains(2)), three(trains_on(next_generation=7), trains_on(), newcomer()))
    todo = plan(replace(told, job=replace(told.job, policy=QUICK)))
    assert todo.record.newest_told == 8
