"""Which deadline is told and when the next one wakes; the last minute of pods, jobs and their time to live (16, 28, 29)."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from tests.unit.core.builders import (
    NOW,
    Seen,
    acts,
    agent,
    granted,
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

from elastipod_operator.api.models import CleanPodPolicy
from elastipod_operator.core.actions import Action, DeletePod, ListPods, SetFinalizer, ShutDownAgent, StopWorkers
from elastipod_operator.core.deadlines import Deadline, next_deadline, overdue
from elastipod_operator.core.ending import deletion_notes, plan_deletion, plan_end
from elastipod_operator.core.grant import grant_all
from elastipod_operator.core.health import assess
from elastipod_operator.core.plan import plan
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import Record, TransitionKind
from elastipod_operator.core.record_codec import decode, encode
from elastipod_operator.core.snapshot import AgentState, ObservedAgent, ObservedNode, Policy, Snapshot

ACCEPTED = NOW - seconds(100)
FAULT = trains(transition=transition(TransitionKind.RECOVERY), fault_at=NOW - seconds(40))
ALL: dict[str, Any] = {"active_deadline": seconds(150), "startup_deadline": seconds(130), "fault_deadline": seconds(60)}


def snapshot(record: Record, wishes: Policy | None = None, *pods: Seen, **changes: Any) -> Snapshot:
    return observed(job(record, wishes, created_at=ACCEPTED, **changes), pods)


# ---- deadlines


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


# ---- the end


def ended(ago_s: float) -> Record:
    return trains(outcome="Completed", outcome_reason="Completed", ended_at=NOW - seconds(ago_s))


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


# ---- the deletion


def delete(
    ago_s: float, *pods: Seen, drain: bool = False, **changes: Any
) -> tuple[tuple[Action, ...], datetime | None]:
    look = snapshot(trains(), policy(), *pods, deleting_since=NOW - seconds(ago_s), drain_on_delete=drain, **changes)
    record, actions, wake = plan_deletion(look, trains(), assess(look))
    assert record == trains()
    return actions, wake


RUN = [(pod(0), running()), (pod(1), running())]


def test_a_deletion_asks_nobody_for_a_checkpoint() -> None:
    actions, wake = delete(2, *RUN)
    assert [a for a in actions if isinstance(a, DeletePod)] == [
        DeletePod(pod(n).name, pod(n).uid, "the job is deleted") for n in range(2)
    ]
    assert not [a for a in actions if isinstance(a, StopWorkers)]
    assert wake == NOW + seconds(28)


@pytest.mark.parametrize(
    ("ago_s", "drain", "is_over", "wait_s"),
    [
        pytest.param(29.9, False, False, 0.1, id="kubelets have half a minute"),
        pytest.param(30, False, True, 5, id="and no more"),
        pytest.param(629.9, True, False, 0.1, id="after the time for a checkpoint, where it was wished for"),
        pytest.param(630, True, True, 5, id="then too"),
    ],
)
def test_what_is_left_of_a_deleted_job_is_ended_at_once(
    ago_s: float, drain: bool, is_over: bool, wait_s: float
) -> None:
    """By its kubelet, which answers; by force only what has ended."""
    actions, wake = delete(ago_s, (pod(0), silent(99)), (pod(1, phase="Failed"), None), drain=drain)
    assert [(a.name, a.force, a.grace_s) for a in actions if isinstance(a, DeletePod)] == [
        (pod(0).name, False, 1 if is_over else None), (pod(1).name, is_over, None),
    ]  # fmt: skip
    assert wake == NOW + seconds(wait_s)


@pytest.mark.parametrize(
    ("node", "force"),
    [
        pytest.param({}, False, id="a kubelet that answers"),
        pytest.param({"cordoned": True}, False, id="a cordoned node"),
        pytest.param({"disruption": "taint spot:NoSchedule"}, False, id="a node that is to go"),
        pytest.param({"ready": False, "not_ready_since": NOW - seconds(600)}, False, id="a node that may come back"),
        pytest.param({"ready": False, "not_ready_since": NOW - seconds(601)}, True, id="not ready for longer than a drain"),
        pytest.param({"ready": False, "out_of_service": True}, True, id="out of service"),
        pytest.param(None, True, id="a node that was deleted"),
    ],
)  # fmt: skip
def test_only_what_is_gone_goes_by_force(node: dict[str, Any] | None, force: bool) -> None:
    """Only what is gone is deleted by force, however long the deletion takes."""
    look = snapshot(trains(), policy(), (pod(0), silent(99)), deleting_since=NOW - seconds(3000))
    nodes = {} if node is None else {"node-0": ObservedNode(name="node-0", **node)}
    look = replace(look, nodes=nodes)
    _, actions, _ = plan_deletion(look, trains(), assess(look))
    assert [(a.force, a.grace_s) for a in actions if isinstance(a, DeletePod)] == [(force, None if force else 1)]


@pytest.mark.parametrize(
    ("left_s", "asked"),
    [
        pytest.param(600, True, id="its deletion gives it minutes"),
        pytest.param(1.5, True, id="a little longer than the least"),
        pytest.param(1, False, id="it is killed right now"),
        pytest.param(-60, False, id="it should be dead; asking again does not help"),
    ],
)
def test_a_kubelet_is_hurried_once(left_s: float, asked: bool) -> None:
    actions, wake = delete(40, (pod(0, kill_at=NOW + seconds(left_s)), silent(99)))
    assert bool(actions) is asked
    assert wake == NOW + seconds(5)


@pytest.mark.parametrize(
    ("ago_s", "mine", "node", "words"),
    [
        pytest.param(59.9, (pod(0), silent(99)), {}, "", id="not yet"),
        pytest.param(60, (pod(0), silent(99)), {}, "pod job-workers-0 on node node-0 should have ended, but its kubelet has not ended it",
                     id="a kubelet that does not"),
        pytest.param(60, (pod(0), silent(99)), {"ready": False, "not_ready_since": NOW}, "its node is not ready", id="a node that is away"),
        pytest.param(60, (pod(0, phase="Failed"), None), {}, "", id="what has ended holds nothing up"),
    ],
)  # fmt: skip
def test_what_holds_a_deletion_up_is_told(ago_s: float, mine: Seen, node: dict[str, Any], words: str) -> None:
    look = snapshot(trains(), policy(), mine, deleting_since=NOW - seconds(ago_s))
    todo = plan(replace(look, nodes={"node-0": ObservedNode(name="node-0", **node)}))
    told = [c.message for c in todo.conditions if c.reason == "PodsNotDeleted"]
    assert [words in text for text in told] == [True] * bool(words)


@pytest.mark.parametrize(("ago_s", "calls"), [(29, []), (30, [True])])
def test_an_ended_pod_whose_kubelet_died_before_its_object_went(ago_s: float, calls: list[bool]) -> None:
    """Its deletion is under way and would be for ever; the job must not stay because of it."""
    actions, _ = delete(ago_s, (pod(0, phase="Failed", kill_at=NOW), None))
    assert [a.force for a in actions if isinstance(a, DeletePod)] == calls


def test_drain_on_delete_gives_the_time_that_is_left_since_the_deletion() -> None:
    drains = [(pod(0), running()), (pod(1), agent(AgentState.STOPPING)), (pod(2, disruption="x"), running())]
    actions, wake = delete(200, *drains, drain=True)
    assert actions == tuple(StopWorkers(pod(n).name, 1, graceful=True, timeout_s=400) for n in (0, 2))
    assert wake == NOW + seconds(400)
    assert delete(599.5, (pod(0), running()), drain=True)[0] == (
        StopWorkers(pod(0).name, 1, graceful=True, timeout_s=1),
    )
    assert not [a for a in delete(600, (pod(0), running()), drain=True)[0] if isinstance(a, StopWorkers)]


def test_nobody_is_waited_for_who_cannot_answer() -> None:
    actions, _ = delete(2, (pod(0), silent(60)), drain=True)
    assert [type(a) for a in actions] == [DeletePod]


def test_the_finalizer_goes_with_the_last_pod() -> None:
    assert delete(2) == ((SetFinalizer(False),), None)
    assert delete(2, drain=True) == ((SetFinalizer(False),), None)


def test_a_job_that_cannot_be_read_has_no_time_for_checkpoints() -> None:
    fact = replace(job(trains(), deleting_since=NOW, drain_on_delete=True), policy=None, spec_error="no")
    look = observed(fact, RUN)
    _, actions, wake = plan_deletion(look, trains(), assess(look))
    assert len([a for a in actions if isinstance(a, DeletePod)]) == 2
    assert wake == NOW + seconds(30)


@pytest.mark.parametrize(
    ("listed_ago_s", "pods", "is_listed"),
    [
        pytest.param(29, RUN, False, id="what the watch tells is believed for a while"),
        pytest.param(30, RUN, True, id="then the API server is asked"),
        pytest.param(500, [], False, id="not where there is nobody to ask about"),
    ],
)
def test_an_end_that_the_watch_missed_holds_no_deletion_up(
    listed_ago_s: float, pods: list[Seen], is_listed: bool
) -> None:
    fact = job(trains(), policy(), created_at=ACCEPTED, deleting_since=NOW - seconds(40))
    todo = plan(observed(fact, pods, pods_listed_at=NOW - seconds(listed_ago_s)))
    assert (ListPods() in todo.actions) is is_listed
    if pods:
        assert todo.wake_at == NOW + seconds(1)


@pytest.mark.parametrize(("since_s", "is_listed"), [(29, False), (30, True)])
def test_a_deletion_that_has_just_begun_has_missed_nothing(since_s: float, is_listed: bool) -> None:
    fact = job(trains(), policy(), created_at=ACCEPTED, deleting_since=NOW - seconds(since_s))
    todo = plan(observed(fact, RUN, pods_listed_at=NOW - seconds(500)))
    assert (ListPods() in todo.actions) is is_listed


def test_a_record_that_is_lost_while_workers_run_brings_no_late_start() -> None:
    wishes = policy(startup_deadline=seconds(20))
    lost = plan(observed(job(None, wishes, created_at=ACCEPTED), RUN))
    assert (lost.record.outcome, lost.record.started_at) == ("", NOW)
    never = plan(observed(job(None, wishes, created_at=ACCEPTED), [(pod(0), ready(generation=None))]))
    assert (never.record.outcome, never.record.outcome_reason) == ("Failed", "StartupDeadlineExceeded")


# ---- Events of deletions that nobody would expect


def deletion(name: str, why: str = "lost", *, force: bool = False) -> DeletePod:
    return DeletePod(name, f"uid-{name}", why, force)


def test_pods_that_are_removed_by_force_are_told_in_one_event() -> None:
    (note,) = deletion_notes([deletion(f"job-workers-{n}", force=True) for n in range(5)] + [deletion("other")])
    assert (note.reason, note.warning) == ("PodForceDeleted", True)
    assert "pods job-workers-0, job-workers-1, job-workers-2 and 2 more (lost)" in note.message


def test_a_pod_whose_sidecar_runs_on_is_told_when_it_is_deleted() -> None:
    ended = trains(2, outcome="Completed", ended_at=NOW - seconds(60))
    wishes = policy(2, 2, clean_pods=CleanPodPolicy.NONE)
    todo = plan(observed(job(ended, wishes), [(pod(0), agent(AgentState.SHUTDOWN)), (pod(1, phase="Succeeded"), None)]))
    (note,) = deletion_notes(acts(todo, DeletePod))
    assert note.reason == "SidecarStillRuns"
    assert "pod job-workers-0 deleted" in note.message


def test_ordinary_deletions_are_no_events() -> None:
    assert deletion_notes([deletion("job-workers-0", "no longer wanted at this size"), deletion("b")]) == ()


def test_a_job_that_is_kept_although_its_time_to_live_is_zero_says_what_that_means() -> None:
    told = {}
    for is_zero in (True, False):
        done = [(pod(n), agent(AgentState.COMPLETED)) for n in range(2)]
        todo = plan(observed(job(trains(2), policy(2, 2, is_ttl_zero=is_zero)), done))
        assert todo.record.outcome == "Completed"
        told[is_zero] = [note.reason for note in todo.events]
    assert (told[True], told[False]) == (["Completed", "JobKept"], ["Completed"])


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
