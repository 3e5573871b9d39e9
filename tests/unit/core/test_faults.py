"""What broke, fact by fact; test_plan_after_faults tells the same as stories."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import (
    NOW,
    Seen,
    agent,
    faulted,
    pid,
    pod,
    ready,
    replicas_of,
    running,
    seconds,
    silent,
    trains,
    transition,
)

from elastipod_operator.core.faults import Fault, failure_text, find_fault, first_line
from elastipod_operator.core.reasons import OpenReason, Reason
from elastipod_operator.core.record import FaultyReplica, Record
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


def test_an_agents_own_sentence_ends_with_its_line() -> None:
    assert first_line("EADDRINUSE: port 10010\nTraceback\n...") == "EADDRINUSE: port 10010"
    assert first_line("EADDRINUSE") == "EADDRINUSE"
