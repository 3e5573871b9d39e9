"""How deep a change of the world goes, and why: memory, process, pod, full job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.nonempty import every
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    Seen,
    acts,
    agent,
    faulted,
    job,
    observed,
    pid,
    pod,
    policy,
    ready,
    replicas_of,
    running,
    seconds,
    silent,
    trains,
    transition,
)

from elastipod_operator.core.actions import DeletePod, StartWorkers, StopWorkers
from elastipod_operator.core.depth import deepened, settled_depth
from elastipod_operator.core.depth_reasons import DepthReason
from elastipod_operator.core.history import HistoryEntry, decode_history, encode_history
from elastipod_operator.core.names import PodId
from elastipod_operator.core.plan import plan
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import Depth, FaultyReplica, Record, RestartMode, RestartWindow, TransitionKind
from elastipod_operator.core.record_codec import decode, encode
from elastipod_operator.core.recovery import count_progress
from elastipod_operator.core.snapshot import AgentState, ObservedAgent, ObservedNode

KEEPS: dict[str, Any] = {"memory_state": "replicated"}
SHARDS: dict[str, Any] = {"memory_state": "sharded"}
NEVER: dict[str, Any] = {}


def kept(num: int = 1, **changes: Any) -> ObservedAgent:
    return ready(1, memory_state="replicated", num_kept=num, drained=True, **changes)


def stops(before: Record, agents: list[ObservedAgent], wishes: Any = None) -> tuple[Record, dict[str, StopWorkers]]:
    """Decide; gives the record and the stops by pod."""
    pods = [(pod(n), one) for n, one in enumerate(agents)]
    todo = plan(observed(job(before, wishes or policy(1, 4)), pods))
    return todo.record, {one.pod: one for one in acts(todo, StopWorkers)}


@pytest.mark.parametrize(
    ("agents", "changes", "depth", "code", "reason"),
    [
        pytest.param([KEEPS, KEEPS], {}, Depth.MEMORY, "WorkersKept", "", id="all keep"),
        pytest.param([NEVER, NEVER], {}, Depth.PROCESS, "NothingKept", "", id="nobody does, and nobody expects it"),
        pytest.param(
            [NEVER, KEEPS], {}, Depth.PROCESS, "MemberKeepsNothing", "the workers of pod job-workers-0 keep nothing in memory",
            id="one not",
        ),
        pytest.param([KEEPS, NEVER], {}, Depth.MEMORY, "WorkersKept", "", id="only one that leaves does not"),
        pytest.param([SHARDS, SHARDS], {}, Depth.MEMORY, "WorkersKept", "", id="it is known who leaves with shards"),
        pytest.param(
            [KEEPS, KEEPS], {"new_processes": True}, Depth.PROCESS, "RecoveryIsProcess", "spec.elastipod.recovery is Process",
            id="the user wants new processes",
        ),
    ],
)  # fmt: skip
def test_a_planned_change_goes_in_memory_where_all_who_stay_keep_their_state(
    agents: list[dict[str, Any]], changes: dict[str, Any], depth: Depth, code: str, reason: str
) -> None:
    wishes = policy(1, 1, **changes)
    record, told = stops(trains(2), [running(1, step=5, **one) for one in agents], wishes)
    assert record.transition is not None
    assert (record.transition.kind, record.transition.depth) == (TransitionKind.RESIZE, depth)
    assert (record.transition.depth_code, record.transition.depth_reason) == (code, reason)
    assert {one.keeps for one in told.values()} == {depth is Depth.MEMORY}
    assert every(one.graceful for one in told.values())


def test_workers_that_still_start_take_nobodys_memory_away_in_a_planned_change() -> None:
    """Their pod was made anew, and they import: they hold nothing, and those who wait for them have no step to end."""
    agents = [running(1, step=5, **KEEPS), running(1), running(1, step=5, **KEEPS)]
    record, told = stops(trains(3), agents, policy(1, 1))
    assert record.transition is not None
    assert (record.transition.kind, record.transition.depth) == (TransitionKind.RESIZE, Depth.MEMORY)
    assert [(one.graceful, one.keeps) for one in told.values()] == [(False, True)] * 3


def test_workers_that_still_start_take_nobodys_memory_away_in_a_recovery() -> None:
    agents = [faulted(step=5, **KEEPS), running(1), running(1, step=5, **KEEPS)]
    record, told = stops(trains(3), agents, policy(1, 4, max_retries=50))
    assert record.transition is not None
    assert (record.transition.kind, record.transition.depth) == (TransitionKind.RECOVERY, Depth.MEMORY)
    assert {one.reach for one in told.values()} == {RestartMode.IN_PROCESS}


def test_when_only_workers_that_still_start_stay_they_are_drained_and_nothing_is_in_memory() -> None:
    agents = [
        (pod(0, disruption="taint x:NoExecute"), running(1, step=5, **KEEPS)),
        (pod(1), running(1)),
    ]
    todo = plan(observed(job(trains(2), policy(1, 2)), agents))
    assert todo.record.transition is not None
    assert todo.record.transition.depth is Depth.PROCESS
    assert todo.record.transition.depth_reason == "the workers of pod job-workers-1 keep nothing in memory"
    assert every(one.graceful for one in acts(todo, StopWorkers))


def test_sharded_state_stays_in_memory_where_it_is_known_who_leaves() -> None:
    """The pod on a node that is drained goes, so its workers give their shards to the others before they stop."""
    agents = [
        (pod(0), running(1, step=5, **SHARDS)),
        (pod(1, disruption="taint x:NoExecute"), running(1, step=5, **SHARDS)),
    ]
    todo = plan(observed(job(trains(2), policy(1, 2)), agents))
    assert todo.record.transition is not None
    assert todo.record.transition.depth is Depth.MEMORY
    told = {one.pod: one.leaves for one in todo.actions if isinstance(one, StopWorkers)}
    assert told == {"job-workers-0": False, "job-workers-1": True}


def test_sharded_state_stays_in_memory_where_nobody_leaves() -> None:
    agents = [(pod(n), running(1, step=5, **SHARDS)) for n in range(2)] + [(pod(2), ready(0))]
    wishes = policy(1, 4, scaling_timeout=seconds(0))
    todo = plan(observed(job(trains(2, window_since=NOW - seconds(1)), wishes), agents))
    assert todo.record.transition is not None
    assert (todo.record.transition.target_size, todo.record.transition.depth) == (3, Depth.MEMORY)


def test_a_suspended_job_leaves_nothing_in_memory() -> None:
    record, told = stops(trains(2), [running(1, step=5, **KEEPS)] * 2, policy(1, 4, suspend=True))
    assert record.transition is not None
    assert (record.transition.depth, record.transition.depth_reason) == (Depth.PROCESS, "the job is suspended")
    assert record.transition.depth_code == "JobSuspended"
    assert not any(one.keeps for one in told.values())


def crash(
    failures: int = 0, wishes: Any = None, step: int = 7, **changes: Any
) -> tuple[Record, dict[str, StopWorkers]]:
    """Let the workers of pod 0 fail, who failed so often before at the same step."""
    before = replace(
        trains(2),
        failures_in_place=failures,
        step_at_fault=7 if failures else -1,
        failed_in_place=(pid(0),) if failures else (),
    )
    asked = {"restart_mode": "in_process_restart"} | changes
    agents = [faulted(step=step, **KEEPS, **asked), running(1, step=step, **KEEPS)]
    return stops(before, agents, wishes or policy(1, 4, max_retries=50))


@pytest.mark.parametrize(
    ("failures", "depth", "reach"),
    [
        (0, Depth.MEMORY, RestartMode.IN_PROCESS),
        (1, Depth.PROCESS, RestartMode.PROCESSES),
        (2, Depth.POD, RestartMode.PROCESSES),
        (3, Depth.JOB, RestartMode.JOB),
        (9, Depth.JOB, RestartMode.JOB),
    ],
)
def test_a_replica_that_fails_in_place_again_takes_the_job_deeper(
    failures: int, depth: Depth, reach: RestartMode
) -> None:
    record, told = crash(failures)
    assert record.transition is not None
    assert (record.transition.depth, record.transition.reach) == (depth, reach)
    assert record.failures_in_place == failures + 1
    assert {one.keeps for one in told.values()} == {depth is Depth.MEMORY}
    assert {one.reach for one in told.values()} == {reach}
    times = f"the same replica failed {failures + 1} times in a row without a new step"
    assert record.transition.depth_reason == ("" if depth is Depth.MEMORY else times)
    assert record.transition.depth_code == ("WorkersKept" if depth is Depth.MEMORY else "RepeatedFailures")
    assert decode(encode(record)) == record


@pytest.mark.parametrize(
    ("failures", "stalled", "limits", "outcome"),
    [
        pytest.param(2, 2, {}, "", id="the pods that failed are new"),
        pytest.param(3, 2, {}, "", id="all pods are new"),
        pytest.param(2, 3, {}, "", id="even if the first fault came without a new step"),
        pytest.param(3, 9, {}, "", id="or if others failed before"),
        pytest.param(4, 3, {}, "NoProgress", id="all pods were new"),
        pytest.param(1, 2, {}, "", id="another one failed before, and the pods of this one are new"),
        pytest.param(1, 4, {}, "NoProgress", id="new processes alone are no new rung"),
        pytest.param(3, 2, {"max_full_restarts": 0}, "NoProgress", id="the last rung may not be used"),
    ],
)
def test_a_job_without_progress_ends_only_after_each_depth_was_tried(
    failures: int, stalled: int, limits: dict[str, Any], outcome: str
) -> None:
    wishes = policy(1, 4, **limits)
    before = replace(
        trains(2), failures_in_place=failures, best_step=7, step_at_fault=7, stalled_recoveries=stalled, faults_without_step=stalled + 1,
        failed_in_place=(pid(0),),
    )  # fmt: skip
    record, _ = stops(before, [faulted(step=7, **KEEPS), running(1, step=7, **KEEPS)], wishes)
    then = plan(observed(job(record, wishes), [(pod(0), ready(1)), (pod(1), ready(1))]))
    assert then.record.outcome_reason == outcome


def test_faults_that_different_replicas_are_blamed_for_take_the_job_deeper_too() -> None:
    """A bad link, or a fault that several ranks raise, is reported by one of them and then by another."""
    record, depths = trains(2, running_since=LONG_AGO), []
    wishes = policy(1, 4)
    for number in range(6):
        agents = [running(record.generation, step=7, **KEEPS), running(record.generation, step=7, **KEEPS)]
        agents[number % 2] = faulted(record.generation, step=7, restart_mode="in_process_restart", **KEEPS)
        record, _ = stops(record, agents, wishes)
        assert record.transition is not None
        depths.append((record.transition.depth, record.transition.depth_code))
        told = "" if number < 2 else f"{number} recoveries in a row reached no new step"
        assert record.transition.depth_reason == told
        idle = [(pod(n), ready(record.generation)) for n in range(2)]
        ended = plan(observed(job(record, wishes), idle)).record.outcome_reason
        assert ended == ("NoProgress" if number == 5 else ""), "each depth is tried before the job ends"
        record = replace(record, transition=None, generation=record.generation + 1, members=(pid(0), pid(1)), lost=())
    assert depths == [
        (Depth.MEMORY, "WorkersKept"), (Depth.MEMORY, "WorkersKept"), (Depth.PROCESS, "RepeatedFailures"), (Depth.POD, "RepeatedFailures"),
        (Depth.JOB, "RepeatedFailures"), (Depth.JOB, "RepeatedFailures"),
    ]  # fmt: skip


def test_a_job_that_computes_again_what_it_lost_does_not_fail_in_place() -> None:
    """It went back from step 1000 to a checkpoint; then its replicas fail one after the other, hundreds of steps apart."""
    record = trains(3, best_step=1000, step_at_fault=1000, faults_without_step=1, failures_in_place=1)
    wishes = policy(2, 4, max_retries=50)
    for number, step in enumerate((300, 600, 900, 950)):
        agents = [running(record.generation, step=step, **KEEPS) for _ in range(3)]
        agents[number % 3] = faulted(record.generation, step=step, restart_mode="in_process_restart", **KEEPS)
        record, _ = stops(record, agents, wishes)
        assert record.transition is not None
        assert record.transition.depth is Depth.MEMORY, f"at step {step}"
        record = replace(record, transition=None, generation=record.generation + 1)
    assert record.best_step == 1000


@pytest.mark.parametrize(
    ("steps", "depths"),
    [
        pytest.param((600, 250, 240, 230), [Depth.MEMORY] * 4, id="back at a checkpoint, hundreds of steps apart"),
        pytest.param((250, 201, 201, 201), [Depth.MEMORY, Depth.MEMORY, Depth.PROCESS, Depth.POD], id="one step each"),
        pytest.param((250, None, None), [Depth.MEMORY, Depth.PROCESS, Depth.POD], id="no step"),
        pytest.param((7, 7, 7, 7), [Depth.MEMORY, Depth.PROCESS, Depth.POD, Depth.JOB], id="no other step"),
    ],
)
def test_a_replica_fails_again_only_where_no_step_lies_between(
    steps: tuple[int | None, ...], depths: list[Depth]
) -> None:
    """From the last fault at step 1000 the job went back to an earlier checkpoint."""
    wishes = policy(1, 4, max_retries=50)
    record, found = trains(
        2, best_step=1000, step_at_fault=1000, faults_without_step=1, failures_in_place=1, failed_in_place=(pid(0),),
        running_since=NOW,
    ), []  # fmt: skip
    for step in steps:
        failed = faulted(record.generation, step=step, restart_mode="in_process_restart", **KEEPS)
        record, _ = stops(record, [failed, running(record.generation, step=step, **KEEPS)], wishes)
        assert record.transition is not None
        found.append(record.transition.depth)
        record = replace(record, transition=None, generation=record.generation + 1)
    assert found == depths


def test_a_job_that_only_computes_again_what_it_lost_gets_new_pods_before_it_ends() -> None:
    """It makes steps between its faults, and none that is newer than all before."""
    wishes, found = policy(1, 4), []
    record = trains(
        2, best_step=1000, step_at_fault=1000, failures_in_place=1, failed_in_place=(pid(0),), running_since=NOW
    )
    for step in (300, 250, 400, 350, 300):
        failed = faulted(record.generation, step=step, restart_mode="in_process_restart", **KEEPS)
        record, _ = stops(record, [failed, running(record.generation, step=step, **KEEPS)], wishes)
        assert record.transition is not None
        idle = [(pod(n), ready(record.generation)) for n in range(2)]
        ended = plan(observed(job(record, wishes), idle)).record.outcome_reason
        found.append((record.transition.depth, ended))
        record = replace(record, transition=None, generation=record.generation + 1, members=(pid(0), pid(1)), lost=())
    assert found == [
        (Depth.MEMORY, ""), (Depth.MEMORY, ""), (Depth.POD, ""), (Depth.JOB, ""), (Depth.JOB, "NoProgress")
    ]  # fmt: skip


def test_steps_computed_again_before_a_planned_change_are_the_last_known_after_it() -> None:
    record = trains(2, best_step=1000, step_at_fault=1000, consecutive_failures=1, failures_in_place=2)
    replicas = replicas_of(record, (pod(0), running(1, step=300, **KEEPS)), (pod(1), running(1, step=299, **KEEPS)))
    counted = count_progress(record, replicas, NOW)
    assert (counted.failures_in_place, counted.step_at_fault, counted.best_step) == (0, 300, 1000)
    assert counted.consecutive_failures == 1, "the budgets want a step that is newer than all"


@pytest.mark.parametrize(
    ("newest", "depth"),
    [pytest.param(500, Depth.MEMORY, id="steps between"), pytest.param(7, Depth.PROCESS, id="no step between")],
)
def test_a_fault_right_after_a_planned_change_follows_on_the_steps_before_that_change(
    newest: int, depth: Depth
) -> None:
    """In the new generation no agent has told of a step yet; the last fault may have been hours ago."""
    wishes = policy(1, 4)
    first, _ = crash(failures=0, step=7)
    again = replace(first, transition=None, generation=2, running_since=NOW - seconds(20))
    agents = [running(2, step=newest, **KEEPS), running(2, step=newest, **KEEPS)]
    seen = [(pod(0), agents[0]), (pod(1, disruption="taint"), agents[1])]
    record = plan(observed(job(again, wishes), seen)).record
    assert record.transition is not None
    assert record.transition.kind is TransitionKind.RESIZE
    begun = replace(record, transition=None, generation=3, members=(pid(0), pid(1)), running_since=None)
    failed, waits = (faulted(3, restart_mode="in_process_restart", **KEEPS), running(3, **KEEPS))
    after, _ = stops(begun, [failed, waits], wishes)
    assert after.transition is not None
    assert after.transition.depth is depth
    assert after.consecutive_failures == (1 if newest == 500 else 2)


def test_the_loss_of_a_node_counts_as_no_fault_before_a_new_step() -> None:
    record, depths = trains(3, best_step=6), []
    gone = plan(observed(job(record, policy(2, 4)), [(pod(n), running(1, step=7, **KEEPS)) for n in range(2)])).record
    assert gone.transition is not None
    record = replace(gone, transition=None, generation=2, lost=())
    for number in range(3):
        agents = [running(record.generation, step=7, **KEEPS) for _ in range(3)]
        agents[number] = faulted(record.generation, step=7, restart_mode="in_process_restart", **KEEPS)
        record, _ = stops(record, agents, policy(2, 4, max_retries=50))
        assert record.transition is not None
        depths.append(record.transition.depth)
        record = replace(record, transition=None, generation=record.generation + 1)
    assert depths == [Depth.MEMORY, Depth.MEMORY, Depth.PROCESS]


@pytest.mark.parametrize(
    ("step_at_loss", "culprit", "depth", "failures"),
    [
        pytest.param(7, 1, Depth.MEMORY, 1, id="the first fault of its replacement"),
        pytest.param(7, 0, Depth.PROCESS, 2, id="the second one of another replica"),
        pytest.param(9, 0, Depth.MEMORY, 1, id="which made steps before the loss"),
        pytest.param(9, 1, Depth.MEMORY, 1, id="or with its replacement"),
    ],
)
def test_a_lost_pod_has_not_failed(step_at_loss: int, culprit: int, depth: Depth, failures: int) -> None:
    wishes = policy(1, 4, max_retries=50)
    record, _ = crash(0)
    record = replace(record, transition=None, generation=2)
    record = plan(observed(job(record, wishes), [(pod(0), running(2, step=step_at_loss, **KEEPS))])).record
    assert record.transition is not None
    assert (record.transition.cause, record.transition.depth) == (Reason.POD_LOST, Depth.MEMORY)
    record = replace(record, transition=None, generation=3, running_since=NOW)
    agents = [running(3, step=step_at_loss, **KEEPS), running(3, step=step_at_loss, **KEEPS)]
    agents[culprit] = faulted(3, step=step_at_loss, restart_mode="in_process_restart", **KEEPS)
    record, _ = stops(record, agents, wishes)
    assert record.transition is not None
    assert (record.transition.depth, record.failures_in_place) == (depth, failures)


def test_a_node_that_is_found_to_be_lost_takes_back_that_a_replica_failed() -> None:
    """Its neighbour's worker failed first, because the connection broke."""
    wishes, before = policy(1, 4, max_retries=50), trains(3, best_step=7, step_at_fault=7)
    agents = [faulted(step=7, restart_mode="in_process_restart", **KEEPS), *[running(step=7, **KEEPS)] * 2]
    begun, _ = stops(before, agents, wishes)
    assert (begun.failures_in_place, begun.failed_in_place) == (1, (pid(0),))
    seen: list[Seen] = [(pod(n), ready(1, num_kept=1, **KEEPS) if n != 1 else silent()) for n in range(3)]
    lost = plan(observed(job(begun, wishes), seen, [ObservedNode(name="node-1", out_of_service=True)])).record
    assert (lost.failures_in_place, lost.failed_in_place, lost.faults_without_step) == (0, (), 0)
    again = replace(lost, transition=None, generation=3, members=(pid(0), pid(1, 1), pid(2)), lost=())
    agents = [running(3, step=7, **KEEPS), faulted(3, step=7, restart_mode="in_process_restart", **KEEPS)]
    seen = [(pod(m), one) for m, one in zip(again.members, [*agents, running(3, step=7, **KEEPS)], strict=True)]
    failed = plan(observed(job(again, wishes), seen)).record
    assert failed.transition is not None
    assert (failed.transition.depth, failed.failures_in_place) == (Depth.MEMORY, 1)


@pytest.mark.parametrize("stalled", range(5))
def test_workers_that_were_started_to_be_kept_and_hold_nothing_go_no_deeper_by_themselves(stalled: int) -> None:
    """`--inprocess-restart` without State: what is told of a change is what the agents do."""
    mode: dict[str, Any] = {"restart_mode": "in_process_restart"}
    before = replace(trains(3), best_step=7, step_at_fault=7, stalled_recoveries=stalled, faults_without_step=stalled)
    agents = [faulted(step=7, **mode), running(1, step=7, **mode), running(1, step=7, **mode)]
    record, told = stops(before, agents, policy(2, 4))
    assert record.transition is not None
    assert record.transition.depth is Depth.MEMORY
    assert {one.reach for one in told.values()} == {RestartMode.IN_PROCESS}
    then = plan(observed(job(record, policy(2, 4)), [(pod(n), ready(1, **mode)) for n in range(3)]))
    assert then.record.outcome_reason == ("NoProgress" if stalled >= 2 else "")


def test_a_new_step_another_replica_or_a_lost_pod_go_in_memory_again() -> None:
    record, _ = crash(3, step=8)
    assert record.transition is not None
    assert (record.transition.depth, record.failures_in_place) == (Depth.MEMORY, 1), "there was a new step"
    before = replace(trains(2), failures_in_place=3, step_at_fault=7, failed_in_place=(pid(1),))
    agents = [faulted(step=7, restart_mode="in_process_restart", **KEEPS), running(1, step=7, **KEEPS)]
    record, _ = stops(before, agents, policy(1, 4, max_retries=50))
    assert record.transition is not None
    assert (record.transition.depth, record.failures_in_place) == (Depth.MEMORY, 1), "another replica"
    before = replace(before, failed_in_place=(pid(0),))
    todo = plan(observed(job(before, policy(1, 4, max_retries=50)), [(pod(1), running(1, step=7, **KEEPS))]))
    assert todo.record.transition is not None
    assert (todo.record.transition.depth, todo.record.failures_in_place) == (Depth.MEMORY, 3), "a lost pod"


def test_the_ladder_ends_before_the_full_job_when_its_budget_is_used_up() -> None:
    wishes = policy(1, 4, max_retries=50, max_full_restarts=1)
    before = replace(
        trains(2), failures_in_place=5, step_at_fault=7, failed_in_place=(pid(0),),
        window=RestartWindow(0, NOW, 0, 1),
    )  # fmt: skip
    agents = [faulted(step=7, **KEEPS), running(1, step=7, **KEEPS)]
    record, _ = stops(before, agents, wishes)
    assert record.transition is not None
    assert record.transition.depth is Depth.POD


@pytest.mark.parametrize(
    ("asked", "depth", "code", "reason"),
    [
        ("process_level_restart", Depth.PROCESS, "ProcessRequested", "a worker asked for new processes"),
        ("job_level_restart", Depth.JOB, "JobRequested", "a worker requested a job-level restart"),
        ("local_process_level_restart", Depth.MEMORY, "WorkersKept", ""),
    ],
)
def test_a_worker_may_ask_for_more(asked: str, depth: Depth, code: str, reason: str) -> None:
    record, _ = crash(restart_mode=asked)
    assert record.transition is not None
    assert (record.transition.depth, record.transition.depth_code, record.transition.depth_reason) == (
        depth,
        code,
        reason,
    )


def test_workers_that_keep_nothing_recover_as_ever() -> None:
    agents = [faulted(step=7, restart_mode="process_level_restart"), running(1, step=7)]
    record, told = stops(trains(2), agents)
    assert record.transition is not None
    assert (record.transition.depth, record.transition.depth_reason) == (Depth.PROCESS, "")
    assert record.failures_in_place == 0
    assert not any(one.keeps for one in told.values())


def test_workers_that_wait_with_their_state_are_ended_when_the_recovery_goes_deeper() -> None:
    deep = transition(
        TransitionKind.RECOVERY, depth=Depth.PROCESS, depth_reason="x", reach=RestartMode.PROCESSES, graceful=False
    )
    before = replace(trains(2), transition=deep)
    record, told = stops(before, [kept(), kept()])
    assert [(one.reach, one.graceful, one.keeps) for one in told.values()] == [
        (RestartMode.PROCESSES, False, False)
    ] * 2
    record, told = stops(before, [ready(1), ready(1)])
    assert (told, record.generation) == ({}, 2), "nobody is left who waits"
    shallow = replace(
        before, transition=replace(deep, depth=Depth.MEMORY, depth_reason="", reach=RestartMode.IN_PROCESS)
    )
    record, told = stops(shallow, [kept(), kept()])
    assert (told, record.generation) == ({}, 2)


@pytest.mark.parametrize(
    ("depth", "agents", "settled", "reason", "words"),
    [
        pytest.param(Depth.MEMORY, [kept(), kept(0)], Depth.MEMORY, "", "generation 2, in memory", id="one is enough"),
        pytest.param(
            Depth.MEMORY,
            [kept(0), kept(0)],
            Depth.PROCESS,
            "no worker's process was left",
            "with new processes because no worker's process was left",
            id="nobody was left",
        ),
        pytest.param(Depth.PROCESS, [ready(1), ready(1)], Depth.PROCESS, "", "generation 2: a test", id="never kept"),
    ],
)
def test_history_and_event_say_how_deep_a_change_went(
    depth: Depth, agents: list[ObservedAgent], settled: Depth, reason: str, words: str
) -> None:
    before = replace(trains(2), transition=transition(TransitionKind.RECOVERY, depth=depth, graceful=False))
    todo = plan(observed(job(before), [(pod(n), one) for n, one in enumerate(agents)]))
    assert len(acts(todo, StartWorkers)) == 2
    (entry,) = todo.history
    assert (entry.depth, entry.depth_reason) == (settled, reason)
    assert any(words in event.message for event in todo.events), todo.events


def test_pods_that_failed_again_and_again_are_recreated_and_the_others_stay() -> None:
    deep = transition(
        TransitionKind.RECOVERY, depth=Depth.POD, depth_reason="so often", reach=RestartMode.PROCESSES, graceful=False,
        uses_budget=True,
    )  # fmt: skip
    before = replace(
        trains(2), transition=deep, failures_in_place=3, faulty_replicas=(FaultyReplica(pid(0), 0, "node-0"),)
    )
    wishes = policy(1, 4, max_retries=50)
    todo = plan(observed(job(before, wishes), [(pod(0), ready(1)), (pod(1), ready(1))]))
    assert [one.name for one in acts(todo, DeletePod)] == ["job-workers-0"]
    assert todo.record.lost == (PodId("workers", 0, 0),)
    assert any("so often: job-workers-0 is recreated" in event.message for event in todo.events)
    assert todo.record.transition is not None
    again = plan(observed(job(todo.record, wishes), [(pod(0), ready(1)), (pod(1), ready(1))]))
    assert not any("is recreated" in event.message for event in again.events)


def test_the_history_tells_the_depth_to_readers_that_know_it() -> None:
    entry = HistoryEntry(
        generation=2, from_size=2, to_size=3, kind=TransitionKind.RESIZE, cause=Reason.SCALED_BY_USER, at=NOW, detected_at=NOW,
        depth=Depth.MEMORY,
    )  # fmt: skip
    deeper = replace(
        entry, depth=Depth.PROCESS, depth_reason="why", depth_code=DepthReason.RECOVERY_IS_PROCESS, owner="uid-1"
    )
    former = replace(entry, depth=None)
    assert decode_history(encode_history((entry, deeper, former))) == (entry, deeper, former)
    assert "depth" not in encode_history((former,))
    unknown = encode_history((entry,)).replace('"memory"', '"whatever comes"')
    assert decode_history(unknown) == (former,)
    later = encode_history((deeper,)).replace("RecoveryIsProcess", "WhateverComes")
    earlier = encode_history((deeper,)).replace(',"depth_code":"RecoveryIsProcess"', "")
    assert decode_history(later) == decode_history(earlier) == (replace(deeper, depth_code=DepthReason.UNKNOWN),)


def test_a_drain_that_a_fault_breaks_is_decided_anew() -> None:
    draining = transition(TransitionKind.RESIZE, target_size=2, depth=Depth.MEMORY, began_s=1)
    before = replace(trains(3), transition=draining)
    agents = [
        agent(AgentState.STOPPING, 1, step=7, **KEEPS),
        faulted(step=7, restart_mode="in_process_restart", **KEEPS),
        kept(),
    ]
    record, told = stops(before, agents)
    assert record.transition is not None
    assert (record.transition.kind, record.transition.depth) == (TransitionKind.RECOVERY, Depth.MEMORY)
    assert record.transition.began_at > NOW - seconds(1)
    assert set(told) == {"job-workers-0", "job-workers-1"}, "who waits already is left alone"
    assert every(one.keeps for one in told.values())


@pytest.mark.parametrize(
    ("fact", "is_warned"),
    [
        pytest.param({}, True, id="they announce nothing"),
        pytest.param({"memory_state": "sharded"}, False, id="they announce it"),
        pytest.param({"restart_mode": "in_process_restart"}, False, id="--inprocess-restart"),
    ],
)
def test_who_expects_memory_is_told_when_the_workers_keep_nothing(fact: dict[str, Any], is_warned: bool) -> None:
    pods = [(pod(n), running(1, step=5, **fact)) for n in range(2)]
    todo = plan(observed(job(trains(2), policy(2, 2, expects_memory=True)), pods))
    told = [one.message for one in todo.conditions if one.type == "Warning"]
    assert any("recovery is InMemory, but the workers keep nothing in memory" in text for text in told) is is_warned
    quiet = plan(observed(job(trains(2), policy(2, 2)), pods))
    assert not [one for one in quiet.conditions if one.type == "Warning"]


@pytest.mark.parametrize(
    ("depth", "reach", "deeper", "why"),
    [
        pytest.param(Depth.MEMORY, RestartMode.IN_PROCESS, Depth.MEMORY, "before", id="no more than before"),
        pytest.param(Depth.MEMORY, RestartMode.LOCAL, Depth.MEMORY, "before", id="its own pod alone"),
        pytest.param(Depth.MEMORY, RestartMode.PROCESSES, Depth.PROCESS, "a worker asked for new processes", id="processes"),
        pytest.param(Depth.MEMORY, RestartMode.JOB, Depth.JOB, "a worker requested a job-level restart", id="the whole job"),
        pytest.param(Depth.PROCESS, RestartMode.PROCESSES, Depth.PROCESS, "before", id="they are new anyway"),
        pytest.param(Depth.POD, RestartMode.JOB, Depth.POD, "before", id="pods are new anyway"),
    ],
)  # fmt: skip
def test_workers_that_fail_later_may_ask_for_a_deeper_recovery(
    depth: Depth, reach: RestartMode, deeper: Depth, why: str
) -> None:
    before = transition(TransitionKind.RECOVERY, depth=depth, depth_reason="before")
    then = deepened(before, reach)
    assert then == replace(before, reach=reach, depth=deeper, depth_reason=why, depth_code=then.depth_code)
    asked = {reason.sentence: reason for reason in (DepthReason.PROCESS_REQUESTED, DepthReason.JOB_REQUESTED)}
    assert then.depth_code is asked.get(why, DepthReason.UNKNOWN)


@pytest.mark.parametrize(
    ("depth", "reach", "code"),
    [
        pytest.param(Depth.PROCESS, RestartMode.IN_PROCESS, DepthReason.RESTART_LIMIT, id="one restart too many"),
        pytest.param(Depth.MEMORY, RestartMode.JOB, DepthReason.JOB_REQUESTED, id="a worker asked for it"),
        pytest.param(Depth.JOB, RestartMode.JOB, DepthReason.REPEATED_FAILURES, id="it was chosen at once"),
    ],
)
def test_why_all_pods_are_recreated(depth: Depth, reach: RestartMode, code: DepthReason) -> None:
    began = transition(
        TransitionKind.RECOVERY, depth=depth, reach=reach, recreates_pods=True,
        depth_code=DepthReason.REPEATED_FAILURES, depth_reason="of the choice at the beginning",
    )  # fmt: skip
    choice = settled_depth(began, [])
    assert choice is not None
    is_chosen = code is DepthReason.REPEATED_FAILURES
    assert (choice.depth, choice.code) == (Depth.JOB, code)
    assert choice.reason == (began.depth_reason if is_chosen else code.sentence)


def test_the_reasons_are_words_of_kubernetes_and_name_depths_that_there_are() -> None:
    for one in DepthReason:
        assert (one.isalpha(), one[0].isupper(), bool(one.depths)) == (True, True, True), one
        assert {Depth(depth) for depth in one.depths} == set(one.depths)
        assert one.meaning
