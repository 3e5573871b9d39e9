"""What is written of a job's metadata beside its record."""

from __future__ import annotations

import pytest
from tests.unit.core.builders import NOW
from tests.unit.kube.bodies import job_body

from elastipod_operator.core.actions import Plan, SetFinalizer
from elastipod_operator.core.names import FINALIZER
from elastipod_operator.core.reasons import OpenReason
from elastipod_operator.core.record import Record
from elastipod_operator.core.snapshot import Condition
from elastipod_operator.kube.changes import metadata_changes
from elastipod_operator.kube.node_signals import CONFIGURED, parse_signals
from elastipod_operator.kube.observed_job import observe_job
from elastipod_operator.kube.store import Job

OTHERS = "foregroundDeletion"


@pytest.mark.parametrize(
    ("present", "is_wanted", "written"),
    [
        pytest.param([], True, [FINALIZER], id="put on"),
        pytest.param([OTHERS], True, [OTHERS, FINALIZER], id="put on beside others"),
        pytest.param([FINALIZER], True, None, id="there already"),
        pytest.param([OTHERS, FINALIZER], False, [OTHERS], id="taken off, and others stay"),
        pytest.param([OTHERS], False, None, id="gone already"),
    ],
)
def test_finalizers(present: list[str], is_wanted: bool, written: list[str] | None) -> None:
    body = job_body(finalizers=present)
    conditions = (Condition("Running", True, OpenReason("x"), "x", NOW),)
    todo = Plan(record=Record(), actions=(SetFinalizer(is_wanted),), conditions=conditions, skips_record=True)
    assert metadata_changes(Job(body, observe_job(body), 10), todo).get("finalizers") == written


@pytest.mark.parametrize(
    ("present", "said", "written"),
    [
        ("", "", None),
        ("", "drain taint team,ignore label a=b", "drain taint team,ignore label a=b"),
        ("drain taint team", "drain taint team", None),
        ("drain taint team", "", ""),
    ],
)
def test_who_explains_a_job_reads_what_the_operator_is_told_of_nodes(
    monkeypatch: pytest.MonkeyPatch, present: str, said: str, written: str | None
) -> None:
    for signal, effect in parse_signals(said).items():
        monkeypatch.setitem(CONFIGURED, signal, effect)
    body = job_body(annotations={"elastipod.io/node-signals": present} if present else {})
    conditions = (Condition("Running", True, OpenReason("x"), "x", NOW),)
    changed = metadata_changes(Job(body, observe_job(body), 10), Plan(record=Record(), conditions=conditions))
    assert changed["annotations"].get("elastipod.io/node-signals") == written


@pytest.mark.parametrize(("value", "drains"), [("true", True), ("false", False), ("", False), ("yes", False)])
def test_only_true_asks_for_a_drain_before_a_deletion(value: str, drains: bool) -> None:
    assert observe_job(job_body(annotations={"elastipod.io/drain-on-delete": value})).drain_on_delete is drains
