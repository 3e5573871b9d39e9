"""Restarts that workers ask for, and how far each reaches."""

from __future__ import annotations

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
    silent,
    trains,
)

from elastipod_operator.core.actions import DeletePod, StopWorkers
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import RestartMode, RestartWindow
from elastipod_operator.core.snapshot import AgentState, ObservedAgent, ObservedNode, ObservedPod

PAIR = [(pod(0), ready(1)), (pod(1), ready(1))]
DEAD = ObservedNode(name="node-0", ready=False, not_ready_since=NOW)


def fields(window: RestartWindow) -> tuple[int, int, int]:
    return window.number, window.restarts, window.full_restarts


def asked(reach: str, number: int = 0) -> tuple[ObservedPod, ObservedAgent]:
    return pod(number), faulted(step=7, restart_mode=reach)


JOB_LEVEL = [asked(RestartMode.JOB), (pod(1), running(step=7))]


@pytest.mark.parametrize(
    ("first", "second", "reach"),
    [
        pytest.param("", None, RestartMode.IN_PROCESS, id="an agent that does not say"),
        pytest.param(RestartMode.LOCAL, None, RestartMode.LOCAL, id="one process"),
        pytest.param(RestartMode.PROCESSES, RestartMode.LOCAL, RestartMode.PROCESSES, id="the farthest one counts"),
        pytest.param(RestartMode.LOCAL, RestartMode.JOB, RestartMode.JOB, id="whoever asks for it"),
        pytest.param(
            "as far as mars", RestartMode.IN_PROCESS, RestartMode.PROCESSES, id="words that nobody knows: new processes"
        ),
    ],
)
def test_all_agents_hear_how_far_the_restart_reaches(first: str, second: str | None, reach: RestartMode) -> None:
    other = (pod(1), running(step=7)) if second is None else asked(second, 1)
    todo = plan(observed(job(trains()), [asked(first), other]))
    assert [(a.pod, a.reach) for a in acts(todo, StopWorkers)] == [(pod(n).name, reach) for n in range(2)]


def test_a_worker_that_fails_later_may_still_ask_for_more() -> None:
    first = plan(observed(job(trains()), [asked(RestartMode.IN_PROCESS), (pod(1), running(step=7))]))
    late = [(pod(0), agent(AgentState.STOPPING, step=7)), asked(RestartMode.PROCESSES, 1)]
    second = plan(observed(job(first.record), late))
    assert [(a.pod, a.reach) for a in acts(second, StopWorkers)] == [
        (pod(n).name, RestartMode.PROCESSES) for n in range(2)
    ]
    kept = plan(observed(job(second.record), [late[0], (pod(1), agent(AgentState.STOPPING))])).record.transition
    assert kept is not None
    assert kept.reach is RestartMode.PROCESSES, "also when those who asked are being stopped"


def test_planned_stops_and_strangers_are_not_told_of_restarts() -> None:
    stray = (pod(2), agent(AgentState.FAULTED, 1, restart_mode=RestartMode.JOB))
    todo = plan(observed(job(trains(generation=2)), [(pod(0), running(2)), (pod(1), running(2)), stray]))
    assert [(a.pod, a.reach) for a in acts(todo, StopWorkers)] == [(pod(2).name, RestartMode.IN_PROCESS)]


def test_a_worker_may_have_all_pods_made_anew() -> None:
    booked = plan(observed(job(trains()), JOB_LEVEL))
    assert not acts(booked, DeletePod), "not before everybody is accounted for"
    then = plan(observed(job(booked.record), PAIR))
    assert then.record.lost == (pid(0), pid(1))
    assert {a.name for a in acts(then, DeletePod)} == {pod(0).name, pod(1).name}
    assert [(n.reason, "a worker requested" in n.message) for n in then.events] == [("FullJobRestart", True)]
    assert (then.record.restarts, then.record.retries, fields(then.record.window)) == (1, 1, (0, 0, 1))
    assert then.status["latestFaultyPodInstanceList"]["restartType"] == "JLR"
    again = plan(observed(job(then.record), PAIR))
    assert (again.events, fields(again.record.window)) == ((), (0, 0, 1)), "once"


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        pytest.param({"max_full_restarts": 1}, "maxFullJobRestarts 1", id="full restarts"),
        pytest.param({"max_retries": 0}, "jobMaxRetryCount 0", id="retries"),
    ],
)
def test_what_a_worker_asks_for_has_limits(limits: dict[str, int], words: str) -> None:
    wishes = policy(2, 2, **limits)
    booked = plan(observed(job(trains(window=RestartWindow(0, NOW, 0, 1)), wishes), JOB_LEVEL))
    then = plan(observed(job(booked.record, wishes), PAIR))
    assert (then.record.outcome, then.record.outcome_reason) == ("Failed", "WorkerCrash")
    assert words in then.record.outcome_message


def test_a_worker_is_heard_also_where_a_lost_node_was_to_blame_and_that_costs_nothing() -> None:
    wishes = policy(1, 2, max_full_restarts=0)
    booked = plan(observed(job(trains(), wishes), [(pod(0), silent(10)), asked(RestartMode.JOB, 1)]))
    then = plan(observed(job(booked.record, wishes), [(pod(0), silent(20)), (pod(1), ready(1))], [DEAD]))
    assert then.record.outcome == ""
    assert (set(then.record.lost), then.record.window) == ({pid(0), pid(1)}, RestartWindow())
    assert then.record.is_full_restart
