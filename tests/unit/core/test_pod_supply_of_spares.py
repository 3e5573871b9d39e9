"""A spare keeps its place only as long as those who are to train have theirs."""

from __future__ import annotations

from typing import Any

import pytest
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

from elastipod_operator.core.actions import CreatePod, DeletePod
from elastipod_operator.core.plan import plan
from elastipod_operator.core.pod_supply import SPARE_PATIENCE
from elastipod_operator.core.record import PartialGang
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import Policy, SpecLimits

PAIRS = policy(2, 4, sizes=Sizes((2, 4), 2), specs=(SpecLimits("base", 2, 1), SpecLimits("extra", 2)))
BASE = trains(members=(pid(0, spec="base"), pid(1, spec="base")))
MEMBERS: list[Seen] = [(pod(pid(n, spec="base"), node=f"node-b{n}"), running()) for n in range(2)]
SPARE: Seen = (pod(pid(2, spec="base"), node="node-b2"), ready(1, is_spare=True))


def extra(ordinal: int, *, placed: bool = False, waits_s: float = 600.0) -> Seen:
    where = {"node": f"node-e{ordinal}"} if placed else {"node": "", "ip": ""}
    made = NOW - seconds(waits_s)
    return pod(pid(ordinal, spec="extra"), phase="Pending", started=False, created_at=made, **where), None


def deleted(*pods: Seen, wishes: Policy = PAIRS, **record: Any) -> list[str]:
    todo = plan(observed(job(trains(members=BASE.members, **record), wishes), [*MEMBERS, *pods]))
    return [a.name for a in acts(todo, DeletePod)]


@pytest.mark.parametrize(
    ("pods", "gives_way"),
    [
        pytest.param([extra(0, placed=True), extra(1)], True, id="its place makes an increment whole"),
        pytest.param([extra(0), extra(1)], False, id="its place alone does not"),
        pytest.param([extra(0, placed=True), extra(1, placed=True)], False, id="all have their places"),
        pytest.param([extra(0, placed=True), extra(1, waits_s=59)], False, id="the scheduler may be slow"),
    ],
)
def test_a_spare(pods: list[Seen], gives_way: bool) -> None:
    assert (SPARE[0].name in deleted(SPARE, *pods)) is gives_way


def test_the_end_of_its_patience_is_waited_for() -> None:
    pods = [*MEMBERS, SPARE, extra(0, placed=True), extra(1, waits_s=10)]
    todo = plan(observed(job(BASE, PAIRS), pods))
    assert todo.wake_at is not None
    assert todo.wake_at <= NOW + SPARE_PATIENCE - seconds(10)


def test_a_spare_that_trains_is_none() -> None:
    three = trains(members=(*BASE.members, pid(2, spec="base")))
    todo = plan(observed(job(three, PAIRS), [*MEMBERS, (SPARE[0], running()), extra(0, placed=True), extra(1)]))
    assert SPARE[0].name not in [a.name for a in acts(todo, DeletePod)]


def test_a_spare_is_no_demand_for_an_increment() -> None:
    """Places were given back; the demand is a pod that is to train, and the spare stays where it is."""
    resting = PartialGang(NOW - seconds(100), 0, 3, NOW + seconds(300))
    todo = plan(observed(job(trains(members=BASE.members, gang=resting), PAIRS), [*MEMBERS, SPARE]))
    assert [a.pod.spec for a in acts(todo, CreatePod)] == ["extra"]
    assert not acts(todo, DeletePod)
    assert todo.record.gang is not None
    assert todo.record.gang.since > LONG_AGO
