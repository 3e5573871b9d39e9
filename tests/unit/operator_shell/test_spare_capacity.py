"""How often, and with which calls, the room on nodes is read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.unit.kube.bodies import JOB_UID, job_body, node_body, pod_body

from elastipod_operator import clock, spare_capacity
from elastipod_operator.core.names import ANNOTATION_STATE
from elastipod_operator.core.record import Record
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


def one_pod_node(name: str) -> Body:
    body = node_body(name, labels={"kubernetes.io/hostname": name})
    body["status"]["allocatable"] = {"pods": "1"}
    return body


def job_of(growth: str = "SpareCapacityOnly", most: int = 4, pods: int = 2, **record: Any) -> Job:
    store = Store()
    elastic = {"minReplicas": 1, "maxReplicas": most}
    annotations = {ANNOTATION_STATE: encode(Record(generation=1, **record))}
    body = job_body({"elasticPolicy": elastic, "elastipod": {"growth": growth}}, annotations=annotations)
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
    reader = SpareCapacityReader(calls)
    await reader.observe(job, None)
    found = reader.of(job)
    assert found is not None
    assert (dict(found.places), found.problem) == ({"n-000": 1, "n-002": 1}, "")
    assert found.placed == {"job-workers-0", "job-workers-1"}
    reader.forget(JOB_UID)
    assert reader.of(job) is None


async def test_it_is_read_again_after_a_while_or_when_something_became_free(moved: dict[str, timedelta]) -> None:
    calls, job = Calls(), job_of()
    reader = SpareCapacityReader(calls)
    for late, freed_at, looks in (
        (timedelta(0), None, 1),
        (READ_EVERY / 2, NOW, 1),
        (READ_EVERY / 2, NOW + READ_EVERY / 3, 2),
        (2 * READ_EVERY, NOW + READ_EVERY / 3, 3),
    ):
        moved["by"] = late
        await reader.observe(job, freed_at)
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
    await SpareCapacityReader(calls).observe(job, None)
    assert calls.asked == []


async def test_one_look_reads_few_nodes_and_the_next_one_others(moved: dict[str, timedelta]) -> None:
    names = tuple(f"n-{number:03}" for number in range(2 * NODES_AT_A_TIME))
    calls, job = Calls(len(names), full=names[:-1]), job_of()
    reader = SpareCapacityReader(calls)
    await reader.observe(job, None)
    assert len(calls.asked) == 1 + NODES_AT_A_TIME
    moved["by"] = READ_EVERY
    await reader.observe(job, None)
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
    reader = SpareCapacityReader(calls)
    await reader.observe(job, None)
    found = reader.of(job)
    assert found is not None
    assert (found.places, found.problem.startswith(says)) == ({}, True)
