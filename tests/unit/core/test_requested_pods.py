"""What growth requests before there is room for it, which is what an autoscaler would buy."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from tests.nonempty import every
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    Seen,
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
)

from elastipod_operator.core.actions import CreatePod, DeletePod, Plan
from elastipod_operator.core.growth_mode import GrowthMode
from elastipod_operator.core.plan import plan
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import NodeFaults, Record
from elastipod_operator.core.requested_pods import READ_EVERY
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import ObservedNode, Policy, SpareCapacity, SpecLimits

EVEN = policy(2, 8, sizes=Sizes((2, 4, 6, 8), 2), specs=(SpecLimits("workers", 8),))
SPARE = replace(EVEN, growth=GrowthMode.SPARE_CAPACITY_ONLY)
MEMBERS: list[Seen] = [(pod(0), running()), (pod(1), running())]


def waits(ordinal: int, **changes: object) -> Seen:
    return pod(ordinal, node="", phase="Pending", ip="", started=False, **changes), None


def comes(ordinal: int, **changes: object) -> Seen:
    """A newcomer with a node whose agent does not answer yet."""
    return pod(ordinal, phase="Pending", ip="", started=False, **changes), None


def has_room(places: dict[str, int], placed: int = 2) -> SpareCapacity:
    names = frozenset(pid(n).name("job") for n in range(placed))
    return SpareCapacity(read_at=NOW - seconds(1), places=places, placed=names)


def decided(wishes: Policy, *more: Seen, node_seen: float = -7200, room: SpareCapacity | None = None) -> Plan:
    """Decide for a job that trains with two of up to eight. node_seen: when nodes were first seen, seconds from now."""
    pairs = [*MEMBERS, *more]
    nodes = [ObservedNode(name=p.node, seen_since=NOW + seconds(node_seen)) for p, _ in pairs if p.node]
    return plan(observed(job(trains(), wishes), pairs, nodes, spare_capacity=room))


def made(todo: Plan) -> list[int]:
    return [a.pod.ordinal for a in acts(todo, CreatePod)]


def test_one_increment_is_requested_at_a_time() -> None:
    assert made(decided(EVEN)) == [2, 3]
    assert made(decided(EVEN, waits(2))) == [3]
    assert made(decided(EVEN, waits(2), waits(3))) == []


def test_the_next_one_follows_when_the_nodes_were_there_already() -> None:
    assert made(decided(EVEN, comes(2), waits(3))) == []
    assert made(decided(EVEN, comes(2), comes(3))) == [4, 5]


def test_a_node_that_came_for_a_pod_must_prove_useful_before_more_is_requested() -> None:
    assert made(decided(EVEN, comes(2), comes(3), node_seen=-60)) == []
    assert made(decided(EVEN, (pod(2), ready()), comes(3), node_seen=-60)) == []
    assert made(decided(EVEN, (pod(2), ready()), (pod(3), ready()), node_seen=-60)) == [4, 5]


def test_nothing_more_is_requested_beside_a_pod_that_cannot_start() -> None:
    stuck = comes(2, problem="the image cannot be pulled", problem_reason=Reason.IMAGE_PULL_FAILED)
    assert made(decided(EVEN, stuck, comes(3))) == []


def test_maximum_requests_all_at_once() -> None:
    assert made(decided(replace(EVEN, growth=GrowthMode.MAXIMUM))) == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("mode", list(GrowthMode))
def test_the_replicas_that_the_user_names_are_always_requested(mode: GrowthMode) -> None:
    wishes = replace(EVEN, growth=mode, sizes=Sizes((2, 4, 6, 8), 6))
    todo = plan(observed(job(Record(), wishes)))
    assert set(made(todo)) >= set(range(6))
    assert every(not a.only_on for a in acts(todo, CreatePod))
    assert set(made(decided(wishes))) >= {2, 3, 4, 5}, "also after it went on with fewer"


def test_without_room_spare_capacity_only_requests_nothing() -> None:
    for room in (None, has_room({})):
        todo = decided(SPARE, room=room)
        assert made(todo) == []
        (scaling,) = (c for c in todo.conditions if c.type == "Scaling")
        assert scaling.reason == Reason.NO_SPARE_CAPACITY
        assert "no node has room for the next size" in scaling.message


def test_why_nodes_cannot_be_read_is_told() -> None:
    todo = decided(SPARE, room=SpareCapacity(read_at=NOW, problem="the operator may not list pods"))
    (scaling,) = (c for c in todo.conditions if c.type == "Scaling")
    assert "the operator may not list pods" in scaling.message


def test_spare_capacity_is_taken_in_whole_increments_and_on_those_nodes_alone() -> None:
    todo = decided(SPARE, room=has_room({"a": 1, "b": 2}))
    assert made(todo) == [2, 3]
    assert {a.only_on for a in acts(todo, CreatePod)} == {("a", "b")}
    assert todo.wake_at is not None
    assert NOW < todo.wake_at <= NOW - seconds(1) + READ_EVERY
    assert made(decided(SPARE, room=has_room({"a": 1}))) == []


def test_what_the_user_names_may_go_to_any_node_beside_growth_on_spare_capacity() -> None:
    wishes = replace(SPARE, sizes=Sizes((2, 4, 6, 8), 4))
    found = {a.pod.ordinal: a.only_on for a in acts(decided(wishes, room=has_room({"a": 6})), CreatePod)}
    assert found == {2: (), 3: (), **{n: ("a",) for n in range(4, 8)}}


def test_pods_that_found_a_node_since_then_use_up_the_room() -> None:
    room = has_room({"a": 2})
    assert made(decided(SPARE, waits(2, only_on=("a",)), waits(3, only_on=("a",)), room=room)) == []
    assert made(decided(SPARE, comes(2), comes(3), room=room)) == []
    assert made(decided(SPARE, comes(2), comes(3), room=has_room({"b": 2}, placed=4))) == [4, 5]


def test_a_pod_whose_room_is_gone_is_taken_back() -> None:
    pending = [waits(2, only_on=("a",)), waits(3, only_on=("a",))]
    gone = decided(SPARE, *pending, room=has_room({}))
    assert {a.name for a in acts(gone, DeletePod)} == {pid(2).name("job"), pid(3).name("job")}
    moved = decided(SPARE, *pending, room=has_room({"b": 2}))
    assert [(a.pod, a.only_on) for a in acts(moved, CreatePod)] == [(pid(2, 1), ("b",)), (pid(3, 1), ("b",))]


def test_a_pod_that_is_restricted_to_a_node_that_it_avoids_is_taken_back() -> None:
    """What was read before the node was avoided still has room there."""
    wishes = replace(SPARE, max_offenders=1, eval_period=timedelta(hours=1))
    record = trains(node_faults=(NodeFaults("a", 2, NOW - seconds(60)),))
    stuck = [waits(n, only_on=("a",), avoids=("a",)) for n in (2, 3)]
    todo = plan(observed(job(record, wishes), [*MEMBERS, *stuck], spare_capacity=has_room({"a": 1, "b": 1})))
    assert [(a.pod, a.avoids) for a in acts(todo, CreatePod)] == [(pid(2, 1), ("a",)), (pid(3, 1), ("a",))]
    assert every("b" in a.only_on for a in acts(todo, CreatePod))


def test_a_member_that_is_lost_is_replaced_on_spare_capacity_only() -> None:
    members = trains(4)
    lost = [(pod(n), running()) for n in range(3)] + [(pod(3, phase="Failed"), None)]
    without = plan(observed(job(members, SPARE), lost, spare_capacity=has_room({}, placed=3)))
    assert made(without) == []
    bought = plan(observed(job(members, EVEN), lost))
    assert 3 in made(bought)


def test_a_lost_base_pod_is_requested_however_many_elastic_ones_have_nodes() -> None:
    two = replace(
        SPARE, sizes=Sizes((1, 2, 3, 4), 1), specs=(SpecLimits("base", 1), SpecLimits("extra", 3)),
    )  # fmt: skip
    extras = [(pod(pid(n, spec="extra")), running()) for n in range(3)]
    record = trains(members=(pid(0, spec="base"), *(pid(n, spec="extra") for n in range(3))))
    lost = (pod(pid(0, spec="base"), phase="Failed", created_at=LONG_AGO - timedelta(hours=1)), None)
    todo = plan(observed(job(record, two), [lost, *extras], spare_capacity=has_room({})))
    assert [a.pod.spec for a in acts(todo, CreatePod)] == ["base"]
    assert every(not a.only_on for a in acts(todo, CreatePod))


def test_spares_wait_until_the_maximum_has_nodes() -> None:
    wishes = replace(SPARE, specs=(SpecLimits("workers", 8, spares=1),))
    assert made(decided(wishes, room=has_room({}))) == []
