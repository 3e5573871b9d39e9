"""What broke and what that costs, fact by fact; test_faults tells the same as stories."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    Seen,
    agent,
    faulted,
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

from elastipod_operator.core.backoff import jitter
from elastipod_operator.core.faults import Fault, failure_text, find_fault
from elastipod_operator.core.reasons import OpenReason, Reason
from elastipod_operator.core.record import FaultyReplica, Record, RestartMode, RestartWindow, Transition, TransitionKind
from elastipod_operator.core.recovery import begin_recovery, requested_restart, widen_restart
from elastipod_operator.core.root_cause import attribute_to_outside
from elastipod_operator.core.snapshot import AgentState, Failure, ObservedAgent, ObservedNode

DRAINS = transition(target_size=2)
DRAINED = ready(1, drained=True)
OUT = [ObservedNode(name=f"node-{n}", out_of_service=True) for n in range(9)]


def find(record: Record, *pods: Seen, nodes: Any = ()) -> Fault | None:
    return find_fault(record, replicas_of(record, *pods, nodes=nodes))


# ---- what is missing


def test_a_pod_that_is_gone_is_named_with_its_rank() -> None:
    record = trains(members=(pid(0), pid(4, 2)))
    assert find(record, (pod(0), running())) == Fault(
        Reason.POD_LOST, "pod workers-4 (incarnation 2) is gone", False, (), (FaultyReplica(pid(4, 2), 1, ""),)
    )


def test_pods_that_ended_by_themselves_count_and_the_first_tells_why() -> None:
    pods = [(pod(n, phase="Failed", problem=f"trouble {n}"), None) for n in (1, 0)]
    assert find(trains(), *pods) == Fault(
        Reason.POD_FAILED,
        "trouble 0",
        True,
        (),
        (FaultyReplica(pid(0), 0, "node-0"), FaultyReplica(pid(1), 1, "node-1")),
    )
    deleted = (pod(1, phase="Failed", kill_at=NOW), None)
    found = find(trains(), (pod(0, phase="Failed"), None), deleted)
    assert found is not None
    assert not found.uses_budget, "one that was deleted may have taken the other along"


@pytest.mark.parametrize(
    ("lost", "more"),
    [pytest.param([1], "", id="one"), pytest.param([0, 2], " (and 1 more)", id="two")],
)
def test_lost_nodes_are_the_cause_whatever_else_is_missing(lost: list[int], more: str) -> None:
    pods = [(pod(n), running()) for n in range(3)]
    found = find(trains(4), *pods, nodes=[OUT[n] for n in lost])
    assert found == Fault(
        Reason.NODE_OUT_OF_SERVICE, f"node node-{lost[0]} is out of service{more}", False, tuple(pid(n) for n in lost),
        tuple(FaultyReplica(pid(n), n, f"node-{n}") for n in lost),
    )  # fmt: skip


def test_pods_that_ended_come_before_pods_that_are_gone() -> None:
    found = find(trains(3), (pod(2, phase="Failed", problem="oom"), None), (pod(1), running()))
    assert found is not None
    assert (found.cause, [c.rank for c in found.faulty_replicas]) == ("PodFailed", [2])


# ---- what the workers say


def test_the_rank_of_a_fault_is_that_of_the_record() -> None:
    record = trains(members=(pid(1), pid(0)))
    found = find(record, (pod(0), faulted()), (pod(1), running()))
    assert found == Fault(
        OpenReason("WorkerCrash"), f"group rank 1 (pod {pod(0).name}): rank 0 exited with code 1: “ValueError: boom”", True, (),
        (FaultyReplica(pid(0), 1, "node-0"),),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mine", "cause", "text"),
    [
        pytest.param(agent(AgentState.FAULTED, reason="Hang", message="no step"), "Hang", "“no step”", id="the agent's message"),
        pytest.param(agent(AgentState.FAULTED, reason="Hang"), "Hang", "Hang", id="else its reason"),
        pytest.param(agent(AgentState.FAULTED), "WorkerFault", "", id="else nothing"),
        pytest.param(agent(AgentState.FAULTED, reason="_x y_", message="m"), "x_y", "“m”", id="reasons are made fit for conditions"),
        pytest.param(agent(AgentState.FAULTED, reason="LogFault_ecc", message="ecc: 3"), "LogFault_ecc", "“ecc: 3”", id="a rule once"),
        pytest.param(agent(AgentState.FAULTED, reason="LogHang_x", message="3"), "LogHang_x", "log rule x: “3”", id="of a hang"),
        pytest.param(agent(AgentState.FAULTED, reason="LogSlow_x", message="3"), "LogSlow_x", "log rule x: “3”", id="of slowness"),
        pytest.param(agent(AgentState.FAULTED, reason="Other_ecc", message="3"), "Other_ecc", "“3”", id="other reasons name no rule"),
    ],
)  # fmt: skip
def test_what_is_told_of_a_fault(mine: ObservedAgent, cause: str, text: str) -> None:
    found = find(trains(), (pod(0), mine), (pod(1), running()))
    assert found is not None
    assert (found.cause, found.message) == (cause, f"group rank 0 (pod {pod(0).name}): {text}")


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        pytest.param(None, "", id="nothing"),
        pytest.param(
            Failure(3, 7, "", "a\n  b  \n\n"), "rank 3 exited with code 7: “b”", id="the last line that says anything"
        ),
        pytest.param(Failure(3, None, "SIGKILL", "boom"), "rank 3 was killed by SIGKILL: “boom”", id="a signal"),
        pytest.param(Failure(3, 7, "", " \n "), "rank 3 exited with code 7", id="no line at all"),
        pytest.param(
            Failure(0, 7, "", "x" * 301), "rank 0 exited with code 7: “" + "x" * 300 + "”", id="long lines are cut"
        ),
        pytest.param(Failure(-1, 1, "", "  no port  "), "“no port”", id="the start itself"),
        pytest.param(Failure(-1, 1, "", "y" * 301), "“" + "y" * 300 + "”", id="cut too"),
        pytest.param(
            Failure(3, 7, "", "rank 3 (local rank 1) ended with exit code 7: KeyError: 'x'"),
            "rank 3 (local rank 1) ended with exit code 7: “KeyError: 'x'”",
            id="the agent's own sentence quotes the error",
        ),
        pytest.param(Failure(3, 7, "", "rank 3 " + "z" * 300), "rank 3 " + "z" * 293, id="the agent's own sentence"),
        pytest.param(
            Failure(3, 7, "", "rank 33 x"), "rank 3 exited with code 7: “rank 33 x”", id="not that of another rank"
        ),
    ],
)
def test_how_a_rank_ended(failure: Failure | None, text: str) -> None:
    snapshot = replicas_of(trains(), (pod(0), agent(AgentState.FAULTED, failure=failure)))
    assert failure_text(snapshot.by_id[pid(0)]) == text


@pytest.mark.parametrize(
    ("health", "finds"),
    [
        pytest.param((pod(0), faulted()), True, id="it answers"),
        pytest.param((pod(0, disruption="x"), faulted()), True, id="also when it is about to go"),
        pytest.param(
            (pod(0), replace(faulted(), last_answer=NOW - seconds(20))), False, id="not what a silent one said last"
        ),
    ],
)
def test_a_fault_must_be_heard(health: Seen, finds: bool) -> None:
    other = (pod(1), running(step=5, step_at=NOW))
    assert (find(trains(), health, other) is not None) is finds


# ---- drains

FAILED_DRAINING = ready(1, failure=Failure(0, 1, "", "boom"), reason="WorkerCrash")


@pytest.mark.parametrize(
    ("mine", "cause"),
    [
        pytest.param(FAILED_DRAINING, "WorkerCrash", id="a failure while draining"),
        pytest.param(replace(FAILED_DRAINING, drained=True), None, id="one that drained all the same"),
        pytest.param(replace(FAILED_DRAINING, generation=7), None, id="one of another generation"),
        pytest.param(ready(1), None, id="no failure"),
        pytest.param(running(7), None, id="who is ahead is looked at when the drain is over"),
    ],
)
def test_faults_in_a_drain(mine: ObservedAgent, cause: str | None) -> None:
    found = find(trains(transition=DRAINS), (pod(0), mine), (pod(1), agent(AgentState.STOPPING)))
    assert (found.cause if found else None) == cause


@pytest.mark.parametrize(
    ("other", "is_found"),
    [
        pytest.param((pod(1), DRAINED), False, id="one stands at the checkpoint"),
        pytest.param((pod(1), ready(None)), False, id="an agent of another make is stopped"),
        pytest.param((pod(1), ready(1)), True, id="one was stopped otherwise"),
        pytest.param((pod(1), ready(2, drained=True)), True, id="one drained from another generation"),
        pytest.param((pod(1), agent(AgentState.STOPPING)), True, id="one is on its way"),
        pytest.param((pod(1), ObservedAgent(trying_since=NOW)), False, id="one was not heard yet"),
        pytest.param((pod(1, disruption="x"), ObservedAgent(trying_since=NOW)), False, id="nor one that goes"),
    ],
)
def test_a_member_that_is_missing_in_a_drain(other: Seen, is_found: bool) -> None:
    assert (find(trains(transition=DRAINS), other) is not None) is is_found
    assert find(trains(), other) is not None, "outside of a drain it always is"


# ---- out of step


@pytest.mark.parametrize(
    ("mine", "cause"),
    [
        pytest.param(ready(3), "WorkersStopped", id="somebody stopped it"),
        pytest.param(agent(AgentState.SHUTDOWN, 3), "WorkersStopped", id="or sent it away"),
        pytest.param(ready(3, drained=True), None, id="a drain is no fault"),
        pytest.param(ready(2), None, id="it was not started yet"),
        pytest.param(ready(None), None, id="an agent of another make does not say"),
        pytest.param(agent(AgentState.INIT, 3), None, id="it is coming up"),
        pytest.param(running(4), "RecordBehind", id="it is ahead"),
        pytest.param(silent(20, generation=4), None, id="what a silent one said does not count"),
    ],
)
def test_an_agent_that_is_out_of_step(mine: ObservedAgent, cause: str | None) -> None:
    other = (pod(1), running(3, step=5, step_at=NOW))
    found = find(trains(generation=3), other, (pod(0), mine))
    assert (found.cause if found else None) == cause
    if found:
        assert not found.uses_budget
        assert pod(0).name in found.message


def test_the_second_member_is_looked_at_too() -> None:
    first = (pod(0), ready(None))
    found = find(trains(generation=3), first, (pod(1), running(4)))
    assert found == Fault(
        Reason.RECORD_BEHIND, f"the agent of pod {pod(1).name} runs generation 4, the record says 3", False
    )


# ---- the recovery

CRASH = Fault(OpenReason("WorkerCrash"), "boom", True, (), (FaultyReplica(pid(0), 0, "node-0"),))
LOSS = Fault(Reason.NODE_LOST, "gone", False, (pid(1),), (FaultyReplica(pid(1), 1, "node-1"),))


def recover(record: Record, fault: Fault = CRASH, *pods: Seen, key: str = "k") -> Record:
    return begin_recovery(record, replicas_of(record, *pods), policy(), NOW, fault, key)


def test_what_a_recovery_begins_with() -> None:
    record = trains(3, window_since=LONG_AGO, lost=(pid(9),), is_full_restart=True, window=RestartWindow(2, None, 0, 1))
    after = recover(record)
    assert after.transition == Transition(
        kind=TransitionKind.RECOVERY, cause=OpenReason("WorkerCrash"), message="boom", from_size=3, target_size=3,
        began_at=NOW, detected_at=NOW,
        deadline=NOW + seconds(30), uses_budget=True,
    )  # fmt: skip
    assert (after.window_since, after.fault_at, after.lost, after.is_full_restart) == (None, NOW, (pid(9),), False)
    assert (after.restarts, after.retries, after.window, after.faulty_replicas) == (
        1,
        1,
        RestartWindow(2, NOW, 1, 1),
        CRASH.faulty_replicas,
    )


def test_what_does_not_count_spends_nothing() -> None:
    record = trains(
        3, running_since=None, lost=(pid(9), pid(1)), stalled_recoveries=1, window=RestartWindow(2, LONG_AGO, 1, 1)
    )
    after = recover(record, LOSS)
    assert (after.restarts, after.retries, after.window, after.stalled_recoveries) == (1, 0, record.window, 1)
    assert after.lost == (pid(9), pid(1)), "once"
    assert recover(trains(3, lost=(pid(9),)), LOSS).lost == (pid(9), pid(1))
    assert after.transition is not None
    assert not after.transition.uses_budget


def test_a_fault_after_a_fault_is_dated_from_the_first_and_opens_no_new_window() -> None:
    after = recover(trains(fault_at=LONG_AGO, window=RestartWindow(0, LONG_AGO, 4, 0)))
    assert (after.fault_at, after.window) == (LONG_AGO, RestartWindow(0, LONG_AGO, 5, 0))


@pytest.mark.parametrize(
    ("old", "target_size"),
    [
        pytest.param(None, 2, id="the present size"),
        pytest.param(transition(target_size=4), 4, id="or the one that a drain was for"),
        pytest.param(transition(TransitionKind.SUSPEND, target_size=0), 2, id="of which a suspension has none"),
    ],
)
def test_the_size_that_a_recovery_wants(old: Transition | None, target_size: int) -> None:
    after = recover(trains(transition=old)).transition
    assert after is not None
    assert after.target_size == target_size


@pytest.mark.parametrize(
    ("changes", "step", "failures", "stalled", "best"),
    [
        pytest.param(
            {"best_step": 7, "consecutive_failures": 2, "stalled_recoveries": 2}, 7, 3, 3, 7, id="no newer step"
        ),
        pytest.param(
            {"best_step": 7, "consecutive_failures": 2, "stalled_recoveries": 2}, 8, 1, 0, 8, id="a newer one"
        ),
        pytest.param(
            {"best_step": 7, "consecutive_failures": 2, "stalled_recoveries": 2}, 3, 3, 3, 7, id="an older one"
        ),
        pytest.param({"running_since": NOW - seconds(60)}, None, 1, 1, -1, id="a minute of life proves nothing"),
        pytest.param(
            {"running_since": NOW - seconds(60), "consecutive_failures": 1}, None, 2, 1, -1, id="however often"
        ),
        pytest.param(
            {"running_since": NOW - seconds(61), "consecutive_failures": 1, "stalled_recoveries": 1},
            None,
            1,
            0,
            -1,
            id="more than one does",
        ),
        pytest.param(
            {"running_since": None, "consecutive_failures": 1}, None, 2, 1, -1, id="who never ran has not lived"
        ),
        pytest.param(
            {"running_since": LONG_AGO, "consecutive_failures": 1, "best_step": 9},
            9,
            2,
            1,
            9,
            id="steps count more than life",
        ),
    ],
)
def test_what_is_progress(changes: dict[str, Any], step: int | None, failures: int, stalled: int, best: int) -> None:
    after = recover(trains(**changes), CRASH, (pod(0), faulted(step=None)), (pod(1), running(step=step)))
    assert (after.consecutive_failures, after.stalled_recoveries, after.best_step) == (failures, stalled, best)


@pytest.mark.parametrize("key", ["k", "other"])
@pytest.mark.parametrize(("failures", "wait_s"), [(0, 0), (1, 10), (2, 20), (9, 300)])
def test_failures_in_a_row_are_spaced(failures: int, wait_s: float, key: str) -> None:
    after = recover(
        trains(best_step=9, consecutive_failures=failures), CRASH, (pod(0), faulted(step=9)), key=key
    ).transition
    assert after is not None
    wait = seconds(wait_s) * (1 + 0.25 * jitter(key, failures))
    assert after.not_before == (NOW + wait if wait_s else None)


@pytest.mark.parametrize(
    ("pods", "reach"),
    [
        pytest.param(
            [(pod(0), faulted(restart_mode=RestartMode.JOB)), (pod(1), running())],
            RestartMode.JOB,
            id="who failed is heard",
        ),
        pytest.param(
            [(pod(0), running(restart_mode=RestartMode.JOB)), (pod(1), faulted())],
            RestartMode.IN_PROCESS,
            id="not who runs",
        ),
        pytest.param(
            [(pod(0), faulted(7, restart_mode=RestartMode.JOB))],
            RestartMode.IN_PROCESS,
            id="nor who ran another generation",
        ),
        pytest.param(
            [(pod(5), faulted(restart_mode=RestartMode.JOB))], RestartMode.IN_PROCESS, id="nor who is no member"
        ),
        pytest.param(
            [(pod(0), faulted(restart_mode="?")), (pod(1), faulted(restart_mode=RestartMode.LOCAL))],
            RestartMode.PROCESSES,
            id="what?",
        ),
    ],
)
def test_how_far_a_recovery_reaches(pods: list[Seen], reach: RestartMode) -> None:
    assert requested_restart(trains(), replicas_of(trains(), *pods)) is reach
    began = recover(trains(), CRASH, *pods).transition
    assert began is not None
    assert began.reach is reach


@pytest.mark.parametrize(
    ("began", "reach"),
    [
        pytest.param(
            transition(TransitionKind.RECOVERY, reach=RestartMode.LOCAL), RestartMode.PROCESSES, id="more is asked for"
        ),
        pytest.param(transition(TransitionKind.RECOVERY, reach=RestartMode.JOB), RestartMode.JOB, id="less is not"),
        pytest.param(
            transition(TransitionKind.RECOVERY, reach=RestartMode.LOCAL, is_budget_checked=True),
            RestartMode.LOCAL,
            id="it is decided already",
        ),
        pytest.param(transition(reach=RestartMode.LOCAL), RestartMode.LOCAL, id="a planned change"),
    ],
)
def test_a_recovery_is_widened(began: Transition, reach: RestartMode) -> None:
    record = trains(transition=began)
    after = widen_restart(record, replicas_of(record, (pod(0), faulted(restart_mode=RestartMode.PROCESSES))))
    assert after.transition is not None
    assert after.transition.reach is reach
    assert widen_restart(trains(), replicas_of(trains(), (pod(0), faulted(restart_mode=RestartMode.JOB)))) == trains()


# ---- whose fault it was

COUNTED = transition(TransitionKind.RECOVERY, cause="WorkerCrash", uses_budget=True)
BOOKED = trains(
    transition=COUNTED,
    retries=2,
    stalled_recoveries=2,
    window=RestartWindow(1, LONG_AGO, 2, 0),
    faulty_replicas=(FaultyReplica(pid(1), 1, "b"),),
)


@pytest.mark.parametrize(
    ("mine", "nodes", "cause"),
    [
        pytest.param(None, [], "PodLost", id="the pod is gone"),
        pytest.param((pod(0), running()), OUT[:1], "NodeOutOfService", id="its node is lost"),
        pytest.param((pod(0, phase="Failed", kill_at=NOW), None), [], "PodLost", id="it was deleted"),
        pytest.param((pod(0, phase="Failed", disruption="Preempted"), None), [], "PodLost", id="it was evicted"),
        pytest.param((pod(0, phase="Failed"), None), [], None, id="it ended by itself"),
        pytest.param((pod(0), faulted()), [], None, id="it is there"),
    ],
)
def test_whom_to_blame(mine: Seen | None, nodes: list[ObservedNode], cause: str | None) -> None:
    replicas = replicas_of(BOOKED, *([mine] if mine else []), nodes=nodes)
    after = attribute_to_outside(BOOKED, pid(0), replicas.get(pid(0)))
    if cause is None:
        assert after == BOOKED
        return
    assert after.transition is not None
    assert (after.transition.cause, after.transition.uses_budget) == (cause, False)
    assert after.transition.message
    assert (after.retries, after.stalled_recoveries, after.window) == (1, 1, RestartWindow(1, LONG_AGO, 1, 0))
    assert after.faulty_replicas == (FaultyReplica(pid(0), 0, "node-0" if mine else ""),)


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(replace(BOOKED, transition=None), id="nothing is being recovered"),
        pytest.param(replace(BOOKED, transition=transition(uses_budget=True)), id="it is no recovery"),
        pytest.param(replace(BOOKED, transition=replace(COUNTED, uses_budget=False)), id="nothing was counted"),
        pytest.param(replace(BOOKED, transition=replace(COUNTED, is_budget_checked=True)), id="it was decided already"),
    ],
)
def test_nothing_is_given_back_when(record: Record) -> None:
    assert attribute_to_outside(record, pid(0), None) is record


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            RestartWindow(1, LONG_AGO, 1, 0),
            RestartWindow(1, None, 0, 0),
            id="the only one: the window was never opened",
        ),
        pytest.param(RestartWindow(1, LONG_AGO, 1, 2), RestartWindow(1, LONG_AGO, 0, 2), id="full ones keep it open"),
        pytest.param(RestartWindow(1, LONG_AGO, 0, 2), RestartWindow(1, LONG_AGO, 0, 2), id="never below nothing"),
    ],
)
def test_a_restart_is_given_back_to_its_window(before: RestartWindow, after: RestartWindow) -> None:
    record = replace(BOOKED, window=before, retries=0, stalled_recoveries=0)
    given = attribute_to_outside(record, pid(7), None)
    assert given.window == after
    assert (given.retries, given.stalled_recoveries) == (0, 0)
    assert given.faulty_replicas == (FaultyReplica(pid(7), -1, ""),)
    assert given.transition is not None
    assert given.transition.message == "pod workers-7 (incarnation 0) is gone"
