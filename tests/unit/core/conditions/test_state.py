"""The condition that is the state of a job: the last one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    Seen,
    agent,
    job,
    observed,
    pod,
    policy,
    ready,
    running,
    seconds,
    silent,
    trains,
    transition,
)
from tests.unit.core.conditions.reports import (
    ACCEPTED,
    BROKEN,
    FULL,
    PODS_RUN,
    RECOVERS,
    RESIZING,
    RUN,
    STARTING,
    STARTS,
    condition,
    report,
    sentence,
    state,
    told,
    waits,
)

from elastipod_operator.core.plan import plan
from elastipod_operator.core.reasons import OpenReason, Reason
from elastipod_operator.core.record import (
    Depth,
    Record,
    TransitionKind,
)
from elastipod_operator.core.snapshot import AgentState, Condition, Snapshot


def test_why_a_spec_cannot_be_used_is_told() -> None:
    assert sentence(observed(replace(job(STARTS), policy=None, spec_error="no size")), "Suspended") == "no size"
    assert sentence(observed(replace(job(trains()), policy=None, spec_error="no size")), "Warning") == "no size"


@pytest.mark.parametrize(
    ("record", "pods", "words"),
    [
        pytest.param(
            STARTS, [(pod(0), ready(0)), waits(1, problem="no room")], "1 of 2 replicas is ready: no room", id="few"
        ),
        pytest.param(
            Record(transition=transition(TransitionKind.START, target_size=4)),
            [(pod(0), ready(0))],
            "1 of 4 replicas is ready",
            id="of a goal",
        ),
        pytest.param(
            Record(transition=transition(TransitionKind.START, target_size=1)),
            [(pod(0), ready(0))],
            "1 of 2 replicas is ready",
            id="minimum",
        ),
        pytest.param(STARTS, [(pod(0), ready(0)), (pod(1), ready(0))], "2 replicas are ready", id="enough"),
    ],
)
def test_a_start_is_told_in_figures(record: Record, pods: list[Seen], words: str) -> None:
    assert report(observed(job(record), pods)).conditions[-1].message == words


@pytest.mark.parametrize(
    ("pods", "words"),
    [
        pytest.param([(pod(0), running()), (pod(1), agent(AgentState.STOPPING))], "a test; 2 replicas are being stopped", id="all"),
        pytest.param([(pod(0), running()), (pod(1), ready(1))], "a test; 1 replica is being stopped", id="one"),
        pytest.param([(pod(0), silent(20)), (pod(1), silent(20))], "a test; 2 replicas are being stopped", id="as far as is known"),
        pytest.param([(pod(0, disruption="x"), running()), (pod(1), ready(1))], "a test; 1 replica is being stopped", id="who goes, too"),
        pytest.param([(pod(0, phase="Failed"), running()), (pod(1), ready(1))], "a test; 1 of 2 replicas is ready", id="ended"),
        pytest.param([(pod(0), ready(1)), (pod(1), ready(1)), (pod(2), running())], "a test; 2 replicas are ready", id="nor strangers"),
    ],
)  # fmt: skip
def test_a_change_is_told_in_figures(pods: list[Seen], words: str) -> None:
    assert report(observed(job(trains(transition=transition())), pods)).conditions[-1].message == words


@pytest.mark.parametrize(
    ("depth", "reason", "words"),
    [
        pytest.param(Depth.MEMORY, "", "a test, in memory", id="memory"),
        pytest.param(Depth.PROCESS, "nobody stays", "a test, with new processes because nobody stays", id="process"),
        pytest.param(Depth.PROCESS, "", "a test", id="nobody expected more"),
        pytest.param(Depth.JOB, "it failed again", "a test, with new pods because it failed again", id="job"),
    ],
)
@pytest.mark.parametrize("kind", [TransitionKind.RESIZE, TransitionKind.RECOVERY])
def test_a_change_says_how_deep_it_goes_and_why(kind: TransitionKind, depth: Depth, reason: str, words: str) -> None:
    record = trains(transition=transition(kind, began_s=1, depth=depth, depth_reason=reason))
    looked = observed(job(record), [(pod(0), running()), (pod(1), ready(1))])
    assert report(looked).conditions[-1].message == words


def test_a_short_change_is_written_once() -> None:
    """Each write takes processors from the pause: what is waited for is told only where somebody could read it."""
    record = trains(transition=transition(began_s=1))
    looks = [observed(job(record), [(pod(0), running()), (pod(1), other)]) for other in (running(), ready(1))]
    assert [report(look).conditions[-1].message for look in looks] == ["a test", "a test"]
    wake_at = plan(looks[1]).wake_at
    assert wake_at is not None
    assert wake_at <= NOW + seconds(1), "then it is told what is waited for"


@pytest.mark.parametrize(
    ("changes", "has_next_try"),
    [
        pytest.param({"not_before": NOW + seconds(1)}, True, id="a wait"),
        pytest.param({"not_before": NOW}, False, id="that is over"),
        pytest.param({}, False, id="no wait"),
    ],
)
def test_the_next_try_is_told_while_it_is_waited_for(changes: dict[str, Any], has_next_try: bool) -> None:
    began = transition(TransitionKind.RECOVERY, is_budget_checked=True, **changes)
    message = report(observed(job(replace(BROKEN, transition=began)), RUN)).conditions[-1].message
    assert ("next attempt" in message) is has_next_try
    assert "2 failures in a row" in message


def test_a_recovery_is_looked_at_when_it_becomes_a_fault() -> None:
    assert report(observed(job(RECOVERS), RUN)).wake_at == NOW + seconds(0.1)
    assert report(observed(job(BROKEN), RUN)).wake_at is None
    assert report(observed(job(trains()), RUN)).wake_at is None


def test_a_job_that_ran_says_that_it_does_not_and_keeps_its_times() -> None:
    before = (
        Condition("Created", True, OpenReason("x"), "x", LONG_AGO),
        Condition("Running", True, Reason.TRAINING, "x", LONG_AGO),
    )
    snapshot = observed(job(BROKEN, FULL, conditions=before), RUN)
    conditions = report(snapshot).conditions
    assert told(snapshot) == [
        ACCEPTED,
        PODS_RUN,
        ("Running", False, "WorkerCrash"),
        ("Faulted", True, "WorkerCrash"),
    ]
    assert [c.since for c in conditions] == [LONG_AGO, NOW, NOW, NOW]
    assert conditions[2].message == conditions[3].message


RECOVERING = trains(transition=transition(TransitionKind.RECOVERY, cause="WorkerCrash"))


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [
        pytest.param(observed(job(STARTING)), ("Created", True, "WaitingForPods"), id="no pod runs"),
        pytest.param(observed(job(STARTING), [(pod(0), None), (pod(1), None)]), ("PodsRunning", True, "WaitingForAgents"),
                     id="pods run, agents are awaited"),
        pytest.param(observed(job(trains(running_since=None)), [(pod(0), running()), (pod(1), ready())]), ("Running", True, "Starting"),
                     id="workers are being started"),
        pytest.param(observed(job(trains()), RUN), ("Running", True, "Training"), id="training"),
        pytest.param(observed(job(RESIZING), RUN), ("Running", True, "Resizing"), id="Running stays through a planned resize"),
        pytest.param(observed(job(replace(RECOVERING, fault_at=NOW - seconds(29))), RUN), ("Running", True, "Recovering"),
                     id="Running stays through a short recovery"),
        pytest.param(observed(job(replace(RECOVERING, fault_at=NOW - seconds(31))), RUN), ("Faulted", True, "WorkerCrash"),
                     id="Faulted after half a minute"),
        pytest.param(observed(job(replace(RECOVERING, fault_at=NOW, consecutive_failures=2)), RUN), ("Faulted", True, "WorkerCrash"),
                     id="Faulted at once when failures repeat"),
        pytest.param(observed(job(trains(transition=transition(TransitionKind.SUSPEND)), policy(suspend=True))),
                     ("Suspended", True, "SuspendedByUser"), id="suspended"),
        pytest.param(observed(job(trains(transition=transition(TransitionKind.SUSPEND))), RUN), ("Suspended", True, "Resuming"),
                     id="resumed before its workers were stopped"),
        pytest.param(observed(job(trains(outcome="Completed", outcome_reason="Completed", ended_at=NOW))), ("Completed", True, "Completed"),
                     id="completed"),
        pytest.param(observed(job(trains(outcome="Failed", outcome_reason="WorkerCrash", ended_at=NOW))), ("Failed", True, "WorkerCrash"),
                     id="failed"),
        pytest.param(observed(replace(job(), policy=None, spec_error="no size is left")), ("Suspended", True, "InvalidSpec"),
                     id="a spec that cannot be used"),
        pytest.param(observed(replace(job(trains()), policy=None, spec_error="no size is left"), RUN), ("Running", True, "Training"),
                     id="a running job whose spec cannot be used any more"),
    ],
)  # fmt: skip
def test_the_state_is_the_last_condition(snapshot: Snapshot, expected: tuple[str, bool, str]) -> None:
    assert state(plan(snapshot)) == expected


def test_a_job_that_trained_says_that_it_does_not_run_any_more() -> None:
    before = (Condition("Running", True, Reason.TRAINING, "x", LONG_AGO),)
    record = replace(RECOVERING, fault_at=NOW - seconds(60))
    todo = plan(observed(job(record, conditions=before), RUN))
    assert not condition(todo, "Running").status
    assert state(todo)[0] == "Faulted"


def test_repeated_failures_are_told_with_the_next_try() -> None:
    record = replace(
        RECOVERING, fault_at=NOW, consecutive_failures=3,
        transition=replace(transition(TransitionKind.RECOVERY), not_before=NOW + seconds(40), message="rank 0 exited with code 1"),
    )  # fmt: skip
    told = plan(observed(job(record), [(pod(0), ready(1)), (pod(1), ready(1))])).conditions[-1].message
    assert "rank 0 exited with code 1" in told
    assert "3 failures in a row" in told
    assert "next attempt at 12:00:40 UTC" in told
