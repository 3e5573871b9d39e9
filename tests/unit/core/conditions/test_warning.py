"""Condition Warning: what deserves attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    job,
    observed,
    pid,
    pod,
    policy,
    running,
    trains,
    transition,
)
from tests.unit.core.conditions.reports import ACCEPTED, FULL, PODS_RUN, RUN, report, scaling, sentence, told

from elastipod_operator.core.conditions.warning import FOREIGN_RECORD
from elastipod_operator.core.plan import plan
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import (
    Record,
)
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import Condition, SpecLimits


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


BASE_AND_EXTRA = tuple(pid(n, spec=spec) for spec, n in (("base", 0), ("base", 1), ("base", 2), ("extra", 0)))


@pytest.mark.parametrize(
    ("limits", "changes", "is_told"),
    [
        pytest.param((3, 3), {}, False, id="as many as they may"),
        pytest.param((2, 4), {}, True, id="more of one spec"),
        pytest.param((2, 4), {"transition": transition()}, False, id="a change is under way, and ends with fewer"),
        pytest.param((2, 1), {}, False, id="the size is not allowed either, so the job shrinks"),
    ],
)
def test_a_lower_limit_of_one_spec_that_has_no_effect_yet_is_told(
    limits: tuple[int, int], changes: dict[str, Any], is_told: bool
) -> None:
    wishes = policy(2, sum(limits), specs=(SpecLimits("base", limits[0]), SpecLimits("extra", limits[1])))
    pods = [(pod(member, node=f"node-{n}"), running()) for n, member in enumerate(BASE_AND_EXTRA)]
    found = report(observed(job(trains(members=BASE_AND_EXTRA, **changes), wishes), pods)).conditions
    assert [c.message for c in found if c.reason == "EditsPending"] == (
        [
            "spec.replicaSpecs[base] allows 2 replicas now, and 3 train; the lower limit takes effect at the next change of the size "
            "or recovery, or when the job is suspended and resumed"
        ]
        if is_told
        else []
    )


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
