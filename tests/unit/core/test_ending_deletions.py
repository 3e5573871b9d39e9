"""What a deleted job still does: its workers, pods, finalizer and Events."""

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
    job,
    observed,
    pod,
    policy,
    ready,
    running,
    seconds,
    silent,
    trains,
)
from tests.unit.core.ending_builders import ACCEPTED, snapshot

from elastipod_operator.api.models import CleanPodPolicy
from elastipod_operator.core.actions import Action, DeleteJob, DeletePod, ListPods, SetFinalizer, StopWorkers
from elastipod_operator.core.ending import SIDECAR_RUNS, deletion_notes, plan_deletion
from elastipod_operator.core.health import assess
from elastipod_operator.core.plan import plan
from elastipod_operator.core.snapshot import AgentState, ObservedNode


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
    assert (note.reason, note.is_warning) == ("PodForceDeleted", True)
    assert "pods job-workers-0, job-workers-1, job-workers-2 and 2 more (lost)" in note.message


def test_as_many_deleted_pods_as_fit_are_named() -> None:
    (note,) = deletion_notes([deletion(f"job-workers-{n}", force=True) for n in range(3)])
    assert note.message.startswith("pods job-workers-0, job-workers-1, job-workers-2 (lost)")


def test_every_pod_of_a_job_that_ended_gets_what_it_needs() -> None:
    ended = trains(3, outcome="Failed", ended_at=NOW - seconds(60))
    wishes = policy(3, 3, clean_pods=CleanPodPolicy.NONE, ttl=seconds(60))
    kept, fresh = agent(AgentState.SHUTDOWN), (pod(1, phase="Pending", started=False), None)
    todo = plan(observed(job(ended, wishes), [(pod(0), kept), fresh, (pod(2), kept)]))
    assert [a.name for a in acts(todo, DeletePod)] == [pod(n).name for n in range(3)]
    assert [a.reason for a in acts(todo, DeletePod)] == [SIDECAR_RUNS, "the job has ended", SIDECAR_RUNS]
    assert acts(todo, DeleteJob)


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
