"""Which deadline of a job is next, and which one has passed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import (
    NOW,
    job,
    observed,
    policy,
    seconds,
    trains,
    transition,
)
from tests.unit.core.ending_builders import ACCEPTED, snapshot

from elastipod_operator.core.deadlines import Deadline, next_deadline, overdue
from elastipod_operator.core.grant import grant_all
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import Record, TransitionKind
from elastipod_operator.core.snapshot import Policy

FAULT = trains(transition=transition(TransitionKind.RECOVERY), fault_at=NOW - seconds(40))
ALL: dict[str, Any] = {"active_deadline": seconds(150), "startup_deadline": seconds(130), "fault_deadline": seconds(60)}


@pytest.mark.parametrize(
    ("record", "wishes", "wait_s"),
    [
        pytest.param(trains(), policy(), None, id="none was wished for"),
        pytest.param(trains(started_at=None, first_pod_at=ACCEPTED), policy(**ALL), 30, id="the nearest one"),
        pytest.param(trains(started_at=None), policy(**ALL), 50, id="a start has none before there are pods"),
        pytest.param(trains(suspended_time=seconds(5)), policy(**ALL), 55, id="a suspension puts it off"),
        pytest.param(trains(), policy(**ALL), 50, id="a start that came off has none any more"),
        pytest.param(FAULT, policy(**ALL), 20, id="nor has a fault before it"),
        pytest.param(FAULT, policy(**{**ALL, "fault_deadline": seconds(40)}), 50, id="one that is reached is not waited for"),
        pytest.param(trains(fault_at=NOW, running_since=None), policy(**ALL), 50, id="a fault that is being recovered"),
        pytest.param(trains(fault_at=NOW), policy(fault_deadline=seconds(1)), None, id="not one from which all run again"),
        pytest.param(trains(running_since=None), policy(fault_deadline=seconds(1)), None, id="nor where there was none"),
        pytest.param(trains(transition=transition()), policy(**ALL), 50, id="a drain"),
        pytest.param(trains(), policy(suspend=True, **ALL), None, id="a wish to suspend stops all"),
        pytest.param(trains(transition=transition(TransitionKind.SUSPEND)), policy(**ALL), None, id="as long as it is suspended"),
    ],
)  # fmt: skip
def test_the_next_deadline(record: Record, wishes: Policy, wait_s: float | None) -> None:
    assert next_deadline(snapshot(record, wishes), record, grant_all(wishes)) == (
        None if wait_s is None else NOW + seconds(wait_s)
    )


def test_the_first_of_several_deadlines_that_passed_is_told_with_its_field_and_figure() -> None:
    late = policy(active_deadline=seconds(90), startup_deadline=seconds(80.5))
    record = trains(started_at=None, first_pod_at=ACCEPTED)
    assert overdue(snapshot(record, late), record, grant_all(late)) == Deadline(
        ACCEPTED + seconds(80.5),
        Reason.STARTUP_DEADLINE_EXCEEDED,
        "training did not begin within spec.runPolicy.startupDeadlineSeconds (80.5 s)",
    )
    assert overdue(snapshot(trains(), late), trains(), grant_all(late)) == Deadline(
        ACCEPTED + seconds(90),
        Reason.DEADLINE_EXCEEDED,
        "the job ran for longer than spec.runPolicy.activeDeadlineSeconds (90 s)",
    )
    faulty = policy(fault_deadline=seconds(40))
    assert overdue(snapshot(FAULT, faulty), FAULT, grant_all(faulty)) == Deadline(
        NOW,
        Reason.FAULT_DEADLINE_EXCEEDED,
        "training did not resume within spec.runPolicy.faultDeadlineSeconds (40 s) after a fault",
    )


def test_a_job_whose_spec_cannot_be_read_has_no_deadlines() -> None:
    unread = observed(replace(job(trains(), created_at=ACCEPTED), policy=None, spec_error="no"))
    assert (overdue(unread, trains(), None), next_deadline(unread, trains(), None)) == (None, None)
