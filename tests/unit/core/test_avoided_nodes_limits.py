"""How many nodes are avoided, which ones, and for how long."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.core.builders import (
    NOW,
    pid,
    policy,
    seconds,
    trains,
    transition,
)

from elastipod_operator.core.avoided_nodes import (
    MAX_KEPT,
    avoided,
    count_node_fault,
    drop_expired_faults,
    next_fault_expiry,
)
from elastipod_operator.core.record import FaultyReplica, NodeFaults, Record, TransitionKind

PERIOD = policy(2, 2, eval_period=seconds(600), max_offenders=2)
RECOVERY = transition(TransitionKind.RECOVERY, cause="WorkerCrash", uses_budget=True)


def test_each_node_is_booked_once_for_a_fault() -> None:
    faulty_replicas = (
        FaultyReplica(pid(0), 0, "b"),
        FaultyReplica(pid(1), 1, "b"),
        FaultyReplica(pid(2), 2, ""),
        FaultyReplica(pid(3), 3, "a"),
    )
    before = (NodeFaults("a", 4, NOW - seconds(5)), NodeFaults("old", 7, NOW - seconds(600)))
    record, events = count_node_fault(
        trains(transition=RECOVERY, faulty_replicas=faulty_replicas, node_faults=before), PERIOD, NOW
    )
    assert record.node_faults == (NodeFaults("a", 5, NOW), NodeFaults("b", 1, NOW))
    assert events == (), "a was avoided before"


def test_the_newest_offences_are_kept() -> None:
    before = tuple(NodeFaults(f"n{n:02}", 1, NOW - seconds(MAX_KEPT - n)) for n in range(MAX_KEPT))
    record, _ = count_node_fault(
        trains(transition=RECOVERY, faulty_replicas=(FaultyReplica(pid(0), 0, "x"),), node_faults=before), PERIOD, NOW
    )
    assert record.node_faults == (*before[1:], NodeFaults("x", 1, NOW))


@pytest.mark.parametrize(
    ("limit", "nodes"),
    [(0, ()), (1, ("c",)), (2, ("b", "c")), (3, ("a", "b", "c"))],
)
def test_the_latest_offenders_are_avoided_and_named_in_order(limit: int, nodes: tuple[str, ...]) -> None:
    node_faults = (
        NodeFaults("c", 2, NOW),
        NodeFaults("b", 3, NOW),
        NodeFaults("a", 2, NOW - seconds(1)),
        NodeFaults("d", 1, NOW),
    )
    assert avoided(Record(node_faults=node_faults), replace(PERIOD, max_offenders=limit), NOW) == nodes


def test_more_than_can_be_kept_are_never_avoided() -> None:
    node_faults = tuple(NodeFaults(f"n{n:02}", 2, NOW) for n in range(MAX_KEPT + 3))
    assert len(avoided(Record(node_faults=node_faults), replace(PERIOD, max_offenders=99), NOW)) == MAX_KEPT


def test_old_offences_are_dropped() -> None:
    young, old = NodeFaults("a", 1, NOW - seconds(599)), NodeFaults("b", 1, NOW - seconds(600))
    assert drop_expired_faults(Record(node_faults=(young, old)), PERIOD, NOW).node_faults == (young,)
    assert drop_expired_faults(Record(node_faults=(young, old)), policy(), NOW).node_faults == (), (
        "nothing is avoided any more"
    )
    same = Record(node_faults=(young,))
    assert drop_expired_faults(same, PERIOD, NOW) is same


def test_the_next_pardon() -> None:
    node_faults = tuple(NodeFaults("n", 1, NOW - seconds(ago)) for ago in (10, 590, 600))
    assert next_fault_expiry(Record(node_faults=node_faults), PERIOD, NOW) == NOW + seconds(10)
    assert next_fault_expiry(Record(node_faults=node_faults[2:]), PERIOD, NOW) is None
