"""Nodes that fault again and again are avoided by new pods (maxNumRepeatOffendersToAvoid)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.core.builders import (
    NOW,
    acts,
    agent,
    faulted,
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

from elastipod_operator.core.actions import CreatePod, Plan
from elastipod_operator.core.avoided_nodes import MAX_CLOSED, MAX_KEPT, avoided
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import FaultyReplica, NodeFaults, Record, TransitionKind
from elastipod_operator.core.snapshot import AgentState, Failure, ObservedAgent, Policy

AVOID = policy(2, 2, max_offenders=2, eval_period=seconds(600))


def offence(node: str, times: int = 2, ago_s: float = 0.0) -> NodeFaults:
    return NodeFaults(node, times, NOW - seconds(ago_s))


def after_fault(record: Record, wishes: object = AVOID, fault: ObservedAgent | None = None) -> tuple[NodeFaults, ...]:
    snapshot = [(pod(0), fault or faulted()), (pod(1), running())]
    booked = plan(observed(job(record, wishes), snapshot))  # type: ignore[arg-type]
    assert booked.record.node_faults == record.node_faults, "not before it is known who was behind it"
    then = plan(observed(job(booked.record, wishes), [(pod(0), ready(1)), (pod(1), ready(1))]))  # type: ignore[arg-type]
    is_left = any(n.reason == "NodeAvoided" for n in then.events)
    assert then.record.generation == (1 if is_left else 2)
    return then.record.node_faults


def test_faults_are_counted_against_the_node_they_began_on() -> None:
    assert after_fault(trains()) == (offence("node-0", 1),)
    assert after_fault(trains(node_faults=(offence("node-0", 1, 100),))) == (offence("node-0", 2),)


def test_a_check_before_the_start_that_fails_counts_against_its_node() -> None:
    failure = Failure(-1, 1, "", "node node-0: 7 of 8 GPUs answer")
    fault = agent(AgentState.FAULTED, 1, reason="PreScriptFailed", failure=failure)
    record = trains(running_since=None, node_faults=(offence("node-0", 1, 100),))
    assert after_fault(record, fault=fault) == (offence("node-0", 2),)


def test_no_account_is_kept_where_nothing_is_to_be_avoided() -> None:
    assert after_fault(trains(), policy(2, 2)) == ()


def test_the_second_fault_is_told() -> None:
    record = trains(node_faults=(offence("node-0", 1, 100),))
    booked = plan(observed(job(record, AVOID), [(pod(0), faulted()), (pod(1), running())]))
    then = plan(observed(job(booked.record, AVOID), [(pod(0), ready(1)), (pod(1), ready(1))]))
    assert "NodeAvoided" in [n.reason for n in then.events]
    assert any("node node-0 had 2 faults" in n.message for n in then.events)


@pytest.mark.parametrize(
    ("node_faults", "limit", "expected"),
    [
        pytest.param((offence("a", 1),), 5, (), id="once is no repetition"),
        pytest.param((offence("a", 2),), 5, ("a",), id="twice is"),
        pytest.param((offence("a", 9),), 0, (), id="none may be avoided"),
        pytest.param((offence("a", 9, 50), offence("b", 2, 40), offence("c", 2, 30)), 2, ("b", "c"), id="the oldest is dropped"),
        pytest.param((offence("a", 2, 600), offence("b", 2, 599)), 5, ("b",), id="an offence expires with the period"),
    ],
)  # fmt: skip
def test_who_is_avoided(node_faults: tuple[NodeFaults, ...], limit: int, expected: tuple[str, ...]) -> None:
    wishes = policy(max_offenders=limit, eval_period=seconds(600))
    assert avoided(Record(node_faults=node_faults), wishes, NOW) == expected


def test_account_is_kept_of_so_many_nodes() -> None:
    many = tuple(offence(f"n-{n}", 1, 100 - n) for n in range(MAX_KEPT))
    kept = after_fault(trains(node_faults=many))
    assert len(kept) == MAX_KEPT
    assert [o.node for o in kept][-1] == "node-0"
    assert "n-0" not in [o.node for o in kept]


OFFENDED = trains(node_faults=(offence("bad"),))


def test_new_pods_are_kept_off() -> None:
    todo = plan(observed(job(OFFENDED, AVOID), [(pod(1), running())]))
    assert [(a.pod, a.avoids) for a in acts(todo, CreatePod)] == [(pid(0, 1), ("bad",))]


def test_new_pods_are_kept_off_nodes_that_announce_what_no_scheduler_heeds() -> None:
    """Whatever the user says of repeat offenders; of very many nodes only the first ones are named."""
    snapshot = observed(
        job(OFFENDED, AVOID), [(pod(1), running())], closed_nodes={"worn": "label a=b", "bad": "label a=b"}
    )
    todo = plan(snapshot)
    assert [a.avoids for a in acts(todo, CreatePod)] == [("bad", "worn")]
    many = {f"n-{n:03}": "label a=b" for n in range(MAX_CLOSED + 1)}
    (made,) = acts(plan(observed(job(trains(), policy(2, 2)), [(pod(1), running())], closed_nodes=many)), CreatePod)
    assert made.avoids == tuple(many)[:MAX_CLOSED]


def test_a_condition_names_the_nodes_that_a_waiting_pod_avoids() -> None:
    wishes = policy(2, 3, max_offenders=2, eval_period=seconds(600))
    faults = trains(node_faults=(offence("bad", 2, 60),))
    told = "new pods avoid bad: 2 faults, until 12:09:00 UTC; n-0: label a=b; n-1: label a=b; and 2 more"
    closed = {f"n-{n}": "label a=b" for n in range(4)}
    avoids = ("bad", *closed)
    trio = [(pod(0), running()), (pod(1), running())]
    unplaced = pod(2, phase="Pending", node="", ip="", started=False, avoids=avoids, created_at=NOW)
    grows = plan(observed(job(faults, wishes), [*trio, (unplaced, None)], closed_nodes=closed))
    (scaling,) = [c.message for c in grows.conditions if c.type == "Scaling"]
    assert scaling == f"1 more replica is wanted and 1 pod waits ({told})"
    placed = plan(observed(job(faults, wishes), [*trio, (pod(2, avoids=avoids), None)], closed_nodes=closed))
    assert "avoid" not in "".join(c.message for c in placed.conditions)
    starting = Record(transition=transition(TransitionKind.START), node_faults=faults.node_faults)
    first = pod(0, phase="Pending", node="", ip="", started=False, avoids=avoids, created_at=NOW)
    starts = plan(observed(job(starting, wishes), [(first, None)], closed_nodes=closed))
    assert f"0 of 2 replicas are ready ({told})" in starts.conditions[-1].message


def test_a_record_that_names_a_node_twice_is_put_into_a_right_sentence() -> None:
    """As only one that was edited by hand does."""
    twice = Record(
        transition=transition(TransitionKind.START), node_faults=(offence("bad", 2, 60), offence("bad", 1, 60))
    )
    waits = pod(0, phase="Pending", node="", ip="", started=False, avoids=("bad",), created_at=NOW)
    todo = plan(observed(job(twice, AVOID), [(waits, None)]))
    assert "new pods avoid bad: 1 fault, until" in todo.conditions[-1].message


def test_who_lacks_its_minimum_uses_a_node_again_that_it_avoided_in_vain() -> None:
    """For five minutes. Pods that the patience with a partial gang recreates meanwhile begin no new ones."""
    faults = (offence("bad", 3), offence("once", 1, 50))

    def waits(began_s: float, ago_s: float = 60, wishes: Policy = AVOID, node: str = "") -> Plan:
        begun = transition(
            TransitionKind.RECOVERY, began_s=began_s, cause="WorkerCrash", is_budget_checked=True, deadline=NOW
        )
        record = trains(transition=begun, node_faults=faults)
        alone = pod(
            pid(0, 1),
            phase="Pending",
            node=node,
            ip="",
            started=False,
            avoids=("bad",),
            created_at=NOW - seconds(ago_s),
        )
        return plan(observed(job(record, wishes), [(alone, None), (pod(1), ready(1))]))

    for patient in (waits(299), waits(300, 59)):
        assert patient.record.node_faults == faults, "an autoscaler needs minutes to bring another node"
        assert patient.wake_at is not None
        assert patient.wake_at <= NOW + seconds(1)
    assert waits(300, node="good").record.node_faults == faults, "it has a place, and will start"
    alone_is_enough = policy(1, 2, max_offenders=2, eval_period=seconds(600))
    assert waits(300, 300, wishes=alone_is_enough).record.transition is None, "one can train"
    forgiving = waits(300)
    assert forgiving.record.node_faults == (offence("bad", 1), offence("once", 1, 50)), "one further fault is enough"
    (told,) = [n.message for n in forgiving.events if n.reason == "NodeUsedAgain"]
    assert (
        told
        == "too few nodes but bad had room for the minimum size: nodes with repeated faults are used until their next fault"
    )
    assert [(a.pod, a.avoids) for a in acts(forgiving, CreatePod)] == [(pid(0, 2), ())]


def test_who_waits_for_other_nodes_looks_again_when_the_faults_expire() -> None:
    begun = transition(TransitionKind.RECOVERY, cause="WorkerCrash", is_budget_checked=True, deadline=NOW)
    record = trains(transition=begun, node_faults=(offence("bad", 3, 50),))
    wishes = replace(AVOID, eval_period=seconds(60))
    alone = pod(pid(0, 1), phase="Pending", node="", ip="", started=False, avoids=("bad",), created_at=NOW - seconds(5))
    todo = plan(observed(job(record, wishes), [(alone, None), (pod(1), ready(1))]))
    assert todo.record.node_faults == record.node_faults
    assert todo.wake_at is not None
    assert todo.wake_at <= NOW + seconds(10)


def waiting(*avoids: str) -> object:
    return pod(0, phase="Pending", node="", ip="", started=False, avoids=avoids, created_at=NOW)


@pytest.mark.parametrize(
    ("avoids", "node_faults", "is_made_anew"),
    [
        pytest.param((), (offence("bad"),), True, id="made before the node was avoided"),
        pytest.param(("bad",), (offence("bad"),), False, id="made as it should be"),
        pytest.param(("bad",), (), True, id="the node is not avoided any more"),
    ],
)
def test_a_pod_that_waits_for_a_place_avoids_who_is_avoided_now(
    avoids: tuple[str, ...], node_faults: tuple[NodeFaults, ...], is_made_anew: bool
) -> None:
    record = Record(transition=transition(TransitionKind.START), node_faults=node_faults)
    todo = plan(observed(job(record, AVOID), [(waiting(*avoids), None), (pod(1), ready(0))]))  # type: ignore[list-item]
    assert bool(acts(todo, CreatePod)) is is_made_anew


def test_old_offences_are_forgotten_and_the_next_is_waited_for() -> None:
    record = trains(node_faults=(offence("a", 2, 600), offence("b", 2, 500)))
    todo = plan(observed(job(record, AVOID), [(pod(0), running()), (pod(1), running())]))
    assert [o.node for o in todo.record.node_faults] == ["b"]
    assert todo.wake_at == NOW + seconds(100)


@pytest.mark.parametrize(
    ("cause", "counted", "offends"),
    [
        pytest.param("WorkerCrash", True, True, id="a worker fault"),
        pytest.param("NodeLost", False, True, id="a lost node"),
        pytest.param("PodLost", False, False, id="a pod that somebody deleted"),
        pytest.param("NodeOutOfService", False, False, id="a node that was taken out of service"),
    ],
)
def test_what_is_held_against_a_node(cause: str, counted: bool, offends: bool) -> None:
    began = transition(TransitionKind.RECOVERY, cause=cause, uses_budget=counted)
    record = trains(
        transition=began, faulty_replicas=(FaultyReplica(pid(0), 0, "node-0"), FaultyReplica(pid(1), 1, "node-0"))
    )
    todo = plan(observed(job(record, AVOID), [(pod(0), ready(1)), (pod(1), ready(1))]))
    assert todo.record.node_faults == ((offence("node-0", 1),) if offends else ())
