"""How long a drain may take, who is told of it, and when it is ended."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.builders import (
    NOW,
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
    silent,
    trains,
    transition,
)

from elastipod_operator.core.actions import CreatePod, DeletePod, ListPods, StartWorkers, StopWorkers
from elastipod_operator.core.faults import FIRST_ANSWER
from elastipod_operator.core.plan import plan
from elastipod_operator.core.snapshot import AgentState, ObservedAgent, ObservedNode, ObservedPod

ALL_RUN = [(pod(n), running()) for n in range(3)]
DRAINED = ready(1, drained=True)


def test_a_second_notice_in_a_drain_is_merged() -> None:
    record = trains(3, transition=transition(cause="PodDisrupted"))
    members = [(pod(0, disruption="x"), running()), (pod(1, disruption="y"), running()), ALL_RUN[2]]
    assert plan(observed(job(record), members)).record.transition == record.transition


@pytest.mark.parametrize(
    ("deadline_in_s", "state", "hard"),
    [
        pytest.param(60, AgentState.RUNNING, False, id="who has not heard of the drain is asked again"),
        pytest.param(60, AgentState.STOPPING, None, id="who drains is left alone"),
        pytest.param(-10, AgentState.STOPPING, None, id="the agent itself ends them first"),
        pytest.param(-16, AgentState.STOPPING, True, id="then it is told to"),
        pytest.param(60, AgentState.COMPLETED, True, id="who finished meanwhile becomes ready by a stop"),
    ],
)
def test_the_stop_of_a_member(deadline_in_s: float, state: AgentState, hard: bool | None) -> None:
    record = trains(transition=transition(deadline=NOW + seconds(deadline_in_s)))
    todo = plan(observed(job(record), [(pod(0), agent(state)), (pod(1), DRAINED)]))
    assert [not a.graceful for a in acts(todo, StopWorkers)] == ([] if hard is None else [hard])


@pytest.mark.parametrize(
    ("mine", "is_lost"),
    [
        pytest.param(agent(AgentState.STOPPING), True, id="who never stops is given up"),
        pytest.param(silent(60), True, id="who is silent all the time is given up"),
        pytest.param(
            agent(AgentState.STOPPING, answering_since=NOW - seconds(30)),
            False,
            id="who was out of reach has its time yet",
        ),
    ],
)
def test_the_end_of_patience(mine: ObservedAgent, is_lost: bool) -> None:
    record = trains(transition=transition(began_s=650, deadline=NOW - seconds(46)))
    other = agent(AgentState.STOPPING, answering_since=NOW)
    todo = plan(observed(job(record), [(pod(0), mine), (pod(1), other)]))
    assert (pid(0) in todo.record.lost) is is_lost
    assert bool(acts(todo, DeletePod)) is is_lost


def test_who_is_given_up_as_the_last_one_is_replaced_at_once() -> None:
    """The pass that gives it up still counts it among those that may train; without another pass, nothing would happen for minutes."""
    record = trains(transition=transition(began_s=650, deadline=NOW - seconds(46)))
    pods = [(pod(0), DRAINED), (pod(1), agent(AgentState.STOPPING))]
    todo = plan(observed(job(record, policy(2, 2)), pods))
    assert todo.record.lost == (pid(1),)
    assert todo.wake_at == NOW
    todo = plan(observed(job(todo.record, policy(2, 2)), pods))
    assert [action.name for action in acts(todo, DeletePod)] == [pod(1).name]
    assert [action.pod for action in acts(todo, CreatePod)] == [pid(1, 1)]
    assert todo.wake_at != NOW


def test_who_was_out_of_reach_all_the_time_is_asked_for_a_checkpoint_yet() -> None:
    record = trains(transition=transition(began_s=650, deadline=NOW - seconds(50)))
    back = running(answering_since=NOW - seconds(1))
    todo = plan(observed(job(record), [(pod(0), back), (pod(1), back)]))
    assert acts(todo, StopWorkers) == [
        StopWorkers(pod(n).name, 1, graceful=True, timeout_s=599, leaves=None) for n in range(2)
    ]


def test_when_all_are_silent_nobody_is_given_up_and_the_pods_are_looked_up() -> None:
    record = trains(transition=transition(deadline=NOW - seconds(1000)))
    todo = plan(observed(job(record), [(pod(0), silent(900)), (pod(1), silent(900))]))
    assert not todo.record.lost
    assert ListPods() in todo.actions


def test_a_generation_that_did_not_begin_everywhere_has_nothing_to_save() -> None:
    todo = plan(observed(job(trains(running_since=None), policy(1, 1)), [(pod(0), running()), (pod(1), ready(0))]))
    assert todo.record.transition is not None
    assert not todo.record.transition.graceful
    assert [a.graceful for a in acts(todo, StopWorkers)] == [False]


def test_an_operator_that_has_not_heard_of_anybody_drains_all_the_same() -> None:
    unheard = ObservedAgent(trying_since=NOW - FIRST_ANSWER)
    todo = plan(observed(job(trains(3), policy(2, 2)), [(pod(n), unheard) for n in range(3)]))
    assert todo.record.transition is not None
    assert todo.record.transition.graceful


def test_workers_that_somebody_else_drained_are_started_again() -> None:
    todo = plan(observed(job(trains(), policy(2, 2)), [(pod(0), DRAINED), (pod(1), DRAINED)]))
    assert todo.record.generation == 2
    assert len(acts(todo, StartWorkers)) == 2


def test_drained_is_not_completed() -> None:
    finished = agent(AgentState.COMPLETED)
    drained = plan(observed(job(trains()), [(pod(0), finished), (pod(1), DRAINED)]))
    assert drained.record.outcome == ""
    assert plan(observed(job(trains()), [(pod(0), finished), (pod(1), finished)])).record.outcome == "Completed"


def test_all_that_complete_in_a_recorded_drain_are_drained() -> None:
    record = trains(transition=transition())
    todo = plan(observed(job(record), [(pod(n), agent(AgentState.COMPLETED)) for n in range(2)]))
    assert todo.record.outcome == ""
    assert len(acts(todo, StopWorkers)) == 2


def test_completed_workers_of_an_older_generation_complete_nothing() -> None:
    finished = agent(AgentState.COMPLETED, generation=1)
    todo = plan(observed(job(trains(generation=2)), [(pod(0), finished), (pod(1), finished)]))
    assert todo.record.outcome == ""


DRAINING = trains(transition=transition(began_s=100))  # for ten minutes
STOPS = agent(AgentState.STOPPING)


@pytest.mark.parametrize(
    ("mine", "node", "left_s"),
    [
        pytest.param({"kill_at": NOW + seconds(60)}, {}, 55, id="a pod is deleted"),
        pytest.param({}, {"disruption": "spot", "leaves_at": NOW + seconds(120)}, 115, id="a notice of Spot"),
        pytest.param({"kill_at": NOW + seconds(3)}, {}, 0, id="hardly any time is left"),
        pytest.param({"kill_at": NOW - seconds(60)}, {}, 0, id="none is left"),
        pytest.param({"kill_at": NOW + seconds(900)}, {}, 500, id="a later end gives no more time"),
        pytest.param({}, {"disruption": "a taint that says no time"}, 500, id="a notice without a time"),
    ],
)
def test_a_second_notice_shortens_a_drain(mine: dict[str, Any], node: dict[str, Any], left_s: float) -> None:
    pods = [(pod(0, **mine), STOPS), (pod(1), STOPS)]
    todo = plan(observed(job(DRAINING), pods, [ObservedNode(name="node-0", **node)]))
    assert todo.record.transition is not None
    assert todo.record.transition.deadline == NOW + seconds(left_s)
    is_shorter = left_s < 500
    told = [(a.pod, a.graceful, a.timeout_s) for a in acts(todo, StopWorkers)]
    assert told == ([(pod(n).name, True, max(1, int(left_s))) for n in range(2)] if is_shorter else [])
    assert [n.reason for n in todo.events] == (["DrainShortened"] if is_shorter else [])
    again = plan(observed(job(todo.record), pods, [ObservedNode(name="node-0", **node)]))
    assert again.record.transition == todo.record.transition
    assert not again.events


@pytest.mark.parametrize(
    "first",
    [
        pytest.param((pod(0, kill_at=NOW + seconds(60)), ready(1, drained=True)), id="who has drained already"),
        pytest.param((pod(0), STOPS), id="nobody is to go"),
    ],
)
def test_a_drain_keeps_its_time_as_long_as_nobody_is_killed_in_it(first: tuple[ObservedPod, ObservedAgent]) -> None:
    todo = plan(observed(job(DRAINING), [first, (pod(1), STOPS)]))
    assert todo.record.transition == DRAINING.transition
    assert not acts(todo, StopWorkers)


def test_agents_that_know_no_generations_are_told_once() -> None:
    stops = agent(AgentState.STOPPING, None)
    todo = plan(observed(job(DRAINING), [(pod(0, kill_at=NOW + seconds(60)), stops), (pod(1), stops)]))
    assert not acts(todo, StopWorkers)


DEAF = agent(AgentState.STOPPING, no_drain_handler=True)


@pytest.mark.parametrize(
    ("agents", "is_ended"),
    [
        pytest.param((DEAF, DEAF), True, id="nobody can know of it"),
        pytest.param((DEAF, STOPS), False, id="one rank may ask for all"),
        pytest.param(
            (DEAF, silent(60, state=AgentState.STOPPING, no_drain_handler=True)), False, id="one is out of sight"
        ),
        pytest.param((DEAF, ready(1, drained=True)), False, id="one has drained, and tells the others"),
        pytest.param((DEAF, ready(1)), True, id="one was stopped before"),
        pytest.param((DEAF, running(1)), False, id="one has not been asked yet"),
    ],
)
def test_a_drain_that_no_worker_can_know_of_is_ended(
    agents: tuple[ObservedAgent, ObservedAgent], is_ended: bool
) -> None:
    todo = plan(observed(job(DRAINING), [(pod(n), a) for n, a in enumerate(agents)]))
    assert todo.record.transition is not None
    assert todo.record.transition.graceful is not is_ended
    hard = [a.pod for a in acts(todo, StopWorkers) if not a.graceful]
    assert bool(hard) is is_ended
    assert ("EventUnanswered" in [n.reason for n in todo.events]) is is_ended
    assert todo.record.retries == todo.record.restarts == 0, "nobody failed"
