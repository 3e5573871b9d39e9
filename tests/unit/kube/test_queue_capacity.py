"""When there may be more room than before, as far as the watches show, and who is woken for it."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from tests.unit.core.builders import NOW, trains
from tests.unit.kube.bodies import JOB_UID, job_body, node_body

from elastipod_operator.core.names import ANNOTATION_STATE
from elastipod_operator.core.record import PartialGang, Record
from elastipod_operator.core.record_codec import encode
from elastipod_operator.kube.store import Store

RESTS = trains(gang=PartialGang(NOW, 0, 2, NOW + timedelta(hours=1)))
WAITS = trains(gang=PartialGang(NOW, 1, 2))


class Clock:
    """A time that the test sets."""

    now: datetime = NOW

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Store:
    return Store(clock)


def put(store: Store, record: Record, version: int = 10) -> None:
    store.put_job(job_body(version=version, annotations={ANNOTATION_STATE: encode(record)}))


@pytest.mark.parametrize(
    ("record", "woken"), [(RESTS, [JOB_UID]), (WAITS, []), (trains(), [])], ids=["rests", "waits", "trains"]
)
def test_a_new_node_wakes_who_gave_places_back(store: Store, record: Record, woken: list[str]) -> None:
    put(store, record)
    assert store.put_node(node_body()) == woken
    assert store.capacity_freed_at == NOW


def test_only_what_makes_a_node_fit_is_more_room(store: Store, clock: Clock) -> None:
    put(store, RESTS)
    store.put_node(node_body())
    clock.now += timedelta(minutes=1)
    assert store.put_node(node_body(unschedulable=True)) == []
    assert store.capacity_freed_at == NOW
    assert store.put_node(node_body()) == [JOB_UID], "it was uncordoned"
    assert store.capacity_freed_at == clock.now
    assert store.put_node(node_body()) == [], "nothing changed"


def test_a_node_whose_taint_pods_may_tolerate_is_room(store: Store, clock: Clock) -> None:
    """Which pods tolerate it is judged where they are placed."""
    put(store, RESTS)
    dedicated, maintenance = ({"key": key, "effect": "NoExecute"} for key in ("dedicated", "maintenance"))
    assert store.put_node(node_body(taints=[dedicated])) == [JOB_UID]
    assert store.capacity_freed_at == NOW
    clock.now += timedelta(minutes=1)
    assert store.put_node(node_body(taints=[dedicated, maintenance])) == []
    assert store.capacity_freed_at == NOW, "fewer pods may go there"
    assert store.put_node(node_body(taints=[dedicated])) == [JOB_UID], "more pods may go there"
    assert store.capacity_freed_at == clock.now
    ends = {"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}
    clock.now += timedelta(minutes=1)
    assert store.put_node(node_body("node-2", taints=[ends])) == []
    assert store.capacity_freed_at == clock.now - timedelta(minutes=1), "no pod may stay there"


def test_a_job_that_ends_or_goes_makes_room(store: Store, clock: Clock) -> None:
    put(store, trains())
    assert store.capacity_freed_at is None
    put(store, trains(outcome="Completed"), version=11)
    assert store.capacity_freed_at == NOW
    clock.now += timedelta(minutes=1)
    put(store, trains(outcome="Completed", ended_at=NOW), version=12)
    assert store.capacity_freed_at == NOW, "it had ended before"
    store.drop_job(JOB_UID)
    assert store.capacity_freed_at == clock.now
    clock.now += timedelta(minutes=1)
    store.drop_job(JOB_UID)
    assert store.capacity_freed_at == clock.now - timedelta(minutes=1), "it was not there any more"
