"""Agents that answer and do not do what they are told, or tell what cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    acts,
    agent,
    faulted,
    job,
    missed,
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

from elastipod_operator.core.actions import DeletePod, StartWorkers, StopWorkers
from elastipod_operator.core.faults import START_LIMIT, STARTS_TRIED
from elastipod_operator.core.health import assess
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Record, RestartMode, TransitionKind
from elastipod_operator.core.replica import MAX_GENERATION, Health
from elastipod_operator.core.snapshot import AgentState, Failure, ObservedAgent

TAKEN = "EADDRINUSE: master port 10010 is in use on this host"


def starts(ago_s: float, **changes: Any) -> Record:
    """The workers of generation 2 were told to start so long ago."""
    return trains(generation=2, running_since=None, generation_began_at=NOW - seconds(ago_s), **changes)


def decided(record: Record, *agents: ObservedAgent) -> Any:
    return plan(observed(job(record), [(pod(n), a) for n, a in enumerate(agents)]))


# ---- who does not take a /start


def test_a_start_is_repeated_for_a_while() -> None:
    todo = decided(starts(START_LIMIT.total_seconds() - 1), running(2), ready(1))
    assert acts(todo, StartWorkers) == [StartWorkers(pod(1).name, 1)]
    assert todo.record.transition is None


def test_who_took_it_and_was_drained_before_all_ran_is_not_blamed() -> None:
    """Somebody else asked it to stop: that is a drain, and no start that was not taken."""
    todo = decided(starts(START_LIMIT.total_seconds()), running(2), ready(2, drained=True))
    begun = todo.record.transition
    assert begun is not None
    assert (begun.kind, begun.cause, todo.record.lost) == (TransitionKind.RESIZE, "DrainedFromOutside", ())


def test_who_does_not_take_it_while_others_wait_for_it_is_given_up() -> None:
    todo = decided(starts(START_LIMIT.total_seconds()), running(2), ready(1))
    begun = todo.record.transition
    assert begun is not None
    assert (begun.cause, begun.uses_budget, todo.record.retries) == ("StartNotTaken", False, 0)
    assert "did not start the workers of generation 2 within 60 s" in begun.message
    assert todo.record.lost == (pid(1),)


@pytest.mark.parametrize(
    ("failures", "lost"),
    [
        pytest.param(0, (), id="it may be that no call arrives: the next generation is tried"),
        pytest.param(STARTS_TRIED, (pid(0), pid(1)), id="again and again: they are recreated"),
    ],
)
def test_when_nobody_takes_it(failures: int, lost: tuple[object, ...]) -> None:
    todo = decided(starts(60, consecutive_failures=failures), ready(1), ready(1))
    assert (todo.record.restarts, todo.record.retries, todo.record.lost) == (1, 0, lost)


def test_who_is_given_up_over_it_is_replaced_at_once() -> None:
    """Its pod may go as soon as the record says so; the time of the next try is no reason to wait for that."""
    todo = decided(starts(60, consecutive_failures=STARTS_TRIED), ready(1), ready(1))
    assert todo.wake_at == NOW
    after = decided(todo.record, ready(1), ready(1))
    assert {action.name for action in acts(after, DeletePod)} == {pod(0).name, pod(1).name}


def test_who_is_still_stopping_an_older_generation_has_the_same_time() -> None:
    """It is told nothing meanwhile, so that only a time to look again ends the wait."""
    stopping = agent(AgentState.STOPPING, 1)
    before = decided(starts(START_LIMIT.total_seconds() - 1), running(2), stopping)
    assert before.record.transition is None
    assert before.wake_at == NOW + seconds(1)
    begun = decided(starts(START_LIMIT.total_seconds()), running(2), stopping).record.transition
    assert begun is not None
    assert begun.cause == "StartNotTaken"


@pytest.mark.parametrize(
    ("record", "other"),
    [
        pytest.param(starts(300), ready(1, answering_since=NOW - seconds(5)), id="the operator has just begun"),
        pytest.param(
            trains(generation=2, generation_began_at=LONG_AGO), ready(1, trying_since=NOW), id="all ran before"
        ),
        pytest.param(trains(generation=2, running_since=None), ready(1), id="an older operator started it"),
        pytest.param(starts(300), silent(10, state=AgentState.RUNNING, generation=2), id="it took it"),
    ],
)
def test_who_is_not_blamed(record: Record, other: ObservedAgent) -> None:
    todo = decided(record, running(2), other)
    assert todo.record.transition is None or todo.record.transition.cause != "StartNotTaken"
    assert todo.record.lost == ()


# ---- the master port


def in_use(generation: int = 1, **changes: Any) -> ObservedAgent:
    failure = Failure(0, 1, "", "Traceback ...\nOSError: address in use")
    return agent(AgentState.FAULTED, generation, reason="WorkerFault", message=TAKEN, failure=failure, **changes)


@pytest.mark.parametrize(
    "agents",
    [
        pytest.param((in_use(), running()), id="alone"),
        pytest.param((in_use(), faulted()), id="the others failed over it"),
        pytest.param((faulted(), in_use()), id="whoever is looked at first"),
    ],
)
def test_a_master_port_that_is_taken_costs_no_budget(agents: tuple[ObservedAgent, ObservedAgent]) -> None:
    todo = decided(trains(), *agents)
    begun = todo.record.transition
    assert begun is not None
    assert (begun.cause, begun.message, begun.uses_budget) == ("MasterPortTaken", TAKEN, False)
    assert (todo.record.retries, todo.record.window.restarts, todo.record.restarts) == (0, 0, 1)


def test_what_was_counted_before_it_was_known_is_given_back() -> None:
    first = decided(trains(), running(), faulted())
    assert (first.record.retries, first.record.window.restarts) == (1, 1)
    second = decided(first.record, in_use(), faulted())
    assert (second.record.retries, second.record.window.restarts) == (0, 0)
    assert second.record.transition is not None
    assert second.record.transition.cause == "MasterPortTaken"


def test_a_word_of_an_older_generation_proves_nothing() -> None:
    todo = decided(trains(generation=2), agent(AgentState.RUNNING, 2), faulted(2, message=TAKEN))
    assert todo.record.retries == 1, "the message of a worker is not the agent's"


# ---- generations that nobody can have run


def test_an_enormous_generation_is_not_believed() -> None:
    replicas = assess(observed(job(trains()), [(pod(0), running()), (pod(1), running(MAX_GENERATION + 1))]))
    assert replicas.highest_generation() == 1


def test_the_newest_that_can_be_is() -> None:
    replicas = assess(observed(job(trains()), [(pod(0), running(MAX_GENERATION)), (pod(1), running())]))
    assert replicas.highest_generation() == MAX_GENERATION


@pytest.mark.parametrize(("claimed", "named"), [(7, 7), (MAX_GENERATION, MAX_GENERATION), (MAX_GENERATION + 1, 2)])
def test_a_stop_names_no_generation_that_would_keep_the_agent_from_every_start(claimed: int, named: int) -> None:
    stops = acts(decided(trains(generation=2), running(2), running(claimed)), StopWorkers)
    assert {stop.generation for stop in stops if stop.pod == pod(1).name} == {named}


# ---- a checkpoint that takes long


@pytest.mark.parametrize(
    ("saving", "health"),
    [
        pytest.param(True, Health.SILENT, id="they save: no step is expected, however long it takes"),
        pytest.param(False, Health.LOST, id="they do not say so: they stand still for somebody who is gone"),
    ],
)
def test_members_that_save_do_not_prove_that_a_silent_one_is_dead(saving: bool, health: Health) -> None:
    saves = agent(AgentState.STOPPING, saving=saving, step=70, step_at=NOW - seconds(900), step_pace=seconds(1))
    drains = trains(transition=transition(began_s=900, deadline=NOW + seconds(900)))
    replicas = assess(observed(job(drains), [(pod(0), missed(600)), (pod(1), saves)]))
    assert replicas.by_id[pid(0)].health is health


def test_a_save_of_more_than_ten_minutes_is_waited_for_as_long_as_its_time_lasts() -> None:
    saves = agent(AgentState.STOPPING, saving=True, step=70, step_at=NOW - seconds(900), step_pace=seconds(1))
    drains = trains(transition=transition(began_s=900, deadline=NOW + seconds(900)))
    todo = decided(drains, saves, saves)
    assert not acts(todo, StopWorkers)
    assert not acts(todo, DeletePod)
    assert todo.record.transition is not None
    assert todo.record.transition.kind is TransitionKind.RESIZE


# ---- spec.elastipod.recovery


@pytest.mark.parametrize(
    ("new_processes", "asked", "reach"),
    [
        pytest.param(
            False, "in_process_restart", RestartMode.IN_PROCESS, id="Auto: workers outlive a fault where they can"
        ),
        pytest.param(True, "in_process_restart", RestartMode.PROCESSES, id="Process: all get new processes"),
        pytest.param(True, "job_level_restart", RestartMode.JOB, id="Process: who asks for more gets it"),
    ],
)
def test_how_workers_come_back(new_processes: bool, asked: str, reach: RestartMode) -> None:
    wishes = policy(new_processes=new_processes)
    pods = [(pod(0), faulted(restart_mode=asked)), (pod(1), running(restart_mode="in_process_restart"))]
    todo = plan(observed(job(trains(), wishes), pods))
    assert todo.record.transition is not None
    assert todo.record.transition.reach is reach
    assert {stop.reach for stop in acts(todo, StopWorkers)} == {reach}


# ---- a member that does not answer any more


@pytest.mark.parametrize(
    ("said", "graceful"),
    [
        pytest.param(
            silent(20, state=AgentState.READY, generation=1), True, id="what it said before its start is no news"
        ),
        pytest.param(ready(1), False, id="it has not started yet: there is nothing to save"),
    ],
)
def test_a_drain_when_a_member_was_last_heard_before_its_start(said: ObservedAgent, graceful: bool) -> None:
    pods = [(pod(0), running(2)), (pod(1), said)]
    todo = plan(observed(job(trains(generation=2), policy(suspend=True)), pods))
    assert {stop.graceful for stop in acts(todo, StopWorkers)} == {graceful}
