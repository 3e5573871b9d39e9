"""Deadlines, the end of a job, its clean-up and its deletion."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    acts,
    agent,
    job,
    observed,
    pid,
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
from elastipod_operator.core.actions import CreatePod, DeleteJob, DeletePod, SetFinalizer, ShutDownAgent, StopWorkers
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Depth, NextGeneration, Record, TransitionKind
from elastipod_operator.core.snapshot import (
    AgentState,
    ContainerState,
    ObservedAgent,
    ObservedContainer,
    ObservedNode,
    ObservedPod,
    Policy,
)

RUN = [(pod(0), running()), (pod(1), running())]


@pytest.mark.parametrize(
    ("record", "wishes", "reason"),
    [
        pytest.param(
            trains(), policy(active_deadline=seconds(100)), "DeadlineExceeded", id="active: since the job was accepted"
        ),
        pytest.param(trains(), policy(active_deadline=seconds(101)), "", id="not yet"),
        pytest.param(
            trains(suspended_time=seconds(1)),
            policy(active_deadline=seconds(100)),
            "",
            id="the time that it was suspended does not count",
        ),
        pytest.param(
            Record(transition=transition(TransitionKind.START, began_s=60)),
            policy(startup_deadline=seconds(100)),
            "StartupDeadlineExceeded",
            id="startup",
        ),
        pytest.param(
            Record(transition=transition(TransitionKind.START, began_s=60), first_pod_at=NOW - seconds(100)),
            policy(startup_deadline=seconds(101)),
            "",
            id="startup: not yet",
        ),
        pytest.param(
            trains(started_at=None, running_since=None),
            policy(startup_deadline=seconds(100)),
            "StartupDeadlineExceeded",
            id="startup: until all run, however often the first start is tried",
        ),
        pytest.param(
            trains(transition=transition(TransitionKind.START, began_s=60), started_at=LONG_AGO),
            policy(startup_deadline=seconds(60)),
            "",
            id="not when it ran before",
        ),
        pytest.param(
            trains(transition=transition(TransitionKind.RECOVERY), fault_at=NOW - seconds(50)),
            policy(fault_deadline=seconds(50)),
            "FaultDeadlineExceeded",
            id="fault",
        ),
        pytest.param(
            trains(running_since=None, fault_at=NOW - seconds(50)),
            policy(fault_deadline=seconds(50)),
            "FaultDeadlineExceeded",
            id="fault: until all run again",
        ),
        pytest.param(
            trains(transition=transition(TransitionKind.SUSPEND), started_at=LONG_AGO),
            policy(active_deadline=seconds(1), suspend=True),
            "",
            id="none while suspended",
        ),
    ],
)
def test_deadlines(record: Record, wishes: Policy, reason: str) -> None:
    todo = plan(observed(job(record, wishes, created_at=NOW - seconds(100)), RUN))
    assert todo.record.outcome_reason == reason
    assert (todo.record.outcome == "Failed") is bool(reason)
    if reason:
        assert "spec.runPolicy." in todo.record.outcome_message
        assert [n.reason for n in todo.events] == ["Failed"]


def test_the_start_of_a_job_whose_pods_could_not_be_made_has_all_its_time_yet() -> None:
    """The operator was away, or a quota refused them: the time begins with the first pods, and anew after a suspension."""
    wishes = policy(startup_deadline=seconds(30))
    first = plan(observed(job(None, wishes, created_at=LONG_AGO)))
    assert (first.record.outcome, first.record.first_pod_at) == ("", None)
    came = NOW - seconds(29)
    pods = [(pod(n, started=False, ip="", created_at=came), None) for n in range(2)]
    waits = plan(observed(job(first.record, wishes, created_at=LONG_AGO), pods))
    assert (waits.record.outcome, waits.record.first_pod_at) == ("", came)
    assert (
        plan(observed(job(waits.record, policy(suspend=True), created_at=LONG_AGO), pods)).record.first_pod_at is None
    )
    late = replace(waits.record, first_pod_at=came - seconds(1))
    assert (
        plan(observed(job(late, wishes, created_at=LONG_AGO), pods)).record.outcome_reason == "StartupDeadlineExceeded"
    )


def test_the_next_deadline_wakes() -> None:
    todo = plan(
        observed(
            job(trains(4), policy(active_deadline=seconds(9)), created_at=NOW), [(pod(n), running()) for n in range(4)]
        )
    )
    assert todo.wake_at == NOW + seconds(9)


COMPLETED = trains(outcome="Completed", outcome_reason="Completed", ended_at=NOW - seconds(5))
FAILED = replace(COMPLETED, outcome="Failed")
SLOW_SIDECAR = replace(COMPLETED, ended_at=NOW - seconds(61))
DONE = agent(AgentState.COMPLETED)
ENDED = pod(0, phase="Succeeded")
# What the kubelet reports first: the container has ended, and the phase follows a moment later.
LEFT = pod(0, started=False, container=ObservedContainer(ContainerState.TERMINATED, 0), containers_ended=True)
LEFT_SIDECAR = replace(LEFT, containers_ended=False)


@pytest.mark.parametrize(
    ("record", "clean", "first", "mine", "shut", "deleted"),
    [
        pytest.param(COMPLETED, CleanPodPolicy.ALL, pod(0), DONE, True, True, id="All: agents leave, pods go"),
        pytest.param(COMPLETED, CleanPodPolicy.ALL, ENDED, None, False, True, id="All: ended pods go too"),
        pytest.param(COMPLETED, CleanPodPolicy.NONE, pod(0), DONE, True, False, id="None: agents leave, pods stay"),
        pytest.param(COMPLETED, CleanPodPolicy.NONE, ENDED, None, False, False, id="None: ended pods stay"),
        pytest.param(COMPLETED, CleanPodPolicy.NONE, pod(0, started=False, ip=""), None, False, True, id="None: who never began goes"),
        pytest.param(COMPLETED, CleanPodPolicy.NONE, pod(0), None, False, False, id="None: an agent not heard yet is waited for"),
        pytest.param(COMPLETED, CleanPodPolicy.RUNNING, pod(0), DONE, True, False, id="Running: who completed stays"),
        pytest.param(FAILED, CleanPodPolicy.RUNNING, pod(0), running(), True, True, id="Running: the unfinished go"),
        pytest.param(COMPLETED, CleanPodPolicy.ONLY_COMPLETE, pod(0), DONE, True, True, id="OnlyComplete: completed pods go"),
        pytest.param(FAILED, CleanPodPolicy.ONLY_COMPLETE, pod(0), running(), True, False, id="OnlyComplete: failed ones stay"),
        pytest.param(COMPLETED, CleanPodPolicy.NONE, LEFT, None, False, False, id="None: whose container has ended stays"),
        pytest.param(COMPLETED, CleanPodPolicy.NONE, LEFT, DONE, False, False, id="None: nobody calls an agent that has ended"),
        pytest.param(FAILED, CleanPodPolicy.NONE, LEFT, None, False, False, id="None: also where the job failed"),
        pytest.param(COMPLETED, CleanPodPolicy.RUNNING, LEFT, None, False, False, id="Running: whose container has ended stays"),
        pytest.param(FAILED, CleanPodPolicy.RUNNING, LEFT, None, False, False, id="Running: also where the job failed"),
        pytest.param(COMPLETED, CleanPodPolicy.RUNNING, pod(0), None, False, False,
                     id="Running: a replica of a completed job has finished, though a new operator has not heard its agent"),
        pytest.param(FAILED, CleanPodPolicy.ONLY_COMPLETE, LEFT, None, False, False, id="OnlyComplete: failed ones stay"),
        pytest.param(COMPLETED, CleanPodPolicy.ALL, LEFT, None, False, True, id="All: also whose container has ended goes"),
        pytest.param(SLOW_SIDECAR, CleanPodPolicy.NONE, LEFT, None, False, False, id="a slow kubelet costs no pod"),
        pytest.param(COMPLETED, CleanPodPolicy.NONE, LEFT_SIDECAR, None, False, False, id="a sidecar has a minute to end"),
        pytest.param(SLOW_SIDECAR, CleanPodPolicy.NONE, LEFT_SIDECAR, None, False, True, id="a sidecar alone is ended after a minute"),
        pytest.param(SLOW_SIDECAR, CleanPodPolicy.NONE, pod(0), agent(AgentState.SHUTDOWN), False, True,
                     id="a sidecar that still runs after a minute is ended"),
    ],
)  # fmt: skip
def test_what_becomes_of_a_pod_at_the_end(
    record: Record, clean: CleanPodPolicy, first: ObservedPod, mine: ObservedAgent | None, shut: bool, deleted: bool
) -> None:
    todo = plan(observed(job(record, policy(clean_pods=clean)), [(first, mine)]))
    assert bool(acts(todo, ShutDownAgent)) is shut
    assert bool(acts(todo, DeletePod)) is deleted
    assert not acts(todo, CreatePod)
    assert replace(todo.record, phase_times=record.phase_times) == record


def test_pods_of_an_ended_job_whose_spec_cannot_be_read_any_more_are_left() -> None:
    unreadable = replace(job(COMPLETED), policy=None, spec_error="no")
    todo = plan(observed(unreadable, [(pod(1), DONE), (ENDED, None)]))
    assert not acts(todo, DeletePod)
    assert len(acts(todo, ShutDownAgent)) == 1, "the accelerator is free all the same"


@pytest.mark.parametrize(
    ("ttl_s", "deletes"),
    [pytest.param(5, True, id="over"), pytest.param(6, False, id="not yet"), pytest.param(None, False, id="never")],
)
def test_the_time_to_live_after_the_end(ttl_s: float | None, deletes: bool) -> None:
    ttl = seconds(ttl_s) if ttl_s is not None else None
    todo = plan(observed(job(COMPLETED, policy(ttl=ttl))))
    assert (todo.actions == (DeleteJob(),)) is deletes


def test_the_end_is_quiet_once_the_pods_have_ended() -> None:
    todo = plan(
        observed(
            job(COMPLETED, policy(clean_pods=CleanPodPolicy.NONE)), [(ENDED, None), (pod(1, phase="Failed"), None)]
        )
    )
    assert (todo.actions, todo.wake_at) == ((), None)


DELETED: dict[str, Any] = {"deleting_since": NOW - seconds(2)}


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(None, id="before it was ever seen"),
        pytest.param(Record(transition=transition(TransitionKind.START)), id="while it starts"),
        pytest.param(trains(), id="while it trains"),
        pytest.param(trains(transition=transition()), id="in a drain"),
        pytest.param(trains(transition=transition(TransitionKind.RECOVERY)), id="in a recovery"),
        pytest.param(trains(transition=transition(TransitionKind.SUSPEND), members=()), id="while it is suspended"),
        pytest.param(COMPLETED, id="after its end"),
    ],
)
def test_a_deletion_takes_all_pods_then_the_finalizer(record: Record | None) -> None:
    first = plan(observed(job(record, **DELETED), RUN))
    assert [a.name for a in acts(first, DeletePod)] == [pod(0).name, pod(1).name]
    assert len(acts(first, ShutDownAgent)) == 2
    assert not acts(first, CreatePod)
    last = plan(observed(job(record, **DELETED)))
    assert last.actions == (SetFinalizer(False),)


def test_a_deletion_ends_what_is_left_after_half_a_minute() -> None:
    """Kubelets that answer do that; nothing on a healthy node is removed by force."""
    late = job(trains(), deleting_since=NOW - seconds(31))
    todo = plan(observed(late, [(pod(0, kill_at=NOW + seconds(600)), silent(99)), (pod(1), running())]))
    assert [(a.force, a.grace_s) for a in acts(todo, DeletePod)] == [(False, 1), (False, 1)]


def test_a_deletion_of_a_job_whose_spec_cannot_be_used() -> None:
    todo = plan(observed(replace(job(trains(), **DELETED), policy=None), RUN))
    assert len(acts(todo, DeletePod)) == 2


@pytest.mark.parametrize(
    ("since_s", "states", "asked", "deleted"),
    [
        pytest.param(2, (AgentState.RUNNING, AgentState.RUNNING), 2, 0, id="all are asked"),
        pytest.param(2, (AgentState.STOPPING, AgentState.STOPPING), 0, 0, id="who drains is waited for"),
        pytest.param(2, (AgentState.READY, AgentState.READY), 0, 2, id="then the pods go"),
        pytest.param(601, (AgentState.STOPPING, AgentState.RUNNING), 0, 2, id="or when the time is over"),
    ],
)
def test_drain_on_delete_takes_a_checkpoint_first(
    since_s: float, states: tuple[AgentState, AgentState], asked: int, deleted: int
) -> None:
    leaving = job(trains(), deleting_since=NOW - seconds(since_s), drain_on_delete=True)
    todo = plan(observed(leaving, [(pod(n), agent(states[n])) for n in range(2)]))
    assert len([a for a in acts(todo, StopWorkers) if a.graceful]) == asked
    assert len(acts(todo, DeletePod)) == deleted


def test_drain_on_delete_stops_what_agents_have_begun_by_themselves_or_will() -> None:
    following = NextGeneration(generation=2, members=(pid(0), pid(1)), master_addr="10.0.0.0", agents_serve_store=False)
    record = replace(trains(), transition=transition(depth=Depth.MEMORY, leavers=(), next_generation=following))
    leaving = job(record, deleting_since=NOW - seconds(2), drain_on_delete=True)
    begun, told = running(2), agent(AgentState.STOPPING, 1, next_generation=2)
    todo = plan(observed(leaving, [(pod(0), begun), (pod(1), told)]))
    assert [(stop.pod, stop.generation, stop.next_rank) for stop in acts(todo, StopWorkers)] == [
        ("job-workers-0", 2, None), ("job-workers-1", 1, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("first", "node", "force"),
    [
        pytest.param(pod(0, kill_at=NOW), ObservedNode(name="node-0", ready=False, not_ready_since=LONG_AGO), [True],
                     id="its node is dead: forced"),
        pytest.param(pod(0, kill_at=NOW), ObservedNode(name="node-0"), [], id="its kubelet is at it"),
        pytest.param(pod(0, phase="Failed", kill_at=NOW), ObservedNode(name="node-0"), [], id="also when it has ended"),
        pytest.param(pod(0, phase="Failed"), ObservedNode(name="node-0"), [False], id="nobody deleted it yet"),
    ],
)  # fmt: skip
def test_a_pod_whose_deletion_is_under_way(first: ObservedPod, node: ObservedNode, force: list[bool]) -> None:
    suspended = trains(members=(), transition=transition(TransitionKind.SUSPEND))
    todo = plan(observed(job(suspended, policy(suspend=True)), [(first, silent(2000))], [node]))
    assert [a.force for a in acts(todo, DeletePod)] == force


def test_a_lost_pod_is_not_called_any_more() -> None:
    lost = ObservedNode(name="node-0", ready=False, not_ready_since=LONG_AGO)
    todo = plan(observed(job(trains(lost=(pid(0),))), [(pod(0), silent(2000)), (pod(1), ready(1))], [lost]))
    assert [a.name for a in acts(todo, DeletePod)] == [pod(0).name]
    assert acts(todo, ShutDownAgent) == []
