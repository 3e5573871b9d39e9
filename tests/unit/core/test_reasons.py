"""Reasons are members of one enum, each with its documentation; a reason written as a plain string is found here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.nonempty import every

import elastipod_operator
from elastipod_operator.api.reasons_reference import render
from elastipod_operator.core.reasons import EventRule, OpenReason, Reason, as_reason, writes_event_when_reported

PACKAGE = Path(elastipod_operator.__file__).parent
# The argument of these that is a reason, by its position.
TAKE_REASONS = {
    "JobEvent": 0, "ConditionDraft": 2, "Condition": 2, "Fault": 0, "SuspendedBy": 0, "Deadline": 1, "QuotaProblem": 0,
    "Diagnosis": 0, "Trouble": 0,
}  # fmt: skip


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name not in ("reasons.py", "reasons_reference.py"):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


@cache
def used_members() -> set[str]:
    return {
        node.attr
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Reason"
    }


def plain_reasons() -> Iterator[str]:
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TAKE_REASONS:
                place = TAKE_REASONS[node.func.id]
                given = node.args[place] if len(node.args) > place else None
                if isinstance(given, ast.Constant) and given.value:
                    yield f"{path.relative_to(PACKAGE)} line {node.lineno}: {given.value!r}"


def test_no_reason_is_written_as_a_plain_string() -> None:
    assert list(plain_reasons()) == []


# Outcomes of a job are written as the types of their conditions.
OUTCOMES = {"FAILED"}


@pytest.mark.parametrize("reason", Reason, ids=str)
def test_every_reason_is_used_and_documented(reason: Reason) -> None:
    assert reason.name in used_members() | OUTCOMES
    assert reason.meaning.endswith(".")
    assert not reason.advice or reason.advice.endswith(".")
    assert reason.where or reason.event is EventRule.WHEN_IT_HAPPENS


def test_a_stored_reason_is_a_member_again_and_others_pass_as_they_are() -> None:
    assert as_reason("NodeLost") is Reason.NODE_LOST
    assert as_reason("LogHang_loss") == OpenReason("LogHang_loss")


def test_which_conditions_are_reported_as_events() -> None:
    assert writes_event_when_reported(Reason.IMAGE_PULL_FAILED)
    assert not writes_event_when_reported(Reason.AT_MAXIMUM)
    assert not writes_event_when_reported(OpenReason("Preempted"))


def test_the_reference_lists_every_reason() -> None:
    text = render()
    assert every(f"| `{reason.value}` |" in text and reason.meaning in text for reason in Reason)
