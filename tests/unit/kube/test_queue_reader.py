"""What jobs know of their queues: read for all together, sooner where Kueue's words tell of a change, and without rights not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast

import pytest
from tests.unit.agents.fake_agent import until
from tests.unit.kube.bodies import JOB_UID, job_body
from tests.unit.kube.queue_bodies import condition, workload_body

from elastipod_operator.core.queue_facts import QueueFact
from elastipod_operator.core.snapshot import ObservedJob, ObservedWorkload
from elastipod_operator.kube import queue_reader
from elastipod_operator.kube.api import ApiError
from elastipod_operator.kube.queue_api import QueueApi
from elastipod_operator.kube.queue_reader import QueueReader
from elastipod_operator.kube.store import Store
from elastipod_operator.kube.workloads import workload_fact

Body = dict[str, Any]
FORBIDDEN = ApiError(403, "clusterqueues is forbidden")
QUEUED = {"kueue.x-k8s.io/queue-name": "gpus"}


def local(name: str = "gpus", namespace: str = "team", **spec: Any) -> Body:
    return {"metadata": {"name": name, "namespace": namespace}, "spec": {"clusterQueue": "pool", **spec}}


def pool(**spec: Any) -> Body:
    return {"metadata": {"name": "pool"}, "spec": {**spec}}


class Cluster:
    """The queues of a cluster. calls: what was read, in order. refuse: answers in place of the real ones."""

    def __init__(self) -> None:
        self.local: list[Body] = [local()]
        self.pools: list[Body] = [pool()]
        self.calls: list[str] = []
        self.refuse: dict[str, Exception] = {}

    async def list_local_queues(self, namespace: str) -> list[Body]:
        return self._read(f"localqueues {namespace}".strip(), self.local)

    async def list_cluster_queues(self) -> list[Body]:
        return self._read("clusterqueues", self.pools)

    def _read(self, what: str, found: list[Body]) -> list[Body]:
        self.calls.append(what)
        for refused in (what, what.split()[0]):
            if refused in self.refuse:
                raise self.refuse[refused]
        return found


class Reading:
    """A reader at work. told: the jobs that were woken."""

    def __init__(self) -> None:
        self.cluster, self.store, self.told = Cluster(), Store(), list[str]()
        api = cast(QueueApi, self.cluster)
        self._wanted = asyncio.Event()
        self.reader = QueueReader(api, self.store, self.told.append, self._wanted)
        self._task: asyncio.Task[None] | None = None

    def know(self, name: str = "job", **meta: Any) -> ObservedJob:
        """Show a job in queue gpus."""
        body = job_body(name=name, **{"uid": JOB_UID, "labels": QUEUED, **meta})
        self.store.put_job(body)
        return self.store.jobs[body["metadata"]["uid"]].fact

    def fact(self, waits: str = "") -> QueueFact | None:
        return self.reader.fact(self.store.jobs[JOB_UID].fact, [pending(waits)] if waits else [])

    def start(self, namespaces: Iterable[str] = ()) -> None:
        self._wanted.set()
        self._task = asyncio.create_task(self.reader.run(list(namespaces)))

    @property
    def lists(self) -> int:
        return sum(call.startswith("localqueues") for call in self.cluster.calls)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def pending(waits: str) -> ObservedWorkload:
    status = {"conditions": [condition("QuotaReserved", status=False, message=waits)]}
    found = workload_fact(workload_body(status=status))
    assert found is not None
    return found


@pytest.fixture
async def reading(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(queue_reader, "LEAST_PAUSE_S", 0.0)
    found = Reading()
    yield found
    await found.stop()


async def test_all_jobs_share_one_reading(reading: Reading) -> None:
    for n in range(3):
        job = reading.know(f"job-{n}", uid=f"{JOB_UID}-{n}" if n else JOB_UID)
        assert reading.reader.fact(job, []) is None, "nothing is told before it was read"
    reading.start()
    await until(lambda: len(reading.told) == 3)
    assert reading.cluster.calls == ["localqueues", "clusterqueues"]
    fact = reading.fact()
    assert fact is not None
    assert fact.cluster_queue is not None
    assert fact.cluster_queue.name == "pool"
    await asyncio.sleep(0.05)
    assert reading.lists == 1, "and then not for minutes"


async def test_nothing_is_read_before_a_job_has_a_queue(reading: Reading) -> None:
    task = asyncio.create_task(reading.reader.run([]))
    await asyncio.sleep(0.02)
    assert reading.cluster.calls == []
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_operator_of_some_namespaces_reads_those(reading: Reading) -> None:
    reading.know()
    reading.fact()
    reading.start(["team", "other"])
    await until(lambda: bool(reading.told))
    assert reading.cluster.calls[:2] == ["localqueues team", "localqueues other"]


async def test_a_namespace_that_may_not_be_read_hides_the_queues_of_no_other(
    reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    reading.cluster.refuse["localqueues gone"] = ApiError(403, "localqueues is forbidden")
    reading.know()
    reading.fact()
    elsewhere = reading.know("other", uid="other-uid", namespace="gone")
    reading.reader.fact(elsewhere, [])
    reading.start(["gone", "team"])
    await until(lambda: reading.told == [JOB_UID])
    known = reading.fact()
    assert known is not None
    assert known.exists
    assert reading.reader.fact(elsewhere, []) is None, "nobody knows whether its queue exists"
    before = reading.lists
    reading.fact("is inactive")
    await until(lambda: reading.lists == before + 2)
    assert caplog.text.count("no permission to read LocalQueues of namespace gone") == 1
    reading.cluster.refuse.clear()
    reading.cluster.local = [local(), local(namespace="gone")]
    reading.fact()
    await until(lambda: reading.told[-1] == "other-uid")


async def test_what_kueue_says_of_a_queue_has_it_read_at_once(reading: Reading) -> None:
    reading.know()
    reading.fact()
    reading.start()
    await until(lambda: bool(reading.told))
    reading.cluster.local = []
    reading.fact("insufficient unused quota")
    await asyncio.sleep(0.05)
    assert reading.lists == 1, "who else is in a queue is no reason to read it"
    reading.fact("LocalQueue gpus doesn't exist")
    await until(lambda: len(reading.told) == 2)
    assert reading.fact("LocalQueue gpus doesn't exist") == QueueFact(name="gpus", exists=False)
    reading.cluster.local = [local()]
    reading.fact()
    await until(lambda: len(reading.told) == 3)
    assert reading.lists == 3


async def test_a_queue_in_trouble_is_read_more_often(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_reader, "PROBLEM_READ_AGAIN_S", 0.01)
    reading.cluster.pools = [pool(stopPolicy="Hold")]
    reading.know()
    reading.fact()
    reading.start()
    await until(lambda: reading.lists >= 3)
    reading.cluster.pools = [pool()]
    await until(lambda: len(reading.told) == 2)
    before = reading.lists
    await asyncio.sleep(0.05)
    assert reading.lists == before


async def test_without_the_right_to_read_cluster_queues_one_line_tells_so(
    reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    reading.cluster.refuse["clusterqueues"] = FORBIDDEN
    reading.know()
    reading.fact()
    reading.start()
    for words in ("LocalQueue gpus doesn't exist", "", "LocalQueue gpus doesn't exist"):
        before = reading.lists
        reading.fact(words)
        await until(lambda before=before: reading.lists > before)  # type: ignore[misc]
    await asyncio.sleep(0.01)
    fact = reading.fact("LocalQueue gpus doesn't exist")
    assert fact is not None
    assert fact.cluster_queue is None
    assert caplog.text.count("jobs get no warnings") == 1


async def test_an_api_server_that_does_not_answer_changes_nothing(
    reading: Reading, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    reading.know()
    reading.fact()
    reading.start()
    await until(lambda: bool(reading.told))
    known = reading.fact()
    for error in (
        ApiError(500, "conversion webhook failed"),
        TimeoutError(),
        ApiError(404, "not found"),
        ValueError("odd"),
    ):
        reading.cluster.refuse["localqueues"] = error
        before = reading.lists
        reading.fact("is inactive" if before % 2 else "")
        await until(lambda before=before: reading.lists > before)  # type: ignore[misc]
        assert reading.fact("is inactive" if before % 2 else "") == known
    assert caplog.text.count("Queues cannot be read now") == 1


async def test_what_could_not_be_read_is_read_again_soon(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_reader, "PROBLEM_READ_AGAIN_S", 0.01)
    reading.cluster.refuse["localqueues"] = ApiError(500, "out of order")
    reading.know()
    reading.fact()
    reading.start()
    await until(lambda: reading.lists >= 2)
    reading.cluster.refuse["localqueues"] = ValueError("odd")
    before = reading.lists
    await until(lambda: reading.lists >= before + 2)
    reading.cluster.refuse.clear()
    await until(lambda: bool(reading.told))


async def test_queues_of_jobs_that_are_gone_are_forgotten(reading: Reading) -> None:
    reading.know()
    reading.fact()
    reading.start()
    await until(lambda: bool(reading.told))
    gone = reading.store.jobs[JOB_UID].fact
    reading.store.drop_job(JOB_UID)
    reading.reader.forget(JOB_UID)
    other = reading.know("other", uid="other-uid", labels={"kueue.x-k8s.io/queue-name": "cpus"})
    reading.reader.fact(other, [])
    await until(lambda: reading.told[-1] == "other-uid")
    assert set(reading.reader._facts) == {("team", "cpus")}
    assert reading.reader.fact(gone, []) is None


async def test_a_job_in_no_queue_has_none_read(reading: Reading) -> None:
    reading.store.put_job(job_body())
    assert reading.fact() is None
    assert reading.reader._facts == {}
