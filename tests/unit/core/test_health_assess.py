"""Each fact that makes a pod good, silent, doomed, lost or ended, at its limit."""

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
    faulted,
    job,
    missed,
    observed,
    pid,
    pod,
    ready,
    running,
    seconds,
    silent,
    trains,
)

from elastipod_operator.core.health import assess
from elastipod_operator.core.names import Slot
from elastipod_operator.core.record import Record
from elastipod_operator.core.replica import Health, Replica, Replicas
from elastipod_operator.core.snapshot import AgentState, ObservedAgent, ObservedNode

STEPS = running(step=50, step_at=NOW - seconds(1), step_pace=seconds(2))
AWAY = ObservedNode(name="node-0", ready=False, not_ready_since=NOW - seconds(10))


def replicas_of(*pods: Seen, nodes: Any = (), record: Record | None = None, **changes: Any) -> Replicas:
    return assess(observed(job(trains() if record is None else record), pods, nodes, **changes))


def first(*pods: Seen, **changes: Any) -> Replica:
    return replicas_of(*pods, **changes).by_id[pid(0)]


# ---- what is told of a pod


@pytest.mark.parametrize(
    ("mine", "node", "why", "detail"),
    [
        pytest.param((pod(0, phase="Failed", problem="oom"), None), None, "PodFailed", "oom", id="its own trouble"),
        pytest.param((pod(0, phase="Failed"), None), None, "PodFailed", f"pod {pod(0).name} ended", id="or that it ended"),
        pytest.param((pod(0), running()), ObservedNode(name="node-0", out_of_service=True), "NodeOutOfService",
                     "node node-0 is out of service", id="out of service"),
        pytest.param((pod(0), None), replace(AWAY, not_ready_since=NOW - seconds(601)), "NodeLost",
                     "node node-0 is not ready for more than 600 s", id="away for too long"),
        pytest.param((pod(0), silent(20)), AWAY, "NodeLost", f"node node-0 is not ready and the agent of pod {pod(0).name} is silent",
                     id="silent and away"),
        pytest.param((pod(0), silent(20)), None, "AgentSilent",
                     f"the agent of pod {pod(0).name} on node node-0 is silent; training continues", id="silent"),
        pytest.param((pod(0), running()), ObservedNode(name="node-0", disruption="taint x"), "NodeDrained", "node node-0: taint x",
                     id="a taint"),
        pytest.param((pod(0, disruption="Eviction", kill_at=NOW), running()), None, "PodDisrupted",
                     f"pod {pod(0).name} is being disrupted (Eviction)", id="a disruption comes before its deletion"),
        pytest.param((pod(0, kill_at=NOW), running(terminating=True)), None, "PodDeleted", f"pod {pod(0).name} is being deleted",
                     id="a deletion"),
        pytest.param((pod(0), running(terminating=True)), None, "PodTerminating", f"pod {pod(0).name} was told to end (SIGTERM)",
                     id="a signal"),
        pytest.param((pod(0, kill_at=NOW), running()), ObservedNode(name="node-0", cordoned=True), "NodeDrained",
                     f"pod {pod(0).name} is being deleted; its node node-0 is cordoned", id="a drain"),
        pytest.param((pod(0), running()), None, "", "", id="nothing"),
    ],
)  # fmt: skip
def test_what_is_told(mine: Seen, node: ObservedNode | None, why: str, detail: str) -> None:
    replica = first(mine, (pod(1), STEPS), nodes=[node] if node else [])
    assert (replica.cause, replica.detail) == (why, detail)


def test_a_node_that_was_deleted_is_told_as_such() -> None:
    snapshot = observed(job(trains()), [(pod(0), silent(20)), (pod(1), STEPS)])
    replica = assess(replace(snapshot, nodes={"node-1": ObservedNode(name="node-1")})).by_id[pid(0)]
    assert (replica.health, replica.cause, replica.detail, replica.cannot_run_again) == (
        Health.LOST,
        "NodeDeleted",
        "node node-0 was deleted",
        True,
    )


def test_a_pod_that_was_given_up_stays_lost_until_it_has_ended() -> None:
    record = trains(lost=(pid(0),))
    lost = first((pod(0), running()), (pod(1), running()), record=record)
    assert (lost.health, lost.cause, lost.cannot_run_again, lost.may_still_run) == (Health.LOST, "GivenUp", False, True)
    assert first((pod(0, node=""), None), (pod(1), running()), record=record).may_still_run
    assert not first((pod(0), None), (pod(1), running()), nodes=[AWAY], record=record).may_still_run
    dead = first((pod(0), silent(20)), (pod(1), STEPS), nodes=[AWAY])
    assert (dead.health, dead.may_still_run) == (Health.LOST, False)
    away = replace(AWAY, not_ready_since=LONG_AGO)
    assert first((pod(0), None), (pod(1), running()), nodes=[away], record=record).cannot_run_again
    assert first((pod(0, phase="Failed"), None), record=record).health is Health.ENDED
    snapshot = observed(job(record), [(pod(0), silent(20)), (pod(1), STEPS)])
    assert assess(replace(snapshot, nodes={})).by_id[pid(0)].cannot_run_again, "its node was deleted"


# ---- silence


@pytest.mark.parametrize(
    ("ago_s", "health"),
    [
        pytest.param(13.4, Health.GOOD, id="three heartbeats are not over"),
        pytest.param(13.5, Health.SILENT, id="they are"),
    ],
)
def test_when_an_agent_is_silent(ago_s: float, health: Health) -> None:
    assert first((pod(0), silent(ago_s)), (pod(1), STEPS)).health is health


@pytest.mark.parametrize(
    ("before_s", "health"),
    [
        pytest.param(6.7, Health.SILENT, id="together: perhaps it is the operator that hears nothing"),
        pytest.param(6.75, Health.LOST, id="long before the others"),
    ],
)
def test_agents_that_fell_silent_together(before_s: float, health: Health) -> None:
    other = (pod(1), silent(10, state=AgentState.FAULTED))
    assert first((pod(0), silent(10 + before_s)), other).health is health


@pytest.mark.parametrize(
    ("trying_s", "why"),
    [
        pytest.param(29.9, "", id="an agent may need half a minute"),
        pytest.param(30, "AgentNotAnswering", id="and no more"),
    ],
)
def test_when_an_agent_should_have_answered(trying_s: float, why: str) -> None:
    replica = first((pod(0), ObservedAgent(trying_since=NOW - seconds(trying_s))), record=Record())
    assert (replica.health, replica.cause) == (Health.PENDING, why)


def test_who_was_never_called_is_not_overdue() -> None:
    assert first((pod(0), None), record=Record()).cause == ""


@pytest.mark.parametrize(
    ("others", "health"),
    [
        pytest.param([faulted()], Health.LOST, id="a collective broke"),
        pytest.param([STEPS, faulted()], Health.LOST, id="of one is enough"),
        pytest.param([ready(1)], Health.LOST, id="the workers of all others ended"),
        pytest.param([agent(AgentState.INIT)], Health.LOST, id="or were never begun"),
        pytest.param([ready(1), STEPS], Health.SILENT, id="not of some"),
        pytest.param([agent(AgentState.COMPLETED)], Health.SILENT, id="who finished proves nothing"),
        pytest.param([agent(AgentState.STOPPING)], Health.SILENT, id="nor who is stopping"),
        pytest.param([agent(None)], Health.SILENT, id="nor who was never heard"),
    ],
)
def test_what_proves_that_a_silent_member_is_lost(others: list[ObservedAgent], health: Health) -> None:
    record = trains(1 + len(others))
    pods = [(pod(1 + n), other) for n, other in enumerate(others)]
    replica = first((pod(0), silent(20)), *pods, record=record)
    assert replica.health is health
    assert replica.cause == ("NodeLost" if health is Health.LOST else "AgentSilent")


def test_only_members_count_as_witnesses() -> None:
    assert first((pod(0), silent(20)), (pod(1), STEPS), (pod(2), faulted())).health is Health.SILENT


@pytest.mark.parametrize(
    ("newest_s", "pace_s", "heard_s", "health"),
    [
        pytest.param(5.84, 1, 0, Health.SILENT, id="an answer may take so long"),
        pytest.param(5.86, 1, 0, Health.LOST, id="but no longer"),
        pytest.param(5.86, None, 0, Health.LOST, id="also of who does not tell its pace"),
        pytest.param(39.9, 10, 0, Health.SILENT, id="four of its steps"),
        pytest.param(40, 10, 0, Health.LOST, id="and not more"),
        pytest.param(10, 1, 7.8, Health.SILENT, id="nobody answered since the last step"),
        pytest.param(10, 1, 7.7, Health.LOST, id="one did"),
    ],
)
def test_when_workers_stand_still(newest_s: float, pace_s: float | None, heard_s: float, health: Health) -> None:
    other = running(
        step=5, step_at=NOW - seconds(newest_s), step_pace=None if pace_s is None else seconds(pace_s),
        last_answer=NOW - seconds(heard_s),
    )  # fmt: skip
    assert first((pod(0), missed(60)), (pod(1), other)).health is health


def test_the_one_who_made_a_step_last_and_the_one_who_is_slowest_count() -> None:
    slow = running(step=5, step_at=NOW - seconds(30), step_pace=seconds(20))
    quick = running(step=5, step_at=NOW - seconds(20), step_pace=seconds(1))
    assert first((pod(0), missed(60)), (pod(1), slow), (pod(2), quick), record=trains(3)).health is Health.SILENT
    late = replace(quick, step_at=NOW - seconds(1))
    stuck = replace(quick, step_at=NOW - seconds(50))
    assert first((pod(0), missed(60)), (pod(1), stuck), (pod(2), late), record=trains(3)).health is Health.SILENT
    assert first((pod(0), missed(60)), (pod(1), stuck), (pod(2), stuck), record=trains(3)).health is Health.LOST


def test_who_saves_stands_still_for_a_reason() -> None:
    stuck = agent(AgentState.STOPPING, step=5, step_at=NOW - seconds(50), step_pace=seconds(1))
    assert first((pod(0), missed(60)), (pod(1), stuck)).health is Health.LOST
    assert first((pod(0), missed(60)), (pod(1), replace(stuck, saving=True))).health is Health.SILENT


@pytest.mark.parametrize(
    ("agents", "all_silent"),
    [
        pytest.param([silent(20), silent(20)], True, id="all"),
        pytest.param([silent(20), running()], False, id="one answers"),
        pytest.param([silent(20), None], True, id="who was never heard does not count"),
        pytest.param([None, None], False, id="nobody was ever heard"),
    ],
)
def test_when_all_are_silent(agents: list[ObservedAgent | None], all_silent: bool) -> None:
    replicas = replicas_of(*((pod(n), mine) for n, mine in enumerate(agents)), record=Record())
    assert replicas.all_silent is all_silent


# ---- nodes


@pytest.mark.parametrize(
    ("away_s", "gone"),
    [pytest.param(600, False, id="not yet"), pytest.param(600.001, True, id="then")],
)
def test_when_a_pod_is_gone_with_its_node(away_s: float, gone: bool) -> None:
    node = replace(AWAY, not_ready_since=NOW - seconds(away_s))
    assert first((pod(0), silent(20)), (pod(1), STEPS), nodes=[node]).cannot_run_again is gone
    disrupted = first((pod(0, disruption="x"), running()), (pod(1), STEPS), nodes=[node])
    assert (disrupted.health, disrupted.cannot_run_again) == (Health.DISRUPTED, gone), "its agent answers yet"
    back = replace(node, ready=True)
    assert not first((pod(0), running()), (pod(1), STEPS), nodes=[back]).cannot_run_again


def test_a_pod_without_a_place_is_not_gone() -> None:
    assert not first((pod(0, node="", started=False), None), record=Record()).cannot_run_again


def test_a_job_whose_spec_cannot_be_read_has_ten_minutes() -> None:
    for away_s, gone in ((600, False), (601, True)):
        node = replace(AWAY, not_ready_since=NOW - seconds(away_s))
        snapshot = observed(
            replace(job(trains()), policy=None, spec_error="no"), [(pod(0), silent(30)), (pod(1), STEPS)], [node]
        )
        assert assess(snapshot).by_id[pid(0)].cannot_run_again is gone


@pytest.mark.parametrize(
    ("away", "at"),
    [
        pytest.param([100], NOW + seconds(500.001), id="one"),
        pytest.param([100, 200], NOW + seconds(400.001), id="the first of two"),
        pytest.param([100, 600.001], NOW + seconds(500.001), id="not one that is gone"),
        pytest.param([], None, id="none"),
    ],
)
def test_when_the_next_node_has_been_away_for_too_long(away: list[float], at: datetime | None) -> None:
    nodes = [ObservedNode(name=f"node-{n}", ready=False, not_ready_since=NOW - seconds(s)) for n, s in enumerate(away)]
    healthy = ObservedNode(name="node-2", ready=True, not_ready_since=NOW - seconds(300))
    replicas = replicas_of(
        *((pod(n), running()) for n in range(3)), nodes=[*nodes, healthy, ObservedNode(name="node-3", ready=False)]
    )
    assert replicas.next_loss_at == at


# ---- what follows for a replica


@pytest.mark.parametrize(
    ("state", "busy", "is_idle", "is_ready"),
    [
        pytest.param(AgentState.INIT, False, True, False, id="coming up"),
        pytest.param(AgentState.READY, False, True, True, id="ready"),
        pytest.param(AgentState.RUNNING, True, False, False, id="running"),
        pytest.param(AgentState.STOPPING, False, False, False, id="stopping"),
        pytest.param(AgentState.FAULTED, True, False, False, id="faulted"),
        pytest.param(AgentState.COMPLETED, True, False, False, id="completed"),
        pytest.param(AgentState.SHUTDOWN, False, True, False, id="shut down"),
        pytest.param(None, False, False, False, id="unheard"),
    ],
)
def test_what_an_agent_says_of_its_workers(state: AgentState | None, busy: bool, is_idle: bool, is_ready: bool) -> None:
    good = first((pod(0), agent(state)), (pod(1), STEPS))
    assert (good.is_busy, good.is_idle, good.ready) == (busy, is_idle, is_ready)
    disrupted = first((pod(0, disruption="x"), agent(state)), (pod(1), STEPS))
    assert (disrupted.is_busy, disrupted.is_idle, disrupted.ready) == (busy, is_idle, False)
    mute = first((pod(0), silent(20, state=state)), (pod(1), STEPS))
    assert (mute.is_busy, mute.is_idle, mute.ready) == (False, False, False)


@pytest.mark.parametrize(("told", "runs"), [(3, True), (2, False), (4, False), (None, True)])
def test_whose_generation_it_is(told: int | None, runs: bool) -> None:
    assert first((pod(0), running(told)), (pod(1), STEPS)).runs(3) is runs  # type: ignore[arg-type]


def test_the_highest_generation_that_anything_tells_of() -> None:
    assert replicas_of(record=Record()).highest_generation() == 0
    assert (
        replicas_of((pod(0), running(3)), (pod(1, generation=5), None), (pod(2), ready(None))).highest_generation() == 5
    )
    assert replicas_of((pod(0), running(7)), (pod(1, generation=5), None)).highest_generation() == 7


def test_the_newest_pod_of_each_slot() -> None:
    replicas = replicas_of(
        (pod(pid(0, 2)), ready()), (pod(pid(0, 1)), ready()), (pod(pid(0, 3), phase="Failed"), None), (pod(1), ready())
    )
    assert {slot: replica.id for slot, replica in replicas.newest.items()} == {
        Slot("workers", 0): pid(0, 3), Slot("workers", 1): pid(1),
    }  # fmt: skip
    assert [r.id for r in replicas.candidates()] == [pid(1)]
    assert len(replicas.by_id) == 4
