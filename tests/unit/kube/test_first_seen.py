"""What carries a time of another host's clock: it counts from when this operator first saw it, however far the clocks differ."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.unit.kube.bodies import JOB_UID, job_body, pod_body
from tests.unit.kube.queue_bodies import admitted, condition, workload_body

from elastipod_operator.core.snapshot import ObservedJob, ObservedPod, ObservedWorkload
from elastipod_operator.kube.store import Store

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
SKEWS = [pytest.param(timedelta(minutes=m), id=f"{m:+} min") for m in (-90, -5, 0, 5, 90)]


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.at = NOW

    def __call__(self) -> datetime:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Store:
    """A store that knows one job, since a minute."""
    store = Store(clock)
    store.put_job(job_body(version=10))
    clock.at += timedelta(minutes=1)
    return store


def format_time(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")


def the_job(store: Store) -> ObservedJob:
    return store.jobs[JOB_UID].fact


def the_pod(store: Store) -> ObservedPod:
    (pod,) = store.jobs[JOB_UID].pods.values()
    return pod


@pytest.mark.parametrize("skew", SKEWS)
def test_a_deletion_of_a_job_began_when_it_was_first_seen(store: Store, clock: Clock, skew: timedelta) -> None:
    assert the_job(store).deleting_since is None
    deleted: dict[str, Any] = {"deletionTimestamp": format_time(clock.at + skew)}
    first = clock.at
    store.put_job(job_body(version=11, **deleted))
    clock.at += timedelta(seconds=20)
    store.put_job(job_body(version=12, **deleted))
    assert the_job(store).deleting_since == first


@pytest.mark.parametrize("skew", SKEWS)
def test_a_job_that_a_new_operator_finds_in_deletion_begins_its_wait_anew(skew: timedelta) -> None:
    store = Store(lambda: NOW)
    store.put_job(job_body(deletionTimestamp=format_time(NOW - timedelta(minutes=3) + skew)))
    assert the_job(store).deleting_since == NOW


@pytest.mark.parametrize("skew", SKEWS)
def test_a_job_was_accepted_when_it_was_first_seen(skew: timedelta) -> None:
    store = Store(lambda: NOW)
    store.put_job(job_body(creationTimestamp=format_time(NOW + skew)))
    assert the_job(store).created_at == NOW


def test_a_job_that_an_operator_accepted_before_is_as_old_as_that_one_wrote() -> None:
    started = NOW - timedelta(hours=2)
    store = Store(lambda: NOW)
    store.put_job(job_body() | {"status": {"startTime": format_time(started)}})
    assert the_job(store).created_at == started


@pytest.mark.parametrize("skew", SKEWS)
def test_the_age_of_a_pod_counts_from_its_first_sight(store: Store, clock: Clock, skew: timedelta) -> None:
    first = clock.at
    store.put_pod(pod_body(version=20, creationTimestamp=format_time(clock.at + skew)))
    clock.at += timedelta(seconds=20)
    store.put_pod(pod_body(version=21, creationTimestamp=format_time(first + skew)))
    assert the_pod(store).created_at == first


def test_a_scheduler_considered_a_pod_when_that_was_first_seen(store: Store, clock: Clock) -> None:
    def seen(version: int, node: str, **condition: str) -> None:
        conditions = [{"type": "PodScheduled", **condition}] if condition else []
        store.put_pod(pod_body(version=version, node=node, status={"phase": "Pending", "conditions": conditions}))
        clock.at += timedelta(seconds=5)

    seen(20, "")
    seen(21, "", status="False", reason="SchedulingGated")
    assert the_pod(store).considered_at is None, "the API server says so, and no scheduler"
    first = clock.at
    seen(22, "", status="False", reason="Unschedulable")
    seen(23, "node-1", status="True")
    assert the_pod(store).considered_at == first


@pytest.mark.parametrize("skew", SKEWS)
def test_the_grace_of_a_pod_counts_from_the_first_sight_of_its_deletion(
    store: Store, clock: Clock, skew: timedelta
) -> None:
    store.put_pod(pod_body(version=20))
    assert the_pod(store).kill_at is None
    clock.at += timedelta(seconds=20)
    first = clock.at

    def deletion(grace_s: int) -> dict[str, Any]:
        return {
            "deletionTimestamp": format_time(first + skew + timedelta(seconds=grace_s)),
            "deletionGracePeriodSeconds": grace_s,
        }

    store.put_pod(pod_body(version=21, **deletion(600)))
    assert the_pod(store).kill_at == first + timedelta(seconds=600)
    clock.at += timedelta(seconds=50)
    store.put_pod(pod_body(version=22, **deletion(600)))
    assert the_pod(store).kill_at == first + timedelta(seconds=600), "the same deletion"
    store.put_pod(pod_body(version=23, **deletion(30)))
    assert the_pod(store).kill_at == clock.at + timedelta(seconds=30), "somebody deleted it again, with less time"
    sooner = clock.at + timedelta(seconds=30)
    clock.at += timedelta(seconds=25)
    store.put_pod(pod_body(version=24, **deletion(20)))
    assert the_pod(store).kill_at == sooner, "a deletion never gets later"


def test_a_deletion_that_does_not_say_its_grace_has_that_of_the_pod(store: Store, clock: Clock) -> None:
    body = pod_body(deletionTimestamp=format_time(clock.at + timedelta(hours=1)))
    body["spec"]["terminationGracePeriodSeconds"] = 45
    store.put_pod(body)
    assert the_pod(store).kill_at == clock.at + timedelta(seconds=45)


@pytest.mark.parametrize("skew", SKEWS)
def test_an_eviction_counts_from_its_first_sight(store: Store, clock: Clock, skew: timedelta) -> None:
    def workload(*more: dict[str, object], version: int) -> dict[str, object]:
        conditions = [{**one, "lastTransitionTime": format_time(NOW + skew)} for one in admitted(*more)]
        body = workload_body(version=version)
        body["status"]["conditions"] = conditions
        return body

    def the_workload() -> ObservedWorkload:
        (asked,) = store.jobs[JOB_UID].workloads.items
        return asked.fact

    first = clock.at
    store.put_workload(workload(version=30))
    assert (the_workload().admitted_at, the_workload().evicted_at) == (first, None)
    clock.at += timedelta(seconds=20)
    evicted = clock.at
    store.put_workload(workload(condition("Evicted"), version=31))
    clock.at += timedelta(seconds=20)
    store.put_workload(workload(condition("Evicted", reason="Other"), version=32))
    assert (the_workload().admitted_at, the_workload().evicted_at) == (first, evicted)
    clock.at += timedelta(seconds=20)
    listed = workload(condition("Evicted", reason="Third"), version=33)
    store.replace_workloads(JOB_UID, [listed], 40)
    assert (the_workload().admitted_at, the_workload().evicted_at) == (first, evicted)
