"""A job with a queue through the whole shell: its label, its Workloads, then its pods."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.unit.agents.fake_agent import until
from tests.unit.kube.bodies import JOB_UID, job_body
from tests.unit.kube.queue_bodies import flavor_body
from tests.unit.operator_shell.api_server import serving
from tests.unit.operator_shell.queue_server import CANNOT_CONVERT, QueueServer

from elastipod_operator.agents.agent_ports import agents_over
from elastipod_operator.agents.status_requests import open_session
from elastipod_operator.core.names import ANNOTATION_STATE, ANNOTATION_WORKLOAD, workload_name
from elastipod_operator.kube.events import Events
from elastipod_operator.kube.store import Store
from elastipod_operator.reconciler import Reconciler

Body = dict[str, Any]
QUEUED = {"kueue.x-k8s.io/queue-name": "gpus"}
BASE = workload_name("job", JOB_UID, 0)


class Shell:
    """A reconciler with its store, fed by hand in place of watches."""

    def __init__(self, reconciler: Reconciler, store: Store, server: QueueServer) -> None:
        self.reconciler, self.store, self.server = reconciler, store, server

    def submit(self, body: Body) -> None:
        if self.store.put_job(self.server.put(self.server.jobs, body)):
            self.reconciler.wake(body["metadata"]["uid"])

    def watch(self, workload: Body) -> None:
        uid = self.store.put_workload(workload)
        if uid is not None:
            self.reconciler.wake(uid)

    def state(self) -> Body:
        conditions = self.server.jobs["job"].get("status", {}).get("conditions") or [{}]
        last: Body = conditions[-1]
        return last

    def writes(self) -> list[tuple[str, str]]:
        return [call for call in self.server.calls if call[0] != "GET"]


@pytest.fixture
async def shell() -> AsyncIterator[Shell]:
    """A shell that knows no job, beside an API server with Kueue's objects."""
    server = QueueServer()
    server.objects["resourceflavors/gpus"] = flavor_body("gpus", {"type": "p5"})
    store = Store()
    async with serving(server) as api, open_session() as session:
        reconciler = Reconciler(api, store, agents_over(session), Events(api))
        yield Shell(reconciler, store, server)
        await reconciler.close()


async def test_no_pod_before_the_quota_and_then_as_kueue_placed_it(shell: Shell) -> None:
    shell.submit(job_body(labels=QUEUED))
    await until(lambda: shell.state().get("type") == "Suspended")
    assert shell.server.calls[:2] == [("GET", "workloads"), ("PATCH", "job")], (
        "quota is known before the first decision"
    )
    await until(lambda: BASE in shell.server.workloads)
    assert shell.writes()[0] == ("PATCH", "job"), "the record first"
    assert shell.server.pods == {}
    shell.watch(shell.server.admit(BASE))
    await until(lambda: bool(shell.server.pods))
    pods = list(shell.server.pods.values())
    assert {pod["metadata"]["annotations"][ANNOTATION_WORKLOAD] for pod in pods} == {BASE}
    assert [pod["spec"]["nodeSelector"] for pod in pods] == [{"type": "p5"}]
    await until(lambda: len(shell.server.workloads) == 4)


async def test_the_label_of_a_template_is_written_with_the_record(shell: Shell) -> None:
    template = {"metadata": {"labels": QUEUED}, "spec": {"containers": [{"name": "train", "image": "train:1"}]}}
    spec = {"replicaSpecs": [{"name": "workers", "replicas": 2, "maxReplicas": 4, "template": template}]}
    shell.submit(job_body(spec))
    await until(lambda: BASE in shell.server.workloads)
    meta = shell.server.jobs["job"]["metadata"]
    assert meta["labels"] == QUEUED
    assert ANNOTATION_STATE in meta["annotations"]
    before = shell.writes()[: shell.writes().index(("POST", "workloads"))]
    assert (before[0], before.count(("PATCH", "job"))) == (("PATCH", "job"), 1), "one write for both"


async def test_an_operator_that_starts_anew_waits_for_the_list_of_workloads(shell: Shell) -> None:
    shell.submit(job_body(labels=QUEUED))
    await until(lambda: BASE in shell.server.workloads)
    shell.watch(shell.server.admit(BASE))
    await until(lambda: len(shell.server.workloads) == 4)
    body = shell.server.jobs["job"]
    shell.reconciler.forget(JOB_UID)
    shell.server.refuse["list"] = CANNOT_CONVERT
    asked = shell.server.calls.count(("GET", "workloads"))
    shell.submit(body)
    await until(lambda: shell.server.calls.count(("GET", "workloads")) > asked)
    before = len(shell.writes())  # what the former one still had under way has come by now
    await until(lambda: shell.server.calls.count(("GET", "workloads")) >= asked + 3)
    assert shell.writes()[before:] == [], "a job that seemed to have lost its quota would be stopped"
    del shell.server.refuse["list"]
    await until(lambda: ("GET", "pods") in shell.server.calls)


async def test_kueue_that_comes_later_is_asked_at_once(shell: Shell) -> None:
    shell.server.refuse = dict.fromkeys(("list", "create"), (404, "the server could not find the requested resource"))
    shell.submit(job_body(labels=QUEUED))
    await until(lambda: shell.state().get("reason") == "KueueUnavailable")
    shell.server.refuse = {}
    shell.reconciler.retry_queues()
    await until(lambda: BASE in shell.server.workloads)
    await until(lambda: shell.state().get("reason") != "KueueUnavailable")
