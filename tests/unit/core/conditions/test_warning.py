"""Condition Warning: what deserves attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    job,
    observed,
    pod,
    policy,
    running,
    trains,
)
from tests.unit.core.conditions.reports import ACCEPTED, FULL, PODS_RUN, RUN, report, scaling, sentence, told

from elastipod_operator.core.conditions.warning import FOREIGN_RECORD
from elastipod_operator.core.plan import plan
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import (
    Record,
)
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import Condition


@pytest.mark.parametrize(
    ("record", "changes", "wishes", "reasons"),
    [
        pytest.param(
            trains(stalled_recoveries=3),
            {"pending_edits": ("a",)},
            policy(warnings=("w",)),
            ["NoProgress", "EditsPending", "SpecWarning"],
            id="the most pressing",
        ),
        pytest.param(
            trains(stalled_recoveries=2),
            {"pending_edits": ("a",)},
            policy(warnings=("w",)),
            ["EditsPending", "SpecWarning"],
            id="then edits",
        ),
        pytest.param(trains(), {}, policy(warnings=("v", "w")), ["SpecWarning"], id="then the spec"),
        pytest.param(trains(), {}, policy(sizes=Sizes((2,), 2, ("w",))), ["SpecWarning"], id="or its sizes"),
        pytest.param(trains(), {}, policy(), [], id="nothing"),
    ],
)
def test_what_deserves_attention(record: Record, changes: dict[str, Any], wishes: Any, reasons: list[str]) -> None:
    snapshot = observed(job(record, wishes, **changes), RUN)
    assert [r for kind, _, r in told(snapshot) if kind == "Warning"] == reasons[:1]
    assert [n.reason for n in report(snapshot).events] == reasons, "an Event each"
    written = replace(snapshot, job=replace(snapshot.job, conditions=report(snapshot).conditions))
    assert report(written).events == (), "and only once"


def test_all_warnings_are_told_in_one_sentence() -> None:
    wishes = policy(sizes=Sizes((2, 3), 2, ("first",)), warnings=("second",))
    assert sentence(observed(job(trains(), wishes), RUN), "Warning") == "first; second"


def test_agents_that_tell_more_than_is_taken_are_named() -> None:
    agents = [(pod(n), running(refused_answer="its workers leave 70000 bytes" if n else "")) for n in range(4)]
    told = plan(observed(job(trains(4), policy(2, 4)), agents))
    warning = next(c for c in told.conditions if c.type == "Warning")
    assert warning.reason == "AnswerRefused"
    assert warning.message == f"the agent of pod {pod(1).name} (and of 2 more pods): its workers leave 70000 bytes"
    assert [note.reason for note in told.events if note.is_warning] == ["AnswerRefused"]


@pytest.mark.parametrize(
    ("record", "is_told"),
    [
        pytest.param(Record(), True, id="until the job trains"),
        pytest.param(trains(), False, id="not when it trains"),
    ],
)
def test_an_ignored_record_is_told_after_it_was_overwritten(record: Record, is_told: bool) -> None:
    before = (Condition("Warning", False, Reason.RECORD_IGNORED, FOREIGN_RECORD, LONG_AGO),)
    found = report(observed(job(record, conditions=before), RUN))
    assert [c.reason for c in found.conditions if c.type == "Warning"] == ([Reason.RECORD_IGNORED] if is_told else [])
    assert found.events == (), "it was reported before"


def test_an_error_of_the_operator_is_told_before_the_state_and_hides_nothing() -> None:
    snapshot = observed(job(trains(), FULL), RUN, operator_error="KeyError: 'a'")
    warns = ("Warning", False, "OperatorError")
    assert told(snapshot) == [ACCEPTED, PODS_RUN, scaling("AtMaximum"), warns, ("Running", True, "Training")]
