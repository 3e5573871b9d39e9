"""Which deadline is told and when the next one wakes; the last minute of pods, jobs and their time to live (16, 28, 29)."""

from __future__ import annotations

from datetime import datetime

import pytest
from tests.unit.core.builders import (
    NOW,
    Seen,
    agent,
    granted,
    job,
    observed,
    pod,
    policy,
    ready,
    running,
    seconds,
    trains,
)
from tests.unit.core.ending_builders import ended, snapshot

from elastipod_operator.api.models import CleanPodPolicy
from elastipod_operator.core.actions import Action, DeletePod, ShutDownAgent
from elastipod_operator.core.deadlines import next_deadline
from elastipod_operator.core.ending import plan_end
from elastipod_operator.core.health import assess
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Record
from elastipod_operator.core.record_codec import decode, encode
from elastipod_operator.core.snapshot import AgentState, ObservedAgent, Policy


def end(record: Record, wishes: Policy, *pods: Seen) -> tuple[tuple[Action, ...], datetime | None]:
    look = snapshot(record, wishes, *pods)
    kept, actions, wake = plan_end(look, record, assess(look))
    assert kept == record
    return actions, wake


KEEP = policy(clean_pods=CleanPodPolicy.NONE)
DONE = (pod(0), agent(AgentState.COMPLETED))


@pytest.mark.parametrize(
    ("ago_s", "ttl_s", "wait_s"),
    [
        pytest.param(20, None, 40, id="a pod has a minute to end by itself"),
        pytest.param(20, 30, 10, id="the job may go before that"),
        pytest.param(20, 100, 40, id="or after"),
        pytest.param(59, 1, 1, id="a job that goes now still waits for nothing else"),
    ],
)
def test_the_end_is_looked_at_again(ago_s: float, ttl_s: float | None, wait_s: float) -> None:
    wishes = policy(clean_pods=CleanPodPolicy.NONE, ttl=None if ttl_s is None else seconds(ttl_s))
    assert end(ended(ago_s), wishes, DONE)[1] == NOW + seconds(wait_s)


def test_an_end_that_is_not_dated_is_now() -> None:
    actions, wake = end(trains(outcome="Completed"), KEEP, DONE)
    assert (actions, wake) == ((ShutDownAgent(pod(0).name),), NOW + seconds(60))


@pytest.mark.parametrize(
    ("ago_s", "actions"),
    [
        pytest.param(59.9, [ShutDownAgent(pod(0).name)], id="at first its agent is asked"),
        pytest.param(
            60,
            [
                ShutDownAgent(pod(0).name),
                DeletePod(pod(0).name, pod(0).uid, "a container still runs a minute after the end of the job"),
            ],
            id="then the pod goes",
        ),
    ],
)
def test_a_pod_that_does_not_end_by_itself(ago_s: float, actions: list[Action]) -> None:
    assert list(end(ended(ago_s), KEEP, DONE)[0]) == actions


def test_pods_that_never_began_go_with_the_job_whatever_is_wished() -> None:
    pending = (pod(3, phase="Pending", node="", ip="", started=False), None)
    assert end(ended(1), KEEP, pending) == (
        (DeletePod(pending[0].name, pending[0].uid, "the job has ended"),),
        None,
    )


@pytest.mark.parametrize(
    ("mine", "asked"),
    [
        pytest.param(agent(AgentState.SHUTDOWN), False, id="who leaves already"),
        pytest.param(None, False, id="who was never heard"),
        pytest.param(ready(1), True, id="who is idle"),
    ],
)
def test_an_agent_is_asked_to_leave_once(mine: ObservedAgent | None, asked: bool) -> None:
    actions, wake = end(ended(1), KEEP, (pod(0), mine))
    assert bool(actions) is asked
    assert wake == NOW + seconds(59)


@pytest.mark.parametrize(
    ("mine", "goes"),
    [
        pytest.param((pod(0), running()), True, id="who still runs"),
        pytest.param((pod(0), agent(AgentState.COMPLETED)), False, id="who finished"),
        pytest.param((pod(0), agent(AgentState.SHUTDOWN)), False, id="who is leaving"),
        pytest.param((pod(0, phase="Succeeded"), None), False, id="who has left"),
    ],
)
def test_clean_pod_policy_running_takes_the_unfinished(mine: Seen, goes: bool) -> None:
    actions, _ = end(ended(1), policy(clean_pods=CleanPodPolicy.RUNNING), mine)
    assert any(isinstance(a, DeletePod) for a in actions) is goes


def test_a_deadline_counts_from_when_an_operator_accepted_the_job() -> None:
    """That is on record: another operator saw the job later, and the API server's clock is nobody's."""
    wishes = policy(active_deadline=seconds(100))
    first = plan(observed(job(None, wishes, created_at=NOW - seconds(30)))).record
    assert first.accepted_at == NOW - seconds(30)
    look = observed(job(first, wishes, created_at=NOW + seconds(60)))
    assert next_deadline(look, first, granted(look)) == NOW + seconds(70)
    assert plan(look).record.accepted_at == first.accepted_at


# ---- a ceiling of 0 is none


def scaled(before: int, now: int) -> tuple[int, list[str]]:
    """Give the ceiling on record and the Events after spec.replicas changed."""
    members = [(pod(n), running()) for n in range(2)]
    todo = plan(observed(job(trains(2, ceiling=before), policy(2, 2, ceiling=now)), members))
    return todo.record.ceiling, [note.message for note in todo.events if note.reason == "ScaledToZero"]


def test_who_scales_a_job_to_nothing_is_told_once_what_that_means() -> None:
    ceiling, (message,) = scaled(4, 0)
    assert ceiling == 0, "so the next decision does not tell it again"
    assert "from 4 to 0" in message
    assert "spec.runPolicy.suspend" in message


@pytest.mark.parametrize(("before", "now"), [(0, 0), (0, 4), (4, 4), (4, 2)])
def test_other_ceilings_are_only_noted(before: int, now: int) -> None:
    assert scaled(before, now) == (now, [])


def test_the_ceiling_is_on_record() -> None:
    assert decode(encode(trains(2, ceiling=7))).ceiling == 7
