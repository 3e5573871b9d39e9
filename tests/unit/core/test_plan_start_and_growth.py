"""Starting and growing: how long a start waits, when a growth is due, who gets which rank."""

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

from elastipod_operator.core.actions import CreatePod, SetFinalizer, StartWorkers, StopWorkers
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Record, TransitionKind
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import AgentState, ObservedAgent

STARTS = Record(transition=transition(TransitionKind.START, began_s=30, target_size=3))


def test_a_new_job_gets_its_finalizer_and_its_pods() -> None:
    todo = plan(observed(job(has_finalizer=False)))
    assert todo.actions[0] == SetFinalizer(True)
    assert [a.pod for a in acts(todo, CreatePod)] == [pid(n) for n in range(2)]
    assert todo.record.transition is not None
    assert todo.record.transition.kind is TransitionKind.START


@pytest.mark.parametrize(
    ("number", "open_s", "size"),
    [
        pytest.param(1, 99, 0, id="nothing trains below the minimum"),
        pytest.param(2, None, 0, id="the window opens at the minimum"),
        pytest.param(2, 59, 0, id="and waits for the wanted size"),
        pytest.param(2, 60, 2, id="but not for ever"),
        pytest.param(3, None, 3, id="the wanted size starts at once"),
        pytest.param(4, None, 3, id="what else is ready makes it grow later"),
    ],
)
def test_the_start(number: int, open_s: float | None, size: int) -> None:
    record = replace(STARTS, window_since=NOW - seconds(open_s) if open_s is not None else None)
    todo = plan(observed(job(record), [(pod(n), ready()) for n in range(number)]))
    assert len(todo.record.members) == size
    assert acts(todo, StartWorkers) == [StartWorkers(pod(n).name, n) for n in range(size)]
    if size:
        assert (todo.record.generation, todo.record.transition, todo.record.master_addr) == (1, None, "10.0.0.0")
        assert [(e.generation, e.to_size, e.kind) for e in todo.history] == [(1, size, TransitionKind.START)]


def test_sizes_between_the_allowed_ones_are_not_taken() -> None:
    wishes = policy(sizes=Sizes((2, 4), 2))
    todo = plan(observed(job(STARTS, wishes), [(pod(n), ready()) for n in range(3)]))
    assert todo.record.members == (pid(0), pid(1))


@pytest.mark.parametrize(
    ("mine", "why"),
    [
        pytest.param(agent(AgentState.INIT, 0), "it has not come up", id="an agent that is coming up"),
        pytest.param(silent(20, state=AgentState.READY), "it is silent", id="a silent agent"),
        pytest.param(ready(terminating=True), "its pod goes", id="an agent whose pod goes"),
    ],
)
def test_nobody_starts_with(mine: ObservedAgent, why: str) -> None:
    todo = plan(observed(job(STARTS), [(pod(0), ready()), (pod(1), mine)]))
    assert not todo.record.members, why


def test_a_start_that_did_not_arrive_is_repeated_with_its_rank() -> None:
    todo = plan(observed(job(trains(running_since=None)), [(pod(0), running()), (pod(1), ready())]))
    assert acts(todo, StartWorkers) == [StartWorkers(pod(1).name, 1)]


def test_workers_of_an_older_generation_that_began_late_are_stopped() -> None:
    todo = plan(observed(job(trains(generation=5, running_since=None)), [(pod(0), running(5)), (pod(1), running(4))]))
    assert acts(todo, StopWorkers) == [StopWorkers(pod(1).name, 4, graceful=False, timeout_s=0)]


def test_workers_of_a_pod_that_is_no_member_are_stopped() -> None:
    todo = plan(observed(job(trains()), [(pod(0), running()), (pod(1), running()), (pod(2), running(1))]))
    assert acts(todo, StopWorkers) == [StopWorkers(pod(2).name, 1, graceful=False, timeout_s=0)]


def test_when_all_run_the_moment_is_noted_once() -> None:
    members = [(pod(0), running()), (pod(1), running())]
    todo = plan(observed(job(trains(running_since=None, started_at=None)), members))
    assert (todo.running_since, todo.record.running_since, todo.record.started_at) == (NOW, NOW, NOW)
    assert plan(observed(job(todo.record), members)).running_since is None


MORE = [(pod(0), running()), (pod(1), running()), (pod(2), ready())]


@pytest.mark.parametrize(
    ("changes", "wishes", "grows"),
    [
        pytest.param({}, {}, False, id="the window opens"),
        pytest.param({"window_since": NOW - seconds(59)}, {}, False, id="and stays open"),
        pytest.param({"window_since": NOW - seconds(60)}, {}, True, id="until scalingTimeout is over"),
        pytest.param({"window_since": NOW - seconds(60), "recovered_at": NOW - seconds(99)}, {"snooze": seconds(100)}, False,
                     id="not in the snooze after a recovery"),
        pytest.param({"window_since": NOW - seconds(60), "recovered_at": NOW - seconds(101)}, {"snooze": seconds(100)}, True,
                     id="after the snooze"),
        pytest.param({"window_since": NOW - seconds(60), "resized_at": NOW - seconds(9)}, {"min_stable": seconds(10)}, False,
                     id="not within minStableSeconds of a resize"),
        pytest.param({"window_since": NOW - seconds(60)}, {"sizes": Sizes((2, 4), 2)}, False, id="not by half an increment"),
        pytest.param({"window_since": NOW - seconds(60)}, {"sizes": Sizes((2,), 2)}, False, id="not beyond the maximum"),
        pytest.param({"window_since": NOW - seconds(60), "running_since": None}, {}, False, id="not before all run"),
    ],
)  # fmt: skip
def test_growth(changes: dict[str, Any], wishes: dict[str, Any], grows: bool) -> None:
    members = MORE if "running_since" not in changes else [MORE[0], (pod(1), ready()), MORE[2]]
    todo = plan(observed(job(trains(**changes), policy(**wishes)), members))
    began = todo.record.transition
    assert (began is not None) is grows
    if grows:
        assert began is not None
        assert (began.kind, began.target_size, began.graceful) == (TransitionKind.RESIZE, 3, True)
        assert acts(todo, StopWorkers) == [
            StopWorkers(pod(n).name, 1, graceful=True, timeout_s=600, leaves=False) for n in range(2)
        ]


def test_growth_does_not_begin_while_a_member_is_out_of_sight() -> None:
    record = trains(window_since=LONG_AGO)
    todo = plan(
        observed(job(record), [(pod(0), silent(20)), (pod(1), running(step=3, step_at=NOW)), (pod(2), ready())])
    )
    assert todo.record.transition is None


def test_what_was_ready_before_the_first_step_opens_the_window_at_once() -> None:
    todo = plan(observed(job(trains(running_since=None)), MORE))
    assert todo.record.running_since == NOW
    assert todo.wake_at == NOW


def test_a_drained_job_starts_again_in_the_next_generation_with_the_survivors_first() -> None:
    record = trains(transition=transition(target_size=3))
    drained = ready(1, drained=True)
    todo = plan(observed(job(record), [(pod(2), ready()), (pod(0), drained), (pod(1), drained)]))
    assert todo.record.generation == 2
    assert todo.record.members == (pid(0), pid(1), pid(2))
    assert [(e.kind, e.from_size, e.to_size) for e in todo.history] == [(TransitionKind.RESIZE, 2, 3)]


def test_a_generation_is_above_everything_that_any_agent_ever_ran() -> None:
    todo = plan(observed(job(replace(STARTS, generation=3)), [(pod(n), ready(7)) for n in range(4)]))
    assert todo.record.generation == 8


def test_a_lost_record_is_made_anew_above_what_the_agents_run() -> None:
    todo = plan(observed(job(None), [(pod(0), running(6)), (pod(1), running(6))]))
    assert todo.record.transition is not None
    assert (todo.record.generation, todo.record.transition.cause) == (6, "RecordLost")
    assert len(acts(todo, StopWorkers)) == 2
    assert plan(observed(job(todo.record), [(pod(n), ready(6)) for n in range(2)])).record.generation == 7


def test_a_lost_record_with_agents_that_answer_late_is_made_anew_all_the_same() -> None:
    unheard = ObservedAgent(trying_since=NOW)
    first = plan(observed(job(None), [(pod(0), unheard), (pod(1), unheard)]))
    then = plan(observed(job(first.record), [(pod(0), running(6)), (pod(1), running(6))]))
    assert len(acts(then, StopWorkers)) == 2
    assert not then.record.members
    last = plan(observed(job(then.record, policy(2, 2)), [(pod(0), ready(6)), (pod(1), ready(6))]))
    assert last.record.generation == 7
