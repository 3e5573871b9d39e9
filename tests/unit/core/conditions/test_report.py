"""All conditions of a report together: their order, their times, and their Events."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    agent,
    faulted,
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
    ENDED,
    FULL,
    PODS_RUN,
    RECOVERS,
    RESIZING,
    RUN,
    STARTS,
    Told,
    report,
    scaling,
    told,
    unschedulable,
    waits,
)

from elastipod_operator.core.plan import plan
from elastipod_operator.core.reasons import OpenReason, Reason, as_reason
from elastipod_operator.core.record import (
    TransitionKind,
)
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import AgentState, Condition, Snapshot


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [
        pytest.param(observed(job(STARTS)), [("Created", True, "WaitingForPods")], id="a new job"),
        pytest.param(observed(job(STARTS), [(pod(0), None), waits(1)]), [("Created", True, "WaitingForPods")], id="one pod of two"),
        pytest.param(observed(job(STARTS), [(pod(0), None), (pod(1), None)]), [ACCEPTED, ("PodsRunning", True, "WaitingForAgents")],
                     id="both"),
        pytest.param(observed(job(STARTS), [(pod(0), ready(0)), (pod(1, phase="Failed"), None)]),
                     [("Created", True, "WaitingForPods")], id="one has ended"),
        pytest.param(observed(job(trains(), FULL), RUN), [ACCEPTED, PODS_RUN, scaling("AtMaximum"), ("Running", True, "Training")],
                     id="training"),
        pytest.param(observed(job(trains(running_since=None), FULL), RUN),
                     [ACCEPTED, PODS_RUN, scaling("AtMaximum"), ("Running", True, "Starting")], id="starting"),
        pytest.param(observed(job(trains(transition=transition()), FULL), RUN),
                     [ACCEPTED, PODS_RUN, ("Running", True, "Resizing")], id="resizing"),
        pytest.param(observed(job(RECOVERS, FULL), RUN), [ACCEPTED, PODS_RUN, ("Running", True, "Recovering")], id="recovering"),
        pytest.param(observed(job(replace(RECOVERS, fault_at=NOW - seconds(30)), FULL), RUN),
                     [ACCEPTED, PODS_RUN, ("Faulted", True, "WorkerCrash")], id="for half a minute"),
        pytest.param(observed(job(BROKEN, FULL), RUN), [ACCEPTED, PODS_RUN, ("Faulted", True, "WorkerCrash")], id="again"),
        pytest.param(observed(job(replace(BROKEN, transition=None), FULL), RUN),
                     [ACCEPTED, PODS_RUN, scaling("AtMaximum"), ("Faulted", True, "Recovering")], id="until all run"),
        pytest.param(observed(job(trains(transition=transition(TransitionKind.SUSPEND)), policy(2, 2, suspend=True))),
                     [ACCEPTED, ("Suspended", True, "SuspendedByUser")], id="suspended"),
        pytest.param(observed(job(ENDED, FULL)), [ACCEPTED, ("Running", False, "Failed"), ("Failed", True, "WorkerCrash")], id="ended"),
        pytest.param(observed(replace(job(STARTS), policy=None, spec_error="no")), [ACCEPTED, ("Suspended", True, "InvalidSpec")],
                     id="a spec that cannot be used"),
        pytest.param(observed(replace(job(trains(transition=transition())), policy=None, spec_error="no")),
                     [ACCEPTED, ("Suspended", True, "InvalidSpec")], id="in a change"),
        pytest.param(observed(replace(job(trains()), policy=None, spec_error="no")),
                     [ACCEPTED, ("Warning", False, "InvalidSpec"), ("Running", True, "Training")], id="while it trains"),
        pytest.param(observed(job(trains(), FULL, unmanaged="newer")),
                     [("Warning", False, "RecordOfNewerOperator"), ("Created", True, "Accepted")], id="left alone"),
    ],
)  # fmt: skip
def test_conditions_come_in_their_order(snapshot: Snapshot, expected: Told) -> None:
    assert told(snapshot) == expected


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        pytest.param(Condition("Running", True, Reason.TRAINING, "x", LONG_AGO),
                     [ACCEPTED, ("Warning", False, "RecordOfNewerOperator"), ("Running", True, "Training")], id="the state is kept"),
        pytest.param(Condition("Created", True, Reason.WAITING_FOR_PODS, "x", LONG_AGO),
                     [("Warning", False, "RecordOfNewerOperator"), ACCEPTED], id="also the first one"),
        pytest.param(Condition("Warning", False, Reason.SPEC_WARNING, "x", LONG_AGO),
                     [("Warning", False, "RecordOfNewerOperator"), ACCEPTED], id="of a warning nothing is"),
    ],
)  # fmt: skip
def test_what_is_told_of_a_job_that_is_left_alone(last: Condition, expected: Told) -> None:
    assert told(observed(job(None, unmanaged="newer", conditions=(last,)))) == expected


def test_an_event_is_given_when_its_reason_is_new() -> None:
    snapshot = observed(job(trains(), policy(warnings=("w",))), RUN)
    assert [(n.reason, n.message, n.is_warning) for n in report(snapshot).events] == [("SpecWarning", "w", True)]
    for before, events in ((Reason.SPEC_WARNING, []), (Reason.EDITS_PENDING, ["SpecWarning"])):
        known = replace(snapshot.job, conditions=(Condition("Warning", False, before, "x", LONG_AGO),))
        assert [n.reason for n in report(replace(snapshot, job=known)).events] == events


KEPT = "the API server refuses to delete pod job-workers-0, and the operator tries again: forbidden"


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        pytest.param({"record": trains()}, ["PodsNotDeleted", "SpecWarning"], id="beside other warnings"),
        pytest.param({"record": replace(trains(), outcome="Failed", outcome_reason=OpenReason("x"))}, ["PodsNotDeleted"], id="at the end"),
        pytest.param({"policy": None, "spec_error": "y"}, ["PodsNotDeleted", "InvalidSpec"], id="of a spec that cannot be used"),
        pytest.param({"policy": None, "spec_error": "y", "record": trains()}, ["PodsNotDeleted", "InvalidSpec"],
                     id="of one that trains on all the same"),
        pytest.param({"record": trains(), "deleting_since": NOW}, ["PodsNotDeleted", "QuotaNotReturned"], id="in a deletion"),
        pytest.param({"record": trains(queue="a")}, ["PodsNotDeleted", "QuotaNotReturned", "SpecWarning"], id="beside quota"),
    ],
)  # fmt: skip
def test_what_cannot_be_deleted_comes_first_and_the_state_last(changes: dict[str, Any], reasons: list[str]) -> None:
    problem = "no quota back" if "QuotaNotReturned" in reasons else ""
    plain = observed(job(**{"wishes": policy(warnings=("w",)), **changes}), RUN, quota_return_error=problem)
    found, without = report(replace(plain, pod_deletion_error=KEPT)), report(plain)
    warning = next(c for c in found.conditions if c.type == "Warning")
    assert (warning.reason, warning.message.split("; ")[0]) == ("PodsNotDeleted", KEPT)
    assert [note.reason for note in found.events] == reasons
    assert found.conditions[-1] == without.conditions[-1]
    again = replace(
        plain, pod_deletion_error=KEPT.replace("0-0", "1-0"), job=replace(plain.job, conditions=found.conditions)
    )
    assert [note.reason for note in report(again).events] == [], "another pod is no news"


def test_a_message_that_repeats_something_endless_is_cut() -> None:
    told = plan(observed(replace(job(STARTS), policy=None, spec_error="x" * 100_000)))
    assert max(len(c.message) for c in told.conditions) < 10_000


EVERY_SNAPSHOT = [
    observed(job(), []),
    observed(job(trains()), [*RUN, (pod(2), ready()), unschedulable(3)]),
    observed(job(trains(), policy(sizes=Sizes((2,), 2, ("a warning",)))), RUN),
    observed(job(trains(window_since=NOW)), [*RUN, (pod(2), ready())]),
    observed(job(trains()), [(pod(0), silent(99)), (pod(1), silent(99))]),
    observed(job(RESIZING), [(pod(0), agent(AgentState.STOPPING)), (pod(1), running())]),
    observed(job(trains()), [(pod(0), faulted()), (pod(1), running())]),
    observed(job(trains(), policy(suspend=True)), RUN),
    observed(job(trains(), deleting_since=NOW), RUN),
    observed(replace(job(trains()), policy=None, spec_error="no"), RUN),
]


@pytest.mark.parametrize("snapshot", EVERY_SNAPSHOT)
def test_types_occur_once_and_auxiliary_ones_come_before_and_are_never_true(snapshot: Snapshot) -> None:
    conditions = plan(snapshot).conditions
    types = [c.type for c in conditions]
    assert len(set(types)) == len(types)
    assert types[-1] not in ("Scaling", "PodsReady", "Warning")
    assert not [c for c in conditions if c.type in ("Scaling", "PodsReady", "Warning") and c.status]


@pytest.mark.parametrize("snapshot", EVERY_SNAPSHOT)
def test_what_was_decided_once_is_decided_again_from_the_same_facts(snapshot: Snapshot) -> None:
    assert plan(snapshot) == plan(snapshot)


@pytest.mark.parametrize(
    "snapshot", [observed(job(trains(4)), [(pod(n), running()) for n in range(4)]),
                 observed(job(trains()), [*RUN, unschedulable(2)])],
    ids=["at its maximum", "waiting for capacity"],
)  # fmt: skip
def test_a_steady_job_asks_for_nothing_and_writes_nothing(snapshot: Snapshot) -> None:
    first = plan(snapshot)
    told = replace(
        snapshot.job, record=first.record, conditions=first.conditions, scaling=first.status["elasticScalingStatus"]
    )
    later = replace(snapshot, now=NOW + seconds(3), job=told)
    second = plan(later)
    assert (first.actions, second.actions) == ((), ())
    assert (second.record, second.conditions, second.size, second.status, second.events) == (
        first.record, first.conditions, first.size, first.status, (),
    )  # fmt: skip


def test_the_time_of_a_condition_is_that_of_its_status() -> None:
    before = Condition("Running", True, Reason.STARTING, "x", LONG_AGO)
    todo = plan(observed(job(trains(), conditions=(before,)), RUN))
    assert todo.conditions[-1].since == LONG_AGO
    assert plan(observed(job(trains()), RUN)).conditions[-1].since == NOW


@pytest.mark.parametrize(("before", "since"), [("AtMaximum", LONG_AGO), ("WaitingForCapacity", NOW)])
def test_a_condition_whose_status_never_changes_has_the_time_of_its_reason(before: str, since: datetime) -> None:
    known = (Condition("Scaling", False, as_reason(before), "", LONG_AGO),)
    found = plan(observed(job(trains(), FULL, conditions=known), RUN)).conditions
    (scaling,) = [condition for condition in found if condition.type == "Scaling"]
    assert (scaling.reason, scaling.since) == ("AtMaximum", since)
