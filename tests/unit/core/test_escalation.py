"""Budgets: which recoveries count, how far a restart reaches, and when a job has failed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import (
    NOW,
    acts,
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
    transition,
)

from elastipod_operator.core.actions import CreatePod, DeletePod, Plan, ShutDownAgent, StartWorkers
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Record, RestartWindow, TransitionKind
from elastipod_operator.core.snapshot import ObservedAgent, ObservedNode, ObservedPod, Policy

PAIR = [(pod(0), ready(1)), (pod(1), ready(1))]
CRASH = [(pod(0), faulted(step=7)), (pod(1), running(step=7))]
DEAD = ObservedNode(name="node-0", ready=False, not_ready_since=NOW)


def crash(record: Record, wishes: Policy) -> tuple[Plan, Plan]:
    """Let a worker crash: the decision that books it, and the one after everybody stopped."""
    booked = plan(observed(job(record, wishes), CRASH))
    return booked, plan(observed(job(booked.record, wishes), PAIR))


def fields(window: RestartWindow) -> tuple[int, int, int]:
    return window.number, window.restarts, window.full_restarts


LIMITS: dict[str, Any] = {"restarts_before_full": 2, "max_full_restarts": 1, "eval_period": seconds(600)}


@pytest.mark.parametrize(
    ("before", "limits", "after", "full", "outcome"),
    [
        pytest.param(RestartWindow(), {}, (0, 1, 0), False, "", id="without limits it is only counted"),
        pytest.param(RestartWindow(0, NOW - seconds(9), 50, 0), {}, (0, 51, 0), False, "", id="however often"),
        pytest.param(RestartWindow(0, NOW, 1, 0), LIMITS, (0, 2, 0), False, "", id="so many are tolerated"),
        pytest.param(RestartWindow(0, NOW, 2, 0), LIMITS, (0, 0, 1), True, "", id="the next one restarts everything"),
        pytest.param(
            RestartWindow(0, NOW, 2, 1),
            LIMITS,
            (0, 3, 1),
            False,
            "Failed",
            id="so many full restarts are tolerated, the next one fails",
        ),
        pytest.param(
            RestartWindow(0, NOW, 2, 9),
            {**LIMITS, "max_full_restarts": None},
            (0, 0, 10),
            True,
            "",
            id="absent: any number of full restarts",
        ),
        pytest.param(
            RestartWindow(),
            {**LIMITS, "restarts_before_full": 0},
            (0, 0, 1),
            True,
            "",
            id="none tolerated: the first one restarts everything",
        ),
        pytest.param(
            RestartWindow(),
            {**LIMITS, "restarts_before_full": 0, "max_full_restarts": 0},
            (0, 1, 0),
            False,
            "Failed",
            id="nothing tolerated",
        ),
    ],
)
def test_counted_restarts(
    before: RestartWindow, limits: dict[str, Any], after: tuple[int, int, int], full: bool, outcome: str
) -> None:
    booked, then = crash(trains(window=before), policy(2, 2, **limits))
    assert booked.record.outcome == "", "not before everybody is accounted for"
    assert fields(then.record.window) == after
    assert then.record.is_full_restart is full
    assert then.record.outcome == outcome
    if outcome:
        assert then.record.outcome_reason == "WorkerCrash"
        assert "ValueError: boom" in then.record.outcome_message, "the first failing rank's own words"
        assert "maxFullJobRestarts" in then.record.outcome_message
    assert bool(acts(then, StartWorkers)) is not (full or bool(outcome))


def full_restart() -> tuple[Plan, Policy]:
    wishes = policy(2, 2, **LIMITS)
    return crash(trains(window=RestartWindow(0, NOW, 2, 0)), wishes)[1], wishes


def test_a_full_restart_gives_up_every_pod_and_says_so() -> None:
    todo, _ = full_restart()
    assert todo.record.lost == (pid(0), pid(1))
    assert {a.name for a in acts(todo, DeletePod)} == {pod(0).name, pod(1).name}
    assert len(acts(todo, ShutDownAgent)) == 2
    assert [n.reason for n in todo.events] == ["FullJobRestart"]
    assert not acts(todo, StartWorkers)


@pytest.mark.parametrize(
    "left", [pytest.param(PAIR, id="their pods are still there"), pytest.param([], id="their pods are gone")]
)
def test_after_a_full_restart_only_new_pods_train(left: list[tuple[ObservedPod, ObservedAgent]]) -> None:
    first, wishes = full_restart()
    second = plan(observed(job(first.record, wishes), left))
    assert {a.pod for a in acts(second, CreatePod)} == {pid(0, 1), pid(1, 1)}
    assert not acts(second, StartWorkers)
    fresh = [(pod(pid(n, 1), created_at=NOW), ready(0)) for n in range(2)]
    third = plan(observed(job(second.record, wishes), [*left, *fresh]))
    assert third.record.members == (pid(0, 1), pid(1, 1))
    assert fields(third.record.window) == (0, 0, 1)
    assert (third.record.restarts, third.record.retries) == (1, 1)


def test_a_full_restart_is_decided_once() -> None:
    first, wishes = full_restart()
    again = plan(observed(job(first.record, wishes), PAIR))
    assert fields(again.record.window) == (0, 0, 1)
    assert again.events == ()


def test_a_pending_pod_is_as_good_as_new() -> None:
    wishes = policy(2, 3, **LIMITS)
    waits = (pod(2, phase="Pending", node="", ip="", started=False), None)
    booked = plan(observed(job(trains(window=RestartWindow(0, NOW, 2, 0)), wishes), [*CRASH, waits]))
    then = plan(observed(job(booked.record, wishes), [*PAIR, waits]))
    assert then.record.lost == (pid(0), pid(1))


@pytest.mark.parametrize(
    ("pods", "nodes"),
    [
        pytest.param([(pod(1), running())], [], id="a pod is gone"),
        pytest.param([(pod(0), silent(20)), (pod(1), faulted())], [DEAD], id="a node is lost"),
        pytest.param(
            [(pod(0, phase="Failed", disruption="Preempted"), None), (pod(1), running())], [], id="a pod was evicted"
        ),
    ],
)
def test_what_never_counts(pods: list[tuple[ObservedPod, ObservedAgent | None]], nodes: list[ObservedNode]) -> None:
    wishes = policy(1, 2, restarts_before_full=0, max_full_restarts=0, max_retries=0)
    booked = plan(observed(job(trains(), wishes), pods, nodes))
    assert booked.record.restarts == 1
    assert (booked.record.window, booked.record.retries) == (RestartWindow(), 0)
    then = plan(observed(job(booked.record, wishes), [(pod(1), ready(1))]))
    assert then.record.outcome == ""


@pytest.mark.parametrize("cause", ["ScaledByUser", "PodDisrupted"])
def test_planned_resizes_never_count(cause: str) -> None:
    record = trains(transition=transition(TransitionKind.RESIZE, cause=cause, target_size=2))
    todo = plan(observed(job(record, policy(2, 2, restarts_before_full=0, max_retries=0)), PAIR))
    assert (todo.record.restarts, todo.record.window, todo.record.generation) == (0, RestartWindow(), 2)


def test_a_count_is_given_back_when_a_lost_node_was_behind_it() -> None:
    wishes = policy(1, 2, **{**LIMITS, "restarts_before_full": 0, "max_full_restarts": 0})
    booked = plan(observed(job(trains(), wishes), [(pod(0), silent(10)), (pod(1), faulted())]))
    assert fields(booked.record.window) == (0, 1, 0)
    then = plan(observed(job(booked.record, wishes), [(pod(0), silent(20)), (pod(1), ready(1))], [DEAD]))
    assert then.record.window == RestartWindow(), "and the window that it had opened is closed"
    assert then.record.outcome == ""
    assert [c.pod for c in then.record.faulty_replicas] == [pid(0)]


def test_nothing_is_given_back_once_the_budgets_were_looked_at() -> None:
    wishes = policy(2, 2)
    booked = plan(observed(job(trains(), wishes), CRASH))
    assert booked.record.transition is not None
    weighed = plan(
        observed(
            job(
                replace(booked.record, transition=replace(booked.record.transition, not_before=NOW + seconds(9))),
                wishes,
            ),
            PAIR,
        )
    )
    assert weighed.record.transition is not None
    assert weighed.record.transition.is_budget_checked
    later = plan(observed(job(weighed.record, wishes), [(pod(1), ready(1))]))
    assert later.record.retries == 1, "a pod that is deleted now was not the cause"


@pytest.mark.parametrize(
    ("since_s", "number", "restarts"),
    [pytest.param(599, 3, 5, id="in it"), pytest.param(600, 4, 0, id="after it")],
)
def test_a_window_ends(since_s: float, number: int, restarts: int) -> None:
    record = trains(window=RestartWindow(3, NOW - seconds(since_s), 5, 1))
    todo = plan(observed(job(record, policy(2, 2, **LIMITS)), [(pod(0), running()), (pod(1), running())]))
    assert (todo.record.window.number, todo.record.window.restarts) == (number, restarts)
    if restarts:
        assert todo.wake_at == NOW + seconds(1)


def test_a_window_does_not_end_between_a_fault_and_what_follows_from_it() -> None:
    """The budget that a fault was booked to is the one that it is weighed against."""
    old = RestartWindow(0, NOW - seconds(601), 3, 0)
    began = transition(TransitionKind.RECOVERY, uses_budget=True, target_size=2)
    wishes = policy(2, 2, **LIMITS)
    todo = plan(observed(job(trains(window=old, transition=began, fault_at=NOW), wishes), PAIR))
    assert fields(todo.record.window) == (0, 0, 1)


def test_a_fault_after_the_end_of_a_window_is_counted_in_the_next() -> None:
    wishes = policy(2, 2, **LIMITS)
    _, then = crash(trains(window=RestartWindow(0, NOW - seconds(700), 2, 1)), wishes)
    assert fields(then.record.window) == (1, 1, 0)
    assert then.record.outcome == ""


def test_the_status_tells_of_window_and_culprits() -> None:
    booked, _ = crash(trains(window=RestartWindow(2, NOW, 1, 1)), policy(2, 2))
    assert booked.status["restartCount"] == 1
    assert booked.status["restartStatus"] == {"currentEvalPeriod": 2, "fullJobRestartCount": 1, "restartCount": 2}
    assert booked.status["latestFaultyPodInstanceList"] == {
        "restartType": "PLR",
        "faultyInstanceIdList": ["node-0"],
        "faultyPodList": ["job-workers-0"],
        "faultyRankList": ["0"],
    }
    assert full_restart()[0].status["latestFaultyPodInstanceList"]["restartType"] == "JLR"


def test_the_culprits_of_a_large_incident_are_named_up_to_a_limit() -> None:
    number = 40
    nodes = [ObservedNode(name=f"node-{n}", out_of_service=True) for n in range(number)]
    pods = [(pod(n), running()) for n in range(number + 2)]
    todo = plan(observed(job(trains(number + 2), policy(2, number + 2)), pods, nodes))
    assert len(todo.record.faulty_replicas) == 8
    assert todo.record.restarts == 1


STALLED = {"best_step": 7, "consecutive_failures": 2, "stalled_recoveries": 2}


@pytest.mark.parametrize(
    ("changes", "wishes", "outcome"),
    [
        pytest.param(STALLED, {}, "Failed", id="three recoveries without a newer step end a job"),
        pytest.param({**STALLED, "stalled_recoveries": 1}, {}, "", id="two do not"),
        pytest.param({**STALLED, "best_step": 6}, {}, "", id="nor when there was a newer step"),
        pytest.param(STALLED, {"max_retries": 9}, "", id="nor where the user said how often"),
    ],
)
def test_no_progress(changes: dict[str, int], wishes: dict[str, int], outcome: str) -> None:
    _, then = crash(trains(**changes), policy(2, 2, **wishes))
    assert then.record.outcome == outcome
    if outcome:
        assert then.record.outcome_reason == "NoProgress"
        assert "ValueError: boom" in then.record.outcome_message
        assert "no step after 7" in then.record.outcome_message


def test_a_job_that_reports_no_steps_is_warned_of_and_not_ended() -> None:
    record = trains(stalled_recoveries=5, consecutive_failures=5, running_since=NOW)
    booked = plan(observed(job(record, policy(2, 2)), [(pod(0), faulted()), (pod(1), running())]))
    assert booked.record.stalled_recoveries == 6
    warning = next(c for c in booked.conditions if c.type == "Warning")
    assert (warning.status, warning.reason) == (False, "NoProgress")
    assert "NoProgress" in [n.reason for n in booked.events]
    assert plan(observed(job(booked.record, policy(2, 2)), PAIR)).record.outcome == ""


def test_lost_nodes_are_no_lack_of_progress() -> None:
    booked = plan(
        observed(job(trains(**STALLED), policy(1, 2)), [(pod(0), silent(20)), (pod(1), running(step=7))], [DEAD])
    )
    assert (booked.record.stalled_recoveries, booked.record.consecutive_failures) == (2, 3)


@pytest.mark.parametrize(
    ("reason", "message", "cause", "words"),
    [
        pytest.param(
            "LogHang_loss",
            "rule loss: no line for 60 s",
            "LogHang_loss",
            "rule loss: no line",
            id="a rule that found a hang",
        ),
        pytest.param(
            "LogSlow_TFLOPs per GPU",
            "3 in a row",
            "LogSlow_TFLOPs_per_GPU",
            "log rule TFLOPs per GPU: “3 in a row”",
            id="a name of several words",
        ),
        pytest.param("LogFault_xid", "", "LogFault_xid", "log rule xid found it", id="an agent that says no more"),
        pytest.param("!!", "what", "WorkerFault", "what", id="a reason that is none"),
    ],
)
def test_log_rules_count_like_worker_faults_and_are_named(reason: str, message: str, cause: str, words: str) -> None:
    hanging = replace(faulted(), reason=reason, failure=None, message=message)
    todo = plan(observed(job(trains(), policy(2, 2)), [(pod(0), hanging), (pod(1), running())]))
    began = todo.record.transition
    assert began is not None
    assert (began.cause, began.uses_budget, todo.record.retries) == (cause, True, 1)
    assert words in began.message
    assert next((n.reason, n.message) for n in todo.events) == (cause, began.message)
