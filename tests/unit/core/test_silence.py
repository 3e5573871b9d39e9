"""What decides about an agent that does not answer: facts of its node, its port, the word of other agents, and time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import (
    NOW,
    acts,
    agent,
    faulted,
    job,
    observed,
    pid,
    pod,
    policy,
    ready,
    running,
    seconds,
    silent,
    trains,
)

from elastipod_operator.core.actions import CreatePod
from elastipod_operator.core.health import assess
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import TransitionKind
from elastipod_operator.core.replica import Health, Replica
from elastipod_operator.core.silence import ENDED_LIMIT, UNDECIDED_LIMIT
from elastipod_operator.core.snapshot import AgentState, ObservedAgent, ObservedNode, Snapshot

STEPS = running(step=50, step_at=NOW - seconds(1), step_pace=seconds(2))
EVALUATES = running(step=50, step_at=NOW - seconds(8), step_pace=seconds(0.3))
COMPLETED = agent(AgentState.COMPLETED)


def not_ready(ordinal: int) -> ObservedNode:
    return ObservedNode(name=f"node-{ordinal}", ready=False, not_ready_since=NOW - seconds(1))


def miss(for_s: float = 20.0, asked_s: float = 2.0, **changes: Any) -> ObservedAgent:
    """Give a silent agent that other agents cannot reach either."""
    return silent(for_s, is_reached=False, peers_asked_at=NOW - seconds(asked_s), **changes)


def reached(for_s: float = 20.0) -> ObservedAgent:
    return silent(for_s, is_reached=True, peers_asked_at=NOW - seconds(2))


def snapshot(*agents: ObservedAgent | None, nodes: tuple[ObservedNode, ...] = ()) -> Snapshot:
    pairs = [(pod(number), fact) for number, fact in enumerate(agents)]
    return observed(job(trains(len(pairs)), policy(1, 4)), pairs, nodes)


def the_first(found: Snapshot) -> Replica:
    return assess(found).by_id[pid(0)]


@pytest.mark.parametrize("members", [1, 2, 4])
def test_a_lost_rack_is_known_by_its_nodes_though_all_agents_are_silent(members: int) -> None:
    found = snapshot(*(silent(20) for _ in range(members)), nodes=tuple(not_ready(n) for n in range(members)))
    todo = plan(found)
    begun = todo.record.transition
    assert begun is not None
    assert (begun.kind, begun.cause, begun.uses_budget) == (TransitionKind.RECOVERY, "NodeLost", False)
    assert set(todo.record.lost) == {pid(n) for n in range(members)}
    assert {a.pod.ordinal for a in acts(plan(found), CreatePod)} >= set(range(members))


def test_of_a_rack_that_is_marked_one_by_one_the_rest_is_waited_for() -> None:
    found = snapshot(silent(20), silent(20), nodes=(not_ready(0),))
    assert [assess(found).by_id[pid(n)].health for n in (0, 1)] == [Health.LOST, Health.SILENT]


def test_who_is_silent_for_another_reason_than_its_node_still_makes_the_operator_doubt_itself() -> None:
    assert assess(snapshot(silent(20), silent(20), nodes=(not_ready(0),))).all_silent
    assert not assess(snapshot(silent(20), nodes=(not_ready(0),))).all_silent
    assert not assess(snapshot(silent(20), running(), nodes=(not_ready(0),))).all_silent


@pytest.mark.parametrize(
    ("mine", "other", "health"),
    [
        pytest.param(silent(20), EVALUATES, Health.SILENT, id="a pause proves nothing"),
        pytest.param(reached(), EVALUATES, Health.SILENT, id="a pause, and a peer that reaches it"),
        pytest.param(miss(), EVALUATES, Health.LOST, id="a pause, and no peer that reaches it"),
        pytest.param(miss(), STEPS, Health.SILENT, id="steps go on: whatever peers say, no member is lost"),
        pytest.param(miss(), running(), Health.LOST, id="no steps are reported, and no peer reaches it"),
        pytest.param(silent(20), running(), Health.SILENT, id="no steps are reported, and no peer was asked"),
        pytest.param(miss(asked_s=15), EVALUATES, Health.SILENT, id="what peers said long ago is no news"),
        pytest.param(miss(), running(saving=True), Health.SILENT, id="who saves makes no steps"),
        pytest.param(miss(), COMPLETED, Health.LOST, id="the others completed, and no peer reaches it"),
        pytest.param(silent(20), COMPLETED, Health.SILENT, id="the others completed, and no peer was asked"),
        pytest.param(reached(), COMPLETED, Health.SILENT, id="the others completed, and a peer reaches it"),
        pytest.param(reached(), faulted(), Health.LOST, id="a broken collective says enough"),
        pytest.param(reached(), ready(1), Health.LOST, id="so do others that are stopped"),
    ],
)
def test_the_word_of_other_agents_decides(mine: ObservedAgent, other: ObservedAgent, health: Health) -> None:
    replica = the_first(snapshot(mine, other))
    assert replica.health is health
    assert replica.cause == ("NodeLost" if health is Health.LOST else "AgentSilent")


def test_a_peer_that_cannot_reach_it_says_nothing_while_all_are_silent() -> None:
    assert the_first(snapshot(miss(), silent(20))).health is Health.SILENT


UNDECIDED = [
    pytest.param((COMPLETED,), False, ENDED_LIMIT, id="the others completed"),
    pytest.param((COMPLETED,), True, ENDED_LIMIT, id="the others completed and reach it"),
    pytest.param((running(),), False, UNDECIDED_LIMIT, id="the others report no steps"),
    pytest.param((EVALUATES,), False, UNDECIDED_LIMIT, id="the others make no step"),
    pytest.param((), False, UNDECIDED_LIMIT, id="one replica"),
    pytest.param((None,), False, UNDECIDED_LIMIT, id="all are silent"),
]


@pytest.mark.parametrize(("others", "is_reached", "limit"), UNDECIDED)
def test_what_nothing_can_decide_has_a_deadline_and_a_condition(
    others: tuple[ObservedAgent | None, ...], is_reached: bool, limit: Any
) -> None:
    for since_s, health in ((limit.total_seconds() - 1, Health.SILENT), (limit.total_seconds(), Health.LOST)):
        mine = reached(since_s) if is_reached else silent(since_s)
        found = snapshot(mine, *(silent(since_s) if other is None else other for other in others))
        assert the_first(found).health is health
        todo = plan(found)
        if health is Health.SILENT:
            assert todo.record.transition is None
            assert todo.wake_at is not None
            assert todo.wake_at <= NOW + seconds(1.1), "nothing else would tell of the moment"
            told = next(c for c in todo.conditions if c.type == "PodsReady")
            assert told.reason == ("AgentSilent" if others not in ((), (None,)) else "OperatorCutOff")
            assert "replaced" in told.message
            assert "12:00:01 UTC" in told.message
        else:
            assert todo.record.transition is not None
            assert (todo.record.transition.cause, todo.record.retries) == ("AgentSilent", 0)


def test_a_spare_that_answers_does_not_speak_for_the_members() -> None:
    for mine in (silent(ENDED_LIMIT.total_seconds() + 1), reached(ENDED_LIMIT.total_seconds() + 1)):
        pairs = [(pod(0), mine), (pod(1), mine), (pod(2), ready(0))]
        replica = the_first(observed(job(trains(2), policy(1, 4)), pairs))
        assert (replica.health, replica.presumed_lost_at) == (
            Health.SILENT,
            NOW + UNDECIDED_LIMIT - ENDED_LIMIT - seconds(1),
        )


def test_training_that_goes_on_has_no_deadline() -> None:
    for mine, other in ((silent(100_000), STEPS), (reached(100_000), STEPS), (reached(100_000), EVALUATES)):
        replica = the_first(snapshot(mine, other))
        assert (replica.health, replica.presumed_lost_at) == (Health.SILENT, None)


@pytest.mark.parametrize("known", [ready(0), agent(None), ready(None)], ids=["READY", "nothing", "READY, another make"])
def test_a_member_that_only_others_reach_has_a_deadline_for_its_start(known: ObservedAgent) -> None:
    """The others wait for it at the rendezvous, and it can get no /start."""
    begun = trains(2, running_since=None, generation_began_at=NOW - seconds(7200))
    for since_s, health in ((-1, Health.SILENT), (0, Health.LOST)):
        at = NOW - UNDECIDED_LIMIT - seconds(since_s)
        mine = replace(
            known, last_answer=at if known.last_answer is not None else None, trying_since=at,
            is_reached=True, peers_asked_at=NOW - seconds(2),
        )  # fmt: skip
        found = observed(job(begun, policy(1, 4)), [(pod(0), mine), (pod(1), running())])
        replica = the_first(found)
        assert replica.health is health
        if health is Health.SILENT:
            assert replica.presumed_lost_at == NOW + seconds(1)
            assert plan(found).record.transition is None
        else:
            assert "other agents reach it, but the operator cannot tell it to start its workers" in replica.detail
            assert replica.cause == "AgentSilent"


def test_a_member_that_has_started_has_no_deadline_while_others_start() -> None:
    begun = trains(3, running_since=None, generation_began_at=NOW - seconds(7200))
    found = observed(job(begun, policy(1, 4)), [(pod(0), reached(7000)), (pod(1), ready(0)), (pod(2), running())])
    assert the_first(found).presumed_lost_at is None


def test_a_silent_spare_is_replaced_unless_nobody_answers() -> None:
    pairs = [(pod(0), silent(20)), (pod(1), silent(20)), (pod(2), silent(20))]
    found = observed(job(trains(2), policy(1, 4)), pairs)
    assert assess(found).by_id[pid(2)].health is Health.SILENT
    later = observed(
        job(trains(2), policy(1, 4)), [(pod(n), silent(UNDECIDED_LIMIT.total_seconds())) for n in range(3)]
    )
    assert assess(later).by_id[pid(2)].health is Health.LOST
