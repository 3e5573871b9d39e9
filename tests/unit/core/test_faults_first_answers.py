"""An operator that has just taken over knows what workers keep in memory only when their agents have answered it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.builders import (
    NOW,
    acts,
    faulted,
    job,
    observed,
    pod,
    policy,
    running,
    seconds,
    trains,
    transition,
)

from elastipod_operator.core.actions import Plan, StopWorkers
from elastipod_operator.core.faults import FIRST_ANSWER
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Depth, Record, TransitionKind
from elastipod_operator.core.snapshot import ObservedAgent

KEEPS: dict[str, Any] = {"memory_state": "replicated"}
CRASHED = faulted(memory_state="replicated")
JUST_CALLED = ObservedAgent(trying_since=NOW - seconds(0.1))
CALLED_LONG_AGO = ObservedAgent(trying_since=NOW - FIRST_ANSWER)
DRAINS = trains(
    2, transition=transition(TransitionKind.RESIZE, graceful=True, target_size=1, deadline=NOW + seconds(60))
)


def decided(record: Record, *agents: ObservedAgent, **changes: Any) -> Plan:
    pods = [(pod(number), each) for number, each in enumerate(agents)]
    return plan(observed(job(record, changes.pop("wishes", policy(1, 4))), pods, **changes))


@pytest.mark.parametrize("record", [trains(2), DRAINS], ids=["while it trains", "in a drain"])
def test_a_recovery_waits_for_the_first_answers_of_those_that_may_keep_the_state(record: Record) -> None:
    waiting = decided(record, CRASHED, JUST_CALLED)
    assert (waiting.record.restarts, waiting.record.transition) == (record.restarts, record.transition)
    assert not acts(waiting, StopWorkers)
    assert waiting.wake_at == NOW - seconds(0.1) + FIRST_ANSWER

    answered = decided(record, CRASHED, running(1, **KEEPS))
    assert answered.record.transition is not None
    assert (answered.record.transition.kind, answered.record.transition.depth) == (
        TransitionKind.RECOVERY,
        Depth.MEMORY,
    )


def test_a_recovery_waits_no_longer_than_an_answer_takes() -> None:
    late = decided(trains(2), CRASHED, CALLED_LONG_AGO)
    assert late.record.transition is not None
    assert (late.record.transition.kind, late.record.transition.depth) == (TransitionKind.RECOVERY, Depth.PROCESS)


def test_a_replica_that_is_lost_is_not_waited_for() -> None:
    gone = pod(1, phase="Failed", started=True)
    todo = plan(observed(job(trains(2), policy(1, 4)), [(pod(0), running(1, **KEEPS)), (gone, JUST_CALLED)]))
    assert todo.record.transition is not None
    assert todo.record.transition.depth is Depth.MEMORY


def test_a_planned_change_waits_as_well() -> None:
    wishes = policy(1, 1)
    waiting = decided(trains(2), running(1, **KEEPS), JUST_CALLED, wishes=wishes)
    assert waiting.record.transition is None
    assert waiting.wake_at is not None
    assert waiting.wake_at <= NOW - seconds(0.1) + FIRST_ANSWER

    answered = decided(trains(2), running(1, **KEEPS), running(1, **KEEPS), wishes=wishes)
    assert answered.record.transition is not None
    assert answered.record.transition.depth is Depth.MEMORY
