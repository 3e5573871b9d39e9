"""How often, and with which calls, the room on nodes is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.unit.kube.bodies import JOB_UID, job_body, node_body, pod_body

from elastipod_operator import clock, spare_capacity
from elastipod_operator.core.names import ANNOTATION_STATE, PodId
from elastipod_operator.core.record import NodeFaults, Record
from elastipod_operator.core.record_codec import encode
from elastipod_operator.core.requested_pods import READ_EVERY
from elastipod_operator.kube.api import ApiError
from elastipod_operator.kube.store import Job, Store
from elastipod_operator.spare_capacity import NODES_AT_A_TIME, SpareCapacityReader

Body = dict[str, Any]
NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


class Calls:
    """Nodes with room for one pod each; those of `full` have one already."""

    def __init__(self, count: int = 3, full: tuple[str, ...] = ()) -> None:
        self.nodes = [one_pod_node(f"n-{number:03}") for number in range(count)]
        self.full = full
        self.asked: list[str] = []
        self.error: Exception | None = None

    async def call(
        self, method: str, path: str, body: Any = None, *,
        query: list[tuple[str, str]] | None = None, content_type: str = "",
    ) -> Body:  # fmt: skip
        wanted = dict(query or ())
        self.asked.append(wanted.get("fieldSelector", path))
        if self.error is not None:
            raise self.error
        if path.endswith("nodes"):
            return {"items": self.nodes}
        name = wanted["fieldSelector"].partition(",")[0].removeprefix("spec.nodeName=")
        return {"items": [{"spec": {"containers": []}}] if name in self.full else []}

    def watch(self, path: str, query: list[tuple[str, str]], limit_s: float) -> AsyncIterator[Body]:
        raise AssertionError("nothing is watched")


WOKEN: list[str] = []


async def looked(reader: SpareCapacityReader, job: Job, freed_at: datetime | None = None) -> None:
    """Observe, and wait for the result."""
    await reader.observe(job, freed_at)
    await asyncio.gather(*reader._reading.values())


class Silent(Calls):
    """An API that never answers."""

    async def call(self, *request: Any, **more: Any) -> Body:
        await super().call(*request, **more)
        await asyncio.Event().wait()
        raise AssertionError


def one_pod_node(name: str) -> Body:
    body = node_body(name, labels={"kubernetes.io/hostname": name})
    body["status"]["allocatable"] = {"pods": "1"}
    return body


def job_of(
    growth: str = "SpareCapacityOnly", most: int = 4, pods: int = 2, run_policy: Body | None = None, **record: Any
) -> Job:
    store = Store()
    elastic = {"minReplicas": 1, "maxReplicas": most}
    annotations = {ANNOTATION_STATE: encode(Record(generation=1, **record))}
    spec = {"elasticPolicy": elastic, "elastipod": {"growth": growth}, "runPolicy": run_policy or {}}
    body = job_body(spec, annotations=annotations)
    body["spec"]["replicaSpecs"][0]["maxReplicas"] = most
    store.put_job(body)
    for ordinal in range(pods):
        store.put_pod(pod_body(ordinal))
    return store.jobs[JOB_UID]


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, timedelta]:
    """A clock that is as late as its one value says."""
    late = {"by": timedelta(0)}
    monkeypatch.setattr(clock, "now", lambda: NOW + late["by"])
    return late


async def test_room_is_found_on_the_nodes_without_a_pod(moved: dict[str, timedelta]) -> None:
    calls, job = Calls(full=("n-001",)), job_of()
    reader = SpareCapacityReader(calls, WOKEN.append)
    await looked(reader, job)
    found = reader.of(job)
    assert found is not None
    assert (dict(found.places), found.problem) == ({"n-000": 1, "n-002": 1}, "")
    assert found.placed == {"job-workers-0", "job-workers-1"}
    reader.forget(JOB_UID)
    assert reader.of(job) is None


OFFENDERS = {"restartPolicy": {"maxNumRepeatOffendersToAvoid": 1, "evalPeriodSeconds": 3600}}
FAULTS = (NodeFaults("n-000", 2, NOW - timedelta(minutes=5)), NodeFaults("n-001", 1, NOW - timedelta(minutes=4)))


async def test_room_on_a_node_that_new_pods_avoid_is_none(moved: dict[str, timedelta]) -> None:
    """Nor does it end the search: another node may have room."""
    calls, job = Calls(), job_of(most=3, run_policy=OFFENDERS, node_faults=FAULTS)
    reader = SpareCapacityReader(calls, WOKEN.append)
    await looked(reader, job)
    found = reader.of(job)
    assert found is not None
    assert dict(found.places) == {"n-001": 1}


async def test_it_is_read_at_once_when_other_nodes_are_avoided(moved: dict[str, timedelta]) -> None:
    calls = Calls()
    reader = SpareCapacityReader(calls, WOKEN.append)
    for job, looks in (
        (job_of(run_policy=OFFENDERS), 1),
        (job_of(run_policy=OFFENDERS, node_faults=FAULTS), 2),
        (job_of(run_policy=OFFENDERS, node_faults=FAULTS), 2),
        (job_of(run_policy=OFFENDERS), 3),
    ):
        await looked(reader, job)
        assert calls.asked.count("/api/v1/nodes") == looks


async def test_it_is_read_again_after_a_while_or_when_something_became_free(moved: dict[str, timedelta]) -> None:
    calls, job = Calls(), job_of()
    reader = SpareCapacityReader(calls, WOKEN.append)
    for late, freed_at, looks in (
        (timedelta(0), None, 1),
        (READ_EVERY / 2, NOW, 1),
        (READ_EVERY / 2, NOW + READ_EVERY / 3, 2),
        (2 * READ_EVERY, NOW + READ_EVERY / 3, 3),
    ):
        moved["by"] = late
        await looked(reader, job, freed_at)
        assert calls.asked.count("/api/v1/nodes") == looks


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(job_of("NextIncrement"), id="another mode"),
        pytest.param(job_of(outcome="Completed"), id="it has ended"),
        pytest.param(job_of(most=2), id="all replicas have nodes"),
    ],
)
async def test_nothing_is_read_without_need(job: Job, moved: dict[str, timedelta]) -> None:
    calls = Calls()
    await looked(SpareCapacityReader(calls, WOKEN.append), job)
    assert calls.asked == []


async def test_one_look_reads_few_nodes_and_the_next_one_others(moved: dict[str, timedelta]) -> None:
    names = tuple(f"n-{number:03}" for number in range(2 * NODES_AT_A_TIME))
    calls, job = Calls(len(names), full=names[:-1]), job_of()
    reader = SpareCapacityReader(calls, WOKEN.append)
    await looked(reader, job)
    assert len(calls.asked) == 1 + NODES_AT_A_TIME
    moved["by"] = READ_EVERY
    await looked(reader, job)
    found = reader.of(job)
    assert found is not None
    assert dict(found.places) == {names[-1]: 1}


@pytest.mark.parametrize(
    ("error", "says"),
    [
        pytest.param(ApiError(403, "pods is forbidden"), spare_capacity.NOT_ALLOWED, id="not allowed"),
        pytest.param(TimeoutError(), "the nodes cannot be read: TimeoutError", id="no answer"),
    ],
)
async def test_why_nothing_is_known_is_said(error: Exception, says: str, moved: dict[str, timedelta]) -> None:
    calls, job = Calls(), job_of()
    calls.error = error
    reader = SpareCapacityReader(calls, WOKEN.append)
    await looked(reader, job)
    found = reader.of(job)
    assert found is not None
    assert (found.places, found.problem.startswith(says)) == ({}, True)


MEMBERS = (PodId("workers", 0, 0), PodId("workers", 1, 0))


async def test_no_decision_about_workers_waits_for_nodes_that_are_not_answered_for(
    moved: dict[str, timedelta],
) -> None:
    calls, job = Silent(), job_of(members=MEMBERS)
    reader = SpareCapacityReader(calls, WOKEN.append)
    await reader.observe(job, None)
    assert calls.asked == [], "the decision goes first"
    moved["by"] = READ_EVERY
    await asyncio.sleep(0)
    await reader.observe(job, NOW + READ_EVERY)
    assert (reader.of(job), calls.asked) == (None, ["/api/v1/nodes"])
    await reader.close()


async def test_a_job_that_starts_waits_a_moment_only(
    moved: dict[str, timedelta], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare_capacity, "FIRST_WAIT_S", 0.01)
    calls, job = Silent(), job_of()
    reader = SpareCapacityReader(calls, WOKEN.append)
    for _ in range(2):
        await reader.observe(job, None)
    assert calls.asked == ["/api/v1/nodes"], "one look at a time"
    reader.forget(JOB_UID)
    assert reader._reading == {}
    await reader.close()


async def test_a_job_that_is_resumed_is_sized_by_what_is_free_then(moved: dict[str, timedelta]) -> None:
    calls, job = Calls(), job_of(members=MEMBERS)
    reader = SpareCapacityReader(calls, WOKEN.append)
    await looked(reader, job)
    before = reader.of(job)
    assert before is not None
    moved["by"] = timedelta(hours=5)
    calls.nodes = []
    await reader.observe(job_of(), None)
    after = reader.of(job)
    assert after is not None
    assert (len(before.places), after.places) == (2, {})
    await reader.close()


async def test_what_was_read_is_kept_when_no_answer_comes_later(
    moved: dict[str, timedelta], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, job = Calls(), job_of(members=MEMBERS)
    reader = SpareCapacityReader(calls, WOKEN.append)
    WOKEN.clear()
    await looked(reader, job)
    before = reader.of(job)
    assert before is not None
    assert (before.places, WOKEN) == ({"n-000": 1, "n-001": 1}, [JOB_UID])
    monkeypatch.setattr(spare_capacity, "READ_LIMIT_S", 0.01)
    reader._api, moved["by"] = Silent(), READ_EVERY
    await reader.observe(job, None)
    assert reader.of(job) == replace(before, read_at=NOW + READ_EVERY), "the next look is not due at once"
    await looked(reader, job)
    after = reader.of(job)
    assert after is not None
    assert (after.places, after.placed) == (before.places, before.placed)
    assert after.problem.startswith("the nodes cannot be read: TimeoutError")
    assert WOKEN == [JOB_UID, JOB_UID]


async def test_a_node_that_cannot_be_understood_is_told_too(moved: dict[str, timedelta]) -> None:
    calls, job = Calls(), job_of()
    calls.error = RuntimeError("a secret")
    reader = SpareCapacityReader(calls, WOKEN.append)
    await looked(reader, job)
    found = reader.of(job)
    assert found is not None
    assert found.problem.startswith("the nodes cannot be read: internal error (RuntimeError in spare_capacity.py line ")
