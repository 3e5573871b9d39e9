"""How the workers of a generation are brought to a stop, second by second."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    Seen,
    acts,
    agent,
    context,
    faulted,
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

from elastipod_operator.core.actions import Action, DeletePod, ShutDownAgent, StartWorkers, StopWorkers
from elastipod_operator.core.names import PodId, Slot
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Depth, Record, RestartMode, TransitionKind
from elastipod_operator.core.snapshot import AgentState, ObservedAgent
from elastipod_operator.core.stopping import is_hard_stop_due, stop_members

STOPPING = agent(AgentState.STOPPING)
PARKED = (pod(1), ready(1, drained=True))


def stop(record: Record, *pods: Seen, **changes: Any) -> tuple[Record, list[Action], datetime | None]:
    snapshot = observed(job(record), pods, **changes)
    return stop_members(record, context(snapshot))


def draining(left_s: float, **changes: Any) -> Record:
    """Give a job in a drain whose deadline is so far away; it began ten minutes before that."""
    return trains(transition=transition(began_s=600 - left_s, deadline=NOW + seconds(left_s), **changes))


@pytest.mark.parametrize(
    ("left_s", "wait_s"),
    [
        pytest.param(60, 75, id="fifteen seconds after its time a hard stop is due"),
        pytest.param(-10, 5, id="which is not far away now"),
        pytest.param(-14.5, 1, id="but nobody is looked at more than once a second"),
        pytest.param(-15, 30, id="then it is given up, 45 seconds after its time"),
        pytest.param(-44.5, 1, id="which is not far away now"),
    ],
)
def test_who_does_not_stop_is_looked_at_again(left_s: float, wait_s: float) -> None:
    assert stop(draining(left_s), (pod(0), STOPPING), PARKED)[2] == NOW + seconds(wait_s)


def test_several_are_looked_at_when_the_first_of_them_is_due() -> None:
    late = agent(AgentState.STOPPING, answering_since=NOW)
    assert stop(draining(-20), (pod(0), late), (pod(1), STOPPING))[2] == NOW + seconds(25)


def test_nobody_is_waited_for_once_all_are_parked() -> None:
    record = draining(60)
    ended = (pod(2, phase="Failed"), None)
    assert stop(record, (pod(0), ready(1)), PARKED, ended) == (record, [], None)


@pytest.mark.parametrize(
    ("left_s", "is_lost"), [pytest.param(-44.9, False, id="not yet"), pytest.param(-45, True, id="then")]
)
def test_who_never_stops_is_given_up(left_s: float, is_lost: bool) -> None:
    record = draining(left_s)
    after, actions, wake = stop(record, (pod(0), STOPPING), PARKED)
    assert after.lost == ((pid(0),) if is_lost else ())
    if is_lost:
        assert actions == [
            ShutDownAgent(pod(0).name),
            DeletePod(pod(0).name, pod(0).uid, "its agent did not stop its workers in time"),
        ]
        assert wake is None
        again = replace(after, lost=(pid(3), pid(0)))
        assert stop(again, (pod(0), STOPPING), PARKED) == (again, [], None), "once"


@pytest.mark.parametrize(
    ("depth", "seen", "late_s", "suspend", "is_lost"),
    [
        pytest.param(Depth.MEMORY, STOPPING, 644, False, False, id="a model may take minutes to build"),
        pytest.param(Depth.MEMORY, STOPPING, 645, False, True, id="not for ever"),
        pytest.param(Depth.MEMORY, STOPPING, 45, True, True, id="who must return the quota does not wait for it"),
        pytest.param(Depth.MEMORY, faulted(), 45, False, True, id="who cannot end a process builds none"),
        pytest.param(Depth.MEMORY, silent(60), 45, False, True, id="nor who is not heard of"),
        pytest.param(Depth.PROCESS, STOPPING, 45, False, True, id="where nothing is kept, nothing is built"),
    ],
)
def test_who_keeps_workers_may_build_successors_of_others(
    depth: Depth, seen: ObservedAgent, late_s: float, suspend: bool, is_lost: bool
) -> None:
    change = transition(
        TransitionKind.RECOVERY, began_s=600, deadline=NOW - seconds(late_s), graceful=False, depth=depth
    )
    record = trains(transition=change)
    snapshot = observed(job(record, policy(suspend=suspend)), [(pod(0), seen), PARKED])
    after, _, wake = stop_members(record, context(snapshot))
    assert after.lost == ((pid(0),) if is_lost else ())
    assert (wake is None) is is_lost, "who is waited for is looked at again"


def test_who_is_given_up_joins_those_before() -> None:
    record = replace(draining(-45), lost=(pid(7),))
    after, actions, _ = stop(record, (pod(0), STOPPING), (pod(1), STOPPING))
    assert after.lost == (pid(7), pid(0), pid(1))
    assert [a.name for a in actions if isinstance(a, DeletePod)] == [pod(0).name, pod(1).name]


def test_when_all_are_silent_they_are_looked_at_every_second() -> None:
    record = draining(-100)
    assert stop(record, (pod(0), silent(60)), (pod(1), silent(60))) == (record, [], NOW + seconds(1))


@pytest.mark.parametrize(
    ("suspend", "quota_lost", "given_up"),
    [
        pytest.param(False, {Slot("workers", 1): ("Preempted", "for another")}, (pid(1),), id="who has no quota"),
        pytest.param(True, {}, (pid(0), pid(1)), id="all of a job that is suspended"),
    ],
)
def test_who_must_go_is_given_up_also_when_all_are_silent(
    suspend: bool, quota_lost: dict[Slot, tuple[str, str]], given_up: tuple[PodId, ...]
) -> None:
    for left_s, lost in ((-44.9, ()), (-45, given_up)):
        record = draining(left_s)
        snapshot = observed(job(record, policy(suspend=suspend)), [(pod(0), silent(60)), (pod(1), silent(60))])
        after, actions, _ = stop_members(record, context(snapshot, quota_lost=quota_lost))
        assert after.lost == lost
        assert [a.name for a in actions if isinstance(a, DeletePod)] == [pod(one).name for one in lost]


@pytest.mark.parametrize(
    ("mine", "left_s", "expected"),
    [
        pytest.param(running(), 60, (True, 60), id="who runs is asked, with the time that is left"),
        pytest.param(running(), 0.5, (True, 1), id="one second at least"),
        pytest.param(running(), -14.9, (True, 1), id="also when it is over"),
        pytest.param(running(), -15, (False, 0), id="then it is told"),
        pytest.param(running(9), 60, (False, 0), id="a generation that is not the present one has nothing to save"),
        pytest.param(STOPPING, 60, None, id="who stops is left alone"),
        pytest.param(STOPPING, -15, (False, 0), id="not for ever"),
        pytest.param(agent(AgentState.COMPLETED), 60, (False, 0), id="who has finished becomes ready at once"),
        pytest.param(faulted(), 60, (False, 0), id="and who has failed"),
        pytest.param(silent(60), 60, None, id="who is silent does not hear it"),
        pytest.param(agent(None), 60, None, id="who was not heard yet is not called"),
    ],
)
def test_what_a_member_is_told_in_a_drain(
    mine: ObservedAgent, left_s: float, expected: tuple[bool, int] | None
) -> None:
    _, actions, wake = stop(draining(left_s), (pod(0), mine), (pod(1), STOPPING))
    told = [(a.graceful, a.timeout_s) for a in actions if isinstance(a, StopWorkers) and a.pod == pod(0).name]
    assert told == ([] if expected is None else [expected])
    assert wake is not None, "it is waited for"


@pytest.mark.parametrize(
    ("left_s", "leavers", "told"),
    [
        pytest.param(2.1, (0, 1), {}, id="all save as long as they may"),
        pytest.param(
            2, (0, 1), {1: False}, id="before the agents end them, those who may stay come back with what they hold"
        ),
        pytest.param(-15, (0, 1), {0: False, 1: False}, id="those who must go have their time"),
        pytest.param(2, (0,), {}, id="an agent whose pod stays returns its workers by itself"),
    ],
)
def test_a_drain_in_which_all_save_a_checkpoint_costs_nobody_the_state(
    left_s: float, leavers: tuple[int, ...], told: dict[int, bool]
) -> None:
    """One node goes, the job has a fixed size, and so the member that stays was told as well that it leaves."""
    record = draining(left_s, depth=Depth.MEMORY, leavers=tuple(map(pid, leavers)))
    stops = agent(AgentState.STOPPING, memory_state="replicated")
    _, actions, wake = stop(record, (pod(0, disruption="taint"), stops), (pod(1), stops))
    names = [pod(n).name for n in range(2)]
    assert {names.index(a.pod): a.graceful for a in actions if isinstance(a, StopWorkers) and a.keeps} == told
    if left_s == 2.1:
        assert wake == NOW + seconds(1)


def test_in_a_recovery_everybody_is_told_at_once_whichever_generation_runs() -> None:
    record = trains(generation=3, transition=transition(TransitionKind.RECOVERY))
    _, actions, _ = stop(record, (pod(0), running(3)), (pod(1), running(2)), (pod(2), running(1)), (pod(3), ready(1)))
    assert actions == [StopWorkers(pod(n).name, 3 - n, graceful=False, timeout_s=0) for n in range(3)]


def test_a_stranger_that_runs_is_waited_for_and_one_that_does_not_is_none_of_ours() -> None:
    record = trains(1, transition=transition(deadline=NOW + seconds(60)))
    assert stop(record, (pod(0), ready(1)), (pod(5), running()))[2] == NOW + seconds(75)
    assert stop(record, (pod(0), ready(1)), (pod(5), STOPPING), (pod(6), agent(None)))[2] is None


@pytest.mark.parametrize(
    ("since", "kind", "wait_s"),
    [
        pytest.param(LONG_AGO, TransitionKind.RESIZE, 25, id="who was there has until the deadline"),
        pytest.param(NOW - seconds(590), TransitionKind.RESIZE, 25, id="also when it came at the very beginning"),
        pytest.param(
            NOW - seconds(500), TransitionKind.RESIZE, 115, id="who came later has the same time from then on"
        ),
        pytest.param(NOW - seconds(5), TransitionKind.RECOVERY, 25, id="but there is none to be had in a recovery"),
    ],
)
def test_the_time_that_an_agent_has(since: datetime, kind: TransitionKind, wait_s: float) -> None:
    began = transition(kind, began_s=590, deadline=NOW + seconds(10))
    late = agent(AgentState.STOPPING, answering_since=since)
    assert stop(trains(transition=began), (pod(0), late), PARKED)[2] == NOW + seconds(wait_s)


def test_an_agent_that_never_answered_has_its_time_from_the_first_call_on() -> None:
    began = transition(began_s=590, deadline=NOW + seconds(10))
    unheard = ObservedAgent(trying_since=NOW - seconds(5))
    assert stop(trains(transition=began), (pod(0), unheard), PARKED)[2] == NOW + seconds(610)
    assert stop(trains(transition=began), (pod(0), ObservedAgent()), PARKED)[2] == NOW + seconds(25)


@pytest.mark.parametrize(("left_s", "forced"), [(2.1, False), (2, True), (-9, True)])
def test_agents_end_their_workers_by_force_a_little_before_the_deadline(left_s: float, forced: bool) -> None:
    assert is_hard_stop_due(draining(left_s), NOW) is forced


def test_new_processes_that_hold_nothing_may_begin_a_recovery_with_new_processes() -> None:
    """Those of --inprocess-restart are replaced at once, and announce at the barrier what they could keep."""
    parked = ready(1, memory_state="replicated", num_kept=0, restart_mode="in_process_restart")
    begun = transition(
        TransitionKind.RECOVERY, depth=Depth.PROCESS, reach=RestartMode.PROCESSES, is_budget_checked=True
    )
    todo = plan(observed(job(trains(2, transition=begun), policy(2, 2)), [(pod(0), parked), (pod(1), parked)]))
    assert not acts(todo, StopWorkers)
    assert len(acts(todo, StartWorkers)) == 2


def test_a_pod_that_is_given_up_does_not_begin_the_next_generation() -> None:
    begun = transition(TransitionKind.RECOVERY, began_s=76.0 + 30.0, depth=Depth.PROCESS, is_budget_checked=True)
    holds = ready(1, memory_state="replicated", num_kept=1)
    todo = plan(observed(job(trains(2, transition=begun), policy(1, 2)), [(pod(0), holds), (pod(1), ready(1))]))
    assert todo.record.members == (pid(1),)
