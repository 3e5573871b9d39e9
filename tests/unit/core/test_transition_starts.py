"""The start of the next generation: what it notes, tells and waits for."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    acts,
    agent,
    faulted,
    job,
    observed,
    pid,
    pod,
    policy,
    ready,
    seconds,
    trains,
    transition,
)
from tests.unit.core.transition_builders import DRAINED, GROWTH, step_of, stopped

from elastipod_operator.core.actions import DeletePod, JobEvent, ShutDownAgent, StartWorkers
from elastipod_operator.core.history import HistoryEntry
from elastipod_operator.core.plan import plan
from elastipod_operator.core.reasons import OpenReason, Reason
from elastipod_operator.core.record import Depth, FaultyReplica, NodeFaults, PartialGang, TransitionKind
from elastipod_operator.core.snapshot import AgentState


@pytest.mark.parametrize(
    ("began", "reason", "resize_began_at"),
    [
        pytest.param(
            transition(TransitionKind.START, began_s=9, target_size=2, from_size=0), "Started", None, id="a start"
        ),
        pytest.param(
            transition(began_s=9, target_size=2, from_size=3),
            "Resized",
            NOW - seconds(9),
            id="a resize, whose pause is measured",
        ),
        pytest.param(
            transition(TransitionKind.RECOVERY, began_s=9, target_size=2, from_size=2, is_budget_checked=True),
            "Recovered",
            None,
            id="a recovery",
        ),
    ],
)
def test_what_a_start_notes(began: Any, reason: Reason, resize_began_at: datetime | None) -> None:
    began = replace(began, detected_at=NOW - seconds(11))
    record = trains(
        generation=4,
        transition=began,
        window_since=LONG_AGO,
        gang=PartialGang(NOW, 1),
        resize_began_at=LONG_AGO,
        size_before_growth=1,
    )
    pods = [(pod(n, ip=f"10.1.0.{n}"), ready(4)) for n in range(2)]
    step = step_of(observed(job(record), pods))
    after = step.record
    assert (after.generation, after.members, after.master_addr) == (5, (pid(0), pid(1)), "10.1.0.0")
    assert (after.transition, after.window_since, after.running_since, after.gang) == (None, None, None, None)
    assert (after.size_before_growth, after.resize_began_at) == (0, resize_began_at)
    assert step.actions == (StartWorkers(pod(0).name, 0), StartWorkers(pod(1).name, 1))
    why = " (Test)" if reason == "Resized" else ": a test"  # that a resize begins was told before, at length
    assert step.events == (JobEvent(reason, f"{began.from_size} -> 2 replicas, generation 5{why}"),)
    assert step.history == (
        HistoryEntry(
            generation=5, from_size=began.from_size, to_size=2, kind=began.kind, cause=OpenReason("Test"), at=NOW,
            detected_at=NOW - seconds(11), depth=None if began.kind is TransitionKind.START else Depth.PROCESS,
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("can", "secrets", "before", "after"),
    [
        pytest.param((True, True), ("key", "key"), False, True, id="all can"),
        pytest.param((True, True), ("", ""), False, True, id="all can, without authentication"),
        pytest.param((True, False), ("key", "key"), True, False, id="one is of an earlier version"),
        pytest.param((True, True), ("key", "other"), True, False, id="two would not know each other"),
        pytest.param((True, True), ("key", ""), True, False, id="authentication was turned off between them"),
    ],
)
def test_an_agent_serves_the_store_where_all_members_can_use_it(
    can: tuple[bool, ...], secrets: tuple[str, ...], before: bool, after: bool
) -> None:
    record = trains(transition=transition(target_size=2, from_size=2), agents_serve_store=before)
    pods = [(pod(n, key_secret=secrets[n]), ready(1, can_serve_store=can[n])) for n in range(2)]
    assert step_of(observed(job(record), pods)).record.agents_serve_store is after


@pytest.mark.parametrize(
    ("cause", "from_size", "number", "size_before_growth", "failures"),
    [
        pytest.param(GROWTH, 2, 3, 2, 0, id="a growth is one until it runs"),
        pytest.param(GROWTH, 2, 2, 0, 1, id="one that finds nobody has failed"),
        pytest.param(GROWTH, 3, 2, 0, 1, id="one that loses somebody too"),
        pytest.param("PodDisrupted", 2, 3, 0, 0, id="what grows by chance is none"),
        pytest.param("PodDisrupted", 3, 2, 0, 0, id="nor is a shrink a failure"),
    ],
)
def test_what_a_growth_came_to(cause: str, from_size: int, number: int, size_before_growth: int, failures: int) -> None:
    record = trains(transition=transition(cause=cause, target_size=3, from_size=from_size))
    after = step_of(observed(job(record), stopped(number))).record
    assert (after.size_before_growth, after.resize_failures) == (size_before_growth, failures)
    assert (after.resize_failed_at is not None) is bool(failures)


@pytest.mark.parametrize(
    ("before", "kind", "from_size", "number", "after"),
    [
        pytest.param(False, TransitionKind.RECOVERY, 3, 2, True, id="a recovery with fewer"),
        pytest.param(False, TransitionKind.RECOVERY, 2, 2, False, id="not one with as many"),
        pytest.param(True, TransitionKind.RECOVERY, 2, 2, True, id="which changes nothing"),
        pytest.param(True, TransitionKind.RESIZE, 2, 3, False, id="until the size is another one"),
        pytest.param(False, TransitionKind.RESIZE, 3, 2, False, id="what somebody wished was no fault"),
    ],
)
def test_a_shrink_after_a_fault_is_remembered(
    before: bool, kind: TransitionKind, from_size: int, number: int, after: bool
) -> None:
    began = transition(kind, began_s=40, target_size=2, from_size=from_size, is_budget_checked=True)
    record = trains(shrank_after_fault=before, transition=began)
    assert step_of(observed(job(record), stopped(number))).record.shrank_after_fault is after


def test_a_job_that_ends_in_a_recovery_tells_of_the_node_first() -> None:
    began = transition(TransitionKind.RECOVERY, cause="WorkerCrash", uses_budget=True)
    record = trains(
        retries=1,
        transition=began,
        faulty_replicas=(FaultyReplica(pid(0), 0, "node-0"),),
        node_faults=(NodeFaults("node-0", 1, NOW),),
    )
    wishes = policy(2, 2, max_retries=0, max_offenders=1, eval_period=seconds(600))
    step = step_of(observed(job(record, wishes), stopped(2, ready(1))))
    assert (step.record.outcome, step.record.outcome_reason) == ("Failed", "WorkerCrash")
    assert step.record.outcome_message == "a test; spec.runPolicy.jobMaxRetryCount 0 is used up"
    assert [n.reason for n in step.events] == ["NodeAvoided", "Failed"]


def test_a_pod_leaves_the_node_on_which_it_failed_again_and_the_others_stay() -> None:
    began = transition(TransitionKind.RECOVERY, cause="WorkerCrash", uses_budget=True)
    record = trains(
        transition=began,
        faulty_replicas=(FaultyReplica(pid(0), 0, "node-0"),),
        node_faults=(NodeFaults("node-0", 1, NOW),),
    )
    wishes = policy(2, 2, max_offenders=1, eval_period=seconds(600))
    step = step_of(observed(job(record, wishes), stopped(2, ready(1))))
    assert [n.reason for n in step.events] == ["NodeAvoided", "FailedPodsRecreated"]
    assert step.events[1].message == "its node is to be avoided: job-workers-0 is recreated"
    assert [type(a).__name__ for a in step.actions] == ["ShutDownAgent", "DeletePod"]
    assert step.record.lost == (pid(0),)
    assert step.record.transition is not None, "nobody starts before that is on record"
    known = step_of(observed(job(replace(record, node_faults=()), wishes), stopped(2, ready(1))))
    assert [n.reason for n in known.events] == ["Recovered"], "one fault is no repetition"


def test_who_is_given_up_in_a_full_restart_is_on_record_before_anything_else_happens() -> None:
    began = transition(TransitionKind.RECOVERY, uses_budget=True)
    wishes = policy(2, 2, restarts_before_full=0)
    record = trains(transition=began, window=replace(trains().window, restarts=1, since=NOW))
    step = step_of(observed(job(record, wishes), stopped(2, ready(1))))
    assert (step.wake_at, step.record.lost) == (NOW, (pid(0), pid(1)))
    assert {type(a) for a in step.actions} == {DeletePod, ShutDownAgent}
    assert [n.reason for n in step.events] == ["FullJobRestart"]


def test_once_all_are_stopped_nothing_can_break_the_drain_any_more() -> None:
    record = trains(3, transition=transition(target_size=3))
    step = step_of(observed(job(record, policy(3, 3)), stopped(2)))
    assert step.record.transition is not None
    assert not step.record.transition.graceful
    again = plan(observed(job(step.record, policy(3, 3)), [(pod(0), faulted(1)), (pod(1), DRAINED)]))
    assert again.record.restarts == 0
    assert again.record.transition is not None
    assert again.record.transition.kind is TransitionKind.RESIZE


def test_a_drain_waits_while_one_still_stops() -> None:
    record = trains(transition=transition(began_s=1))
    step = step_of(observed(job(record), [(pod(0), DRAINED), (pod(1), agent(AgentState.STOPPING))]))
    assert not acts(
        plan(observed(job(record), [(pod(0), DRAINED), (pod(1), agent(AgentState.STOPPING))])), StartWorkers
    )
    assert step.record == record
    assert step.wake_at == record.transition.deadline + timedelta(seconds=15)  # type: ignore[union-attr]
