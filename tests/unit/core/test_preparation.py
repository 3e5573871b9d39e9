"""Workers of new replicas are prepared while the others train, where the change that takes them leaves those their processes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    acts,
    job,
    observed,
    pid,
    pod,
    policy,
    ready,
    running,
    seconds,
    trains,
    transition,
)

from elastipod_operator.core.actions import AssignSpare, Plan, PrepareWorkers, StopWorkers
from elastipod_operator.core.plan import plan
from elastipod_operator.core.preparation import PREPARATION_LIMIT
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import Depth, Record, TransitionKind
from elastipod_operator.core.snapshot import ObservedAgent, Preparation, SpecLimits

KEEPS: dict[str, Any] = {"memory_state": "replicated"}
CAN: dict[str, Any] = {"can_prepare": True}
DUE = NOW - seconds(60)  # builders.policy: scalingTimeoutInSeconds is 60


def decide(
    *newcomers: ObservedAgent, record: Record | None = None, members: list[ObservedAgent] | None = None, **wishes: Any
) -> Plan:
    """Decide about a job of two members, beside which these agents are ready. Its window is due now, unless the record says other."""
    trained = members or [running(1, step=5, **KEEPS) for _ in range(2)]
    pods = [(pod(n), one) for n, one in enumerate([*trained, *newcomers])]
    return plan(observed(job(record or trains(2, window_since=DUE), policy(2, 4, **wishes)), pods))


def prepared(todo: Plan) -> list[str]:
    return [one.pod for one in acts(todo, PrepareWorkers)]


@pytest.mark.parametrize("since", [None, NOW, DUE], ids=["at once", "while the window is open", "when it is due"])
def test_a_new_replica_prepares_its_workers_while_the_others_train(since: Any) -> None:
    todo = decide(ready(0, **CAN), record=trains(2, window_since=since))
    assert prepared(todo) == ["job-workers-2"]
    assert todo.record.transition is None
    assert todo.record.window_since == (since or NOW)


def test_a_growth_waits_for_members_whose_workers_still_start() -> None:
    """They were made anew in a recovery: the growth would end them before they hold anything."""
    at_the_barrier = ready(0, **CAN, **KEEPS, preparation=Preparation.READY)
    members = [running(1, step=5, **KEEPS), running(1, **CAN)]
    todo = decide(at_the_barrier, members=members)
    assert todo.record.transition is None
    assert todo.wake_at is not None
    (scaling,) = [one for one in todo.conditions if one.type == "Scaling"]
    assert scaling.reason == Reason.WARMING_UP
    assert "new workers of the present size still start; the job grows when they train, at" in scaling.message
    late = decide(
        at_the_barrier,
        members=members,
        record=trains(2, window_since=NOW - seconds(60) - PREPARATION_LIMIT),
    )
    assert late.record.transition is not None, "not for ever"
    assert late.record.transition.depth is Depth.MEMORY


@pytest.mark.parametrize(
    ("newcomer", "is_awaited"),
    [
        pytest.param({**CAN, "preparation": Preparation.BEGUN}, True, id="under way"),
        pytest.param({**CAN, **KEEPS, "preparation": Preparation.BEGUN}, True, id="announced, not at the barrier yet"),
        pytest.param({**CAN, **KEEPS, "preparation": Preparation.READY}, False, id="at the barrier"),
        pytest.param({**CAN, "preparation": Preparation.FAILED}, False, id="failed: they start with the generation"),
        pytest.param({**CAN, **KEEPS, "num_kept": 1}, False, id="a former member that kept its workers"),
        pytest.param(
            {**CAN, "restart_mode": "in_process_restart"}, False, id="workers that start before any generation"
        ),
        pytest.param({}, False, id="an agent of the previous version"),
    ],
)
def test_a_growth_that_is_due_waits_for_workers_on_their_way_and_orders_them_once(
    newcomer: dict[str, Any], is_awaited: bool
) -> None:
    todo = decide(ready(0, **newcomer))
    assert not prepared(todo)
    assert (todo.record.transition is None) is is_awaited
    assert bool(acts(todo, StopWorkers)) is not is_awaited


@pytest.mark.parametrize(
    ("members", "wishes"),
    [
        pytest.param([running(1, step=5), running(1, step=5)], {}, id="workers that keep nothing"),
        pytest.param([running(1, **KEEPS), running(1, step=5)], {}, id="one that keeps nothing"),
        pytest.param(
            [running(1, **KEEPS), running(1, step=5)], {"new_processes": True}, id="one, and new processes are wanted"
        ),
    ],
)
def test_nothing_is_prepared_or_awaited_where_workers_do_not_wait_at_the_barrier(
    members: list[ObservedAgent], wishes: dict[str, Any]
) -> None:
    todo = decide(ready(0, **CAN), members=members, **wishes)
    assert not prepared(todo)
    assert todo.record.transition is not None


@pytest.mark.parametrize("new_processes", [False, True])
def test_workers_are_prepared_where_all_are_to_get_new_processes_too(new_processes: bool) -> None:
    """New workers import, build and follow ahead all the same: what they have followed is compared with the checkpoint."""
    todo = decide(ready(0, **CAN), new_processes=new_processes)
    assert acts(todo, PrepareWorkers) == [PrepareWorkers("job-workers-2")]
    assert todo.record.transition is None, "the growth waits for them"
    at_the_barrier = decide(
        ready(0, **CAN, **KEEPS, preparation=Preparation.READY), new_processes=new_processes
    ).record.transition
    assert at_the_barrier is not None
    assert at_the_barrier.depth is (Depth.PROCESS if new_processes else Depth.MEMORY)


@pytest.mark.parametrize(
    ("late_s", "waits"), [pytest.param(-1.0, True, id="before the limit"), pytest.param(0.0, False, id="at the limit")]
)
def test_a_growth_waits_no_longer_than_the_limit(late_s: float, waits: bool) -> None:
    record = trains(2, window_since=DUE - PREPARATION_LIMIT - seconds(late_s))
    todo = decide(ready(0, **CAN, preparation=Preparation.BEGUN), record=record)
    assert (todo.record.transition is None) is waits
    if waits:
        assert todo.wake_at == NOW + seconds(-late_s)
    else:
        assert todo.record.transition is not None
        assert todo.record.transition.depth is Depth.MEMORY


def test_every_ready_replica_is_prepared_and_only_those_of_the_next_size_are_awaited() -> None:
    """Four may train. The fifth is a spare."""
    wishes: dict[str, Any] = {"specs": (SpecLimits("workers", 4, spares=1),)}
    begun, done = (ready(0, **CAN, preparation=how) for how in (Preparation.BEGUN, Preparation.READY))
    todo = decide(ready(0, **CAN), ready(0, **CAN), ready(0, **CAN), **wishes)
    assert prepared(todo) == ["job-workers-2", "job-workers-3", "job-workers-4"]
    todo = decide(done, replace(done, **KEEPS), begun, **wishes)
    assert todo.record.transition is not None, "nobody waits for a spare"


def test_a_spare_prepares_its_workers_for_the_recovery_that_takes_it() -> None:
    wishes: dict[str, Any] = {"specs": (SpecLimits("workers", 4, spares=1),), "sizes": policy(2, 2).sizes}
    todo = decide(ready(0, **CAN), record=trains(2), **wishes)
    assert prepared(todo) == ["job-workers-2"]
    assert acts(todo, AssignSpare)


def test_an_agent_that_imports_modules_is_told_when_it_has_them() -> None:
    todo = decide(ready(0, **CAN, warming=True, answering_since=NOW - seconds(5)))
    assert not prepared(todo)
    assert todo.record.transition is None
    late = decide(ready(0, **CAN, warming=True, answering_since=LONG_AGO))
    assert late.record.transition is not None, (
        "a growth does not wait for imports without end, and then prepares nothing"
    )


@pytest.mark.parametrize("depth", list(Depth))
def test_replicas_that_come_while_the_others_are_stopped_prepare_only_for_a_change_in_memory(depth: Depth) -> None:
    begun = transition(TransitionKind.RECOVERY, target_size=4, depth=depth, graceful=False)
    members = [ready(1, memory_state="replicated", num_kept=1), running(1, **KEEPS)]
    todo = decide(ready(0, **CAN), record=trains(2, transition=begun), members=members)
    assert prepared(todo) == (["job-workers-2"] if depth is Depth.MEMORY else [])


def test_members_of_the_next_generation_are_started_and_not_prepared() -> None:
    begun = transition(TransitionKind.RECOVERY, target_size=3, depth=Depth.MEMORY, graceful=False)
    members = [ready(1, memory_state="replicated", num_kept=1) for _ in range(2)]
    todo = decide(ready(0, **CAN), record=trains(2, transition=begun), members=members)
    assert todo.record.members == (pid(0), pid(1), pid(2))
    assert not prepared(todo)


def test_a_pod_that_is_lost_meanwhile_closes_the_window() -> None:
    begun = ready(0, **CAN, preparation=Preparation.BEGUN, last_answer=NOW - timedelta(minutes=5))
    todo = decide(begun)
    assert not prepared(todo)
    assert (todo.record.transition, todo.record.window_since) == (None, None)


def test_the_condition_says_what_the_growth_waits_for() -> None:
    pods = [(pod(n), running(1, **KEEPS)) for n in range(2)] + [
        (pod(2), ready(0, **CAN, preparation=Preparation.BEGUN))
    ]
    todo = plan(observed(job(trains(2, window_since=DUE), policy(2, 4)), pods))
    (scaling,) = [one for one in todo.conditions if one.type == "Scaling"]
    assert scaling.reason == Reason.WARMING_UP
    assert "1 more replica" in scaling.message
    assert "at the latest" in scaling.message


def test_a_job_that_is_suspended_prepares_nothing() -> None:
    todo = decide(ready(0, **CAN), suspend=True)
    assert not prepared(todo)
    assert todo.record.transition is not None
    assert todo.record.transition.kind is TransitionKind.SUSPEND
