"""How a planned change begins and how a job ends, wherever that is decided."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    Seen,
    agent,
    context,
    job,
    observed,
    pod,
    policy,
    ready,
    running,
    seconds,
    trains,
    transition,
)

from elastipod_operator.api.models import CleanPodPolicy
from elastipod_operator.core.actions import JobEvent, ShutDownAgent
from elastipod_operator.core.context import Context, PlanDraft
from elastipod_operator.core.depth_reasons import DepthReason
from elastipod_operator.core.ending import finish
from elastipod_operator.core.health import assess
from elastipod_operator.core.planned_change import awaits_start, begin
from elastipod_operator.core.reasons import OpenReason, Reason
from elastipod_operator.core.record import PartialGang, Record, Transition, TransitionKind
from elastipod_operator.core.snapshot import AgentState, ObservedAgent

RUN: list[Seen] = [(pod(0), running(step_pace=seconds(2))), (pod(1), running())]


def scene_of(record: Record, *pods: Seen, **changes: Any) -> Context:
    wishes = policy(clean_pods=CleanPodPolicy.NONE)
    snapshot = observed(job(record, wishes), pods, **changes)
    return context(snapshot)


def began(record: Record, *pods: Seen, limit: datetime | None = None) -> Record:
    return begin(
        record, scene_of(record, *pods), TransitionKind.RESIZE, OpenReason("Cause"), "words", target_size=3, limit=limit
    )


def test_a_change_begins_now_with_the_time_for_a_checkpoint() -> None:
    after = began(trains(window_since=LONG_AGO, gang=PartialGang(NOW, 1)), *RUN)
    assert after.transition == Transition(
        kind=TransitionKind.RESIZE, cause=OpenReason("Cause"), message="words", from_size=2, target_size=3, began_at=NOW, detected_at=NOW,
        deadline=NOW + seconds(600), graceful=True, leavers=(), depth_code=DepthReason.NOTHING_KEPT,
    )  # fmt: skip
    assert (after.window_since, after.gang) == (None, None)
    assert after.resize_statistics.step_times == ((2, seconds(2)),), "the pace until then is kept"


@pytest.mark.parametrize(
    ("limit_s", "left_s"),
    [
        pytest.param(None, 600, id="no limit"),
        pytest.param(700, 600, id="a later one"),
        pytest.param(100, 100, id="an earlier one"),
        pytest.param(-5, 0, id="one that has passed"),
    ],
)
def test_the_limit_of_a_change(limit_s: float | None, left_s: float) -> None:
    limit = None if limit_s is None else NOW + seconds(limit_s)
    after = began(trains(), *RUN, limit=limit).transition
    assert after is not None
    assert after.deadline == NOW + seconds(left_s)


@pytest.mark.parametrize(
    ("record", "pods", "graceful"),
    [
        pytest.param(trains(), RUN, True, id="all run"),
        pytest.param(trains(), [(pod(0), running()), (pod(1), ready(1))], True, id="some run"),
        pytest.param(trains(), [(pod(0), ObservedAgent(trying_since=NOW)), (pod(1), ready(1))], True, id="one was not heard yet"),
        pytest.param(trains(), [(pod(0), ready(1)), (pod(1), ready(1))], False, id="nobody runs"),
        pytest.param(trains(), [], False, id="nobody is there"),
        pytest.param(trains(), [(pod(0), running()), (pod(1), ready(0))], False, id="one was not started yet"),
        pytest.param(trains(), [(pod(0), running()), (pod(1), agent(AgentState.INIT, 0))], False, id="one is coming up"),
        pytest.param(trains(transition=transition()), RUN, False, id="between two generations"),
    ],
)  # fmt: skip
def test_whether_there_is_something_to_save(record: Record, pods: list[Seen], graceful: bool) -> None:
    after = began(record, *pods).transition
    assert after is not None
    assert after.graceful is graceful
    assert after.deadline == NOW + seconds(600 if graceful else 30)


@pytest.mark.parametrize(
    ("mine", "awaits"),
    [
        pytest.param(ready(1), True, id="of the generation before"),
        pytest.param(ready(2), False, id="of the present one"),
        pytest.param(ready(None), True, id="one that does not say"),
        pytest.param(agent(AgentState.INIT, 1), True, id="coming up"),
        pytest.param(running(1), False, id="one that runs"),
        pytest.param(agent(AgentState.SHUTDOWN, 1), False, id="one that leaves"),
    ],
)
def test_who_awaits_its_start(mine: ObservedAgent, awaits: bool) -> None:
    replicas = assess(observed(job(trains()), [(pod(0), mine)]))
    assert awaits_start(next(iter(replicas.by_id.values())), trains(generation=2)) is awaits


@pytest.mark.parametrize("outcome", [Reason.FAILED, Reason.COMPLETED])
def test_the_end_of_a_job(outcome: Reason) -> None:
    record = trains(transition=transition(), window_since=LONG_AGO, fault_at=LONG_AGO, gang=PartialGang(NOW, 1))
    step = finish(record, scene_of(record, *RUN), outcome, OpenReason("Reason"), "words")
    assert step == PlanDraft(
        replace(
            record, transition=None, window_since=None, fault_at=None, gang=None, outcome=outcome, outcome_reason=OpenReason("Reason"),
            outcome_message="words", ended_at=NOW,
        ),
        (ShutDownAgent(pod(0).name), ShutDownAgent(pod(1).name)),
        (JobEvent(outcome, "words"),),
        wake_at=NOW + seconds(60),
    )  # fmt: skip


def test_what_every_part_of_a_decision_looks_at() -> None:
    context = scene_of(trains(), *RUN, pod_creation_error="no room")
    assert (context.now, context.key, context.is_refused) == (NOW, "job-uid", True)
    assert not scene_of(trains(), *RUN).is_refused
    assert PlanDraft(trains(), (ShutDownAgent("a"),)).with_actions(
        ShutDownAgent("b"), ShutDownAgent("c")
    ).actions == tuple(map(ShutDownAgent, "abc"))
