"""A job that is suspended in a resize in memory: what no checkpoint holds yet is saved before the workers end."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.builders import NOW, acts, job, observed, pod, policy, ready, running, seconds, trains, transition

from elastipod_operator.core.actions import DeletePod, Plan, StartWorkers, StopWorkers
from elastipod_operator.core.growth import CAUSE
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Depth, Record, TransitionKind
from elastipod_operator.core.snapshot import ObservedAgent

KEPT = ready(1, memory_state="replicated", num_kept=1, drained=True)
COLD = ready(0, warming=True, answering_since=NOW - seconds(1))
STARTED = running(2, memory_state="replicated")


def decide(record: Record, *agents: ObservedAgent, low: int = 1) -> Plan:
    pods = [(pod(n), one) for n, one in enumerate(agents)]
    return plan(observed(job(record, policy(low, 4, suspend=True)), pods))


def resize(**changes: Any) -> Record:
    return trains(2, transition=transition(**{"depth": Depth.MEMORY, "graceful": False, **changes}))


def test_workers_that_stopped_with_their_state_in_memory_are_started_once_more() -> None:
    todo = decide(resize(), KEPT, KEPT)
    assert (len(acts(todo, StartWorkers)), todo.record.generation, todo.record.transition) == (2, 2, None)
    assert not acts(todo, DeletePod)


@pytest.mark.parametrize(
    ("record", "agents", "low"),
    [
        pytest.param(resize(depth=Depth.PROCESS), [ready(1, drained=True)] * 2, 1, id="they have saved"),
        pytest.param(resize(), [ready(1, drained=True)] * 2, 1, id="no process is left"),
        pytest.param(resize(kind=TransitionKind.RECOVERY, is_budget_checked=True), [KEPT, KEPT], 1, id="a recovery may fail again"),
        pytest.param(resize(), [KEPT, ready(1, terminating=True)], 2, id="too few are left"),
        pytest.param(resize(cause=CAUSE, target_size=2), [KEPT, COLD], 2, id="too few are warm for a growth"),
    ],
)  # fmt: skip
def test_others_are_suspended_at_once(record: Record, agents: list[ObservedAgent], low: int) -> None:
    todo = decide(record, *agents, low=low)
    assert todo.record.transition is not None
    assert todo.record.transition.kind is TransitionKind.SUSPEND
    assert len(acts(todo, DeletePod)) == 2


@pytest.mark.parametrize(
    ("agents", "since_s", "waits"),
    [
        pytest.param([KEPT, KEPT], 1, True, id="nobody has taken the start"),
        pytest.param([STARTED, KEPT], 1, True, id="one has"),
        pytest.param([STARTED, KEPT], 60, False, id="the other does not in a minute"),
        pytest.param([ready(1), ready(1)], 1, False, id="workers that keep nothing"),
    ],
)
def test_the_suspension_waits_until_they_run(agents: list[ObservedAgent], since_s: float, waits: bool) -> None:
    record = trains(2, generation=2, running_since=None, generation_began_at=NOW - seconds(since_s))
    todo = decide(record, *agents)
    assert (todo.record.transition is None) is waits
    assert bool(acts(todo, StartWorkers)) is waits
    if waits:
        assert todo.wake_at is not None
        assert todo.wake_at <= NOW + seconds(60 - since_s)


def test_then_they_save() -> None:
    todo = decide(trains(2, generation=2), STARTED, STARTED)
    assert todo.record.transition is not None
    assert (todo.record.transition.kind, todo.record.transition.graceful) == (TransitionKind.SUSPEND, True)
    assert [(one.graceful, one.keeps) for one in acts(todo, StopWorkers)] == [(True, False)] * 2
