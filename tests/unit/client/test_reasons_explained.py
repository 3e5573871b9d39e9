"""Every reason that the operator can emit has an explanation, and what to do where a person should do something."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from elastipod_client.blocker import KUEUE_ADVICE, NOTHING
from elastipod_client.explanation import Explanation, explain
from elastipod_client.situation import Situation
from elastipod_operator.core.reasons import EventRule, Reason, Severity

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
STATES = ("Created", "PodsRunning", "Running", "Suspended", "Faulted", "Completed", "Failed")
SINCE = "2026-01-01T11:58:00Z"


def condition(kind: str, reason: str, message: str, status: str = "True") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": SINCE}


TRAINS = condition("Running", "Training", "2 replicas train in generation 1")


def explained(*conditions: dict[str, Any], events: tuple[dict[str, Any], ...] = ()) -> Explanation:
    meta = {"name": "llm", "namespace": "team", "uid": "u", "creationTimestamp": "2026-01-01T11:00:00Z"}
    job = {"metadata": meta, "status": {"conditions": list(conditions)}}
    return explain(Situation(now=NOW, job=job, events=events))


def places() -> Iterator[tuple[Reason, str]]:
    """Give each reason with each place that shows it: a condition, the history, or an Event alone."""
    for reason in Reason:
        words = [word.strip() for word in reason.where.removeprefix("the message of ").replace(" and ", ",").split(",")]
        for place in words:
            yield reason, place or "Event"


def shown(reason: Reason, place: str) -> Explanation | None:
    """Explain a job that has a reason at a place; None where the reason is a part of another's message."""
    if reason is Reason.UNSCHEDULABLE or place == "history":
        return None
    message = f"something: about {reason}"
    if place == "Event":
        return explained(TRAINS, events=({"reason": reason.value, "message": message, "lastTimestamp": SINCE},))
    if place in STATES:
        return explained(condition(place, reason, message))
    return explained(condition(place, reason, message, "False"), TRAINS)


ALL = list(places())


def test_there_are_many_reasons() -> None:
    assert len(ALL) > len(Reason) > 80


@pytest.mark.parametrize(("reason", "place"), ALL, ids=[f"{reason} in {place}" for reason, place in ALL])
def test_a_reason_is_explained_where_it_shows(reason: Reason, place: str) -> None:
    explanation = shown(reason, place)
    if explanation is None or (reason.severity is Severity.INFO and reason.advice == ""):
        return
    text = explanation.text
    assert f"{reason}: something: about {reason}, since 11:58:00 UTC (2 min)." in text
    assert reason.advice[1:] in text
    assert explanation.needs_attention or reason.severity is Severity.INFO


@pytest.mark.parametrize("reason", Reason, ids=str)
def test_what_is_wrong_comes_with_what_to_do(reason: Reason) -> None:
    assert reason.severity is Severity.INFO or reason.advice
    assert reason.event is EventRule.NEVER or reason.meaning


def test_a_healthy_job_needs_nothing() -> None:
    explanation = explained(condition("PodsReady", "AgentsAnswer", "2 agents answer", "False"), TRAINS)
    assert explanation.blockers == ()
    assert not explanation.needs_attention
    assert explanation.text.endswith(NOTHING)


@pytest.mark.parametrize("reason", [*KUEUE_ADVICE, "DeactivatedDueToRequeuingLimitExceeded"])
def test_reasons_of_kueue_have_an_advice(reason: str) -> None:
    explanation = explained(condition("Suspended", reason, "Kueue evicts the job: because"))
    assert explanation.blockers[0].advice
    assert not explanation.needs_attention


def test_a_reason_that_nobody_knows_needs_attention() -> None:
    found = explained(condition("Suspended", "Whatever", "a later version says something"))
    assert found.needs_attention
    assert NOTHING not in found.text
    assert "To do: this version does not know the reason: see the message" in found.text


def test_a_fault_of_workers_points_at_their_log() -> None:
    text = explained(condition("Failed", "LogHang_speed", "rank 3 hangs")).text
    assert "LogHang_speed: rank 3 hangs" in text
    assert "`elastipod logs JOB --first-failure`" in text


def test_each_part_of_a_warning_has_its_own_advice() -> None:
    """The condition names the reason of the first part; the Events name the others."""
    merged = "edits take effect later; the queue is stopped"
    events = (
        {"reason": "QueueStopped", "message": "the queue is stopped", "lastTimestamp": SINCE},
        {"reason": "QueueMissing", "message": "the queue was missing", "lastTimestamp": SINCE},
    )
    found = explained(condition("Warning", "EditsPending", merged, "False"), TRAINS, events=events).blockers
    assert [(str(one.reason), one.message) for one in found] == [
        ("EditsPending", "edits take effect later"),
        ("QueueStopped", "the queue is stopped"),
    ]


@pytest.mark.parametrize(("named", "count"), [("llm-a-1", 1), ("llm-a-10", 2)])
def test_a_pod_is_not_told_by_a_message_about_one_whose_name_is_longer(named: str, count: int) -> None:
    overdue = condition(
        "Warning", "PodsNotDeleted", f"the job waits for pod {named}: its node does not end it", "False"
    )
    meta = {"name": "llm", "namespace": "team", "uid": "u", "creationTimestamp": "2026-01-01T11:00:00Z"}
    job = {"metadata": meta, "status": {"conditions": [overdue, TRAINS]}}
    labels = {"elastipod.io/spec": "a", "elastipod.io/ordinal": "1", "elastipod.io/incarnation": "0"}
    deleted = {"deletionTimestamp": "2026-01-01T11:50:00Z", "deletionGracePeriodSeconds": 30}
    pod = {"metadata": {"name": "llm-a-1", "labels": labels, **deleted}, "spec": {}, "status": {"phase": "Running"}}
    found = explain(Situation(now=NOW, job=job, pods=[pod])).blockers
    assert [str(one.reason) for one in found].count("PodsNotDeleted") == count


def test_old_events_are_not_told() -> None:
    old = {"reason": "NodeAvoided", "message": "node a", "lastTimestamp": "2026-01-01T11:30:00Z"}
    assert explained(TRAINS, events=(old,)).blockers == ()


def test_of_a_repeated_event_the_newest_is_told() -> None:
    events = tuple(
        {"reason": "NodeAvoided", "message": f"node at {minute}", "lastTimestamp": f"2026-01-01T11:{minute}:00Z"}
        for minute in (55, 58, 56)
    )
    (blocker,) = explained(TRAINS, events=events).blockers
    assert blocker.message == "node at 58"
