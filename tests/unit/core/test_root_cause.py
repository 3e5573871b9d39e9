"""Whose fault it was: what is found after a recovery has begun."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    Seen,
    faulted,
    pid,
    pod,
    replicas_of,
    running,
    trains,
    transition,
)

from elastipod_operator.core.record import FaultyReplica, Record, RestartWindow, TransitionKind
from elastipod_operator.core.root_cause import attribute_to_outside
from elastipod_operator.core.snapshot import ObservedNode

OUT = [ObservedNode(name=f"node-{n}", out_of_service=True) for n in range(9)]

COUNTED = transition(TransitionKind.RECOVERY, cause="WorkerCrash", uses_budget=True)
BOOKED = trains(
    transition=COUNTED,
    retries=2,
    stalled_recoveries=2,
    failures_in_place=2,
    failed_in_place=(pid(1),),
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
    assert (after.failures_in_place, after.failed_in_place) == (1, (pid(1),)), "it has failed before"


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
