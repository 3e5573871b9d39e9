"""As much of an API server as the operator's shell calls, in this process: jobs, pods, Events and leases as plain bodies."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web
from kubernetes.aio import client
from tests import web_servers
from tests.unit.kube.bodies import CREATED

from elastipod_operator.kube.api import Api

Body = dict[str, Any]
JOBS = "/apis/sagemaker.amazonaws.com/v1/namespaces/{namespace}/hyperpodpytorchjobs/{name}"
PODS = "/api/v1/namespaces/{namespace}/pods"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


class ApiServer:
    """Keeps what it is given; `calls` are the requests so far as (method, last part of the path)."""

    def __init__(self) -> None:
        self.version = 100
        self.jobs: dict[str, Body] = {}
        self.pods: dict[str, Body] = {}
        self.leases: dict[str, Body] = {}
        self.events: list[Body] = []
        self.hold_events = asyncio.Event()
        self.hold_events.set()
        self.hold_pods = asyncio.Event()
        self.hold_pods.set()
        self.secrets: dict[str, Body] = {}
        self.refuse_secrets: tuple[int, str] | None = None
        self.calls: list[tuple[str, str]] = []
        self.refuse_pods: tuple[int, str] | None = None
        self.refuse_deletions: tuple[int, str] | None = None
        self.refuse_job: dict[str, tuple[int, str]] = {}
        """Answers to writes of jobs by what they write: record, status, job."""
        self.before_status: Callable[[Body], None] = lambda job: None
        self.is_broken = False

    def put(self, kind: dict[str, Body], body: Body) -> Body:
        """Store an object as a new version."""
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        kind[body["metadata"]["name"]] = body
        return body

    @web.middleware
    async def log(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls.append((request.method, request.path.rsplit("/", 1)[-1]))
        if self.is_broken:
            return _status(500, "out of order")
        response: web.StreamResponse = await handler(request)
        return response

    async def job(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        job = self.jobs.get(name)
        if job is None:
            return _status(404, f'hyperpodpytorchjobs "{name}" not found')
        if request.method == "GET":
            return web.json_response(job)
        what = "status" if request.path.endswith("/status") else "job" if request.method == "DELETE" else "record"
        if what in self.refuse_job:
            return _status(*self.refuse_job[what])
        body = await request.json()
        if request.method == "DELETE":
            del self.jobs[name]
            return web.json_response({"kind": "Status"})
        wanted = body["metadata"]
        if wanted["uid"] != job["metadata"]["uid"]:
            return _status(409, "Precondition failed: UID in precondition")
        if request.path.endswith("/status"):
            self.before_status(job)
            job["status"] = body["status"]
            return web.json_response(self.put(self.jobs, job))
        if wanted["resourceVersion"] != job["metadata"]["resourceVersion"]:
            return _status(409, "the object has been modified")
        job["metadata"].setdefault("annotations", {}).update(wanted.get("annotations", {}))
        job["metadata"].setdefault("labels", {}).update(wanted.get("labels", {}))
        job["metadata"]["finalizers"] = wanted.get("finalizers", job["metadata"].get("finalizers", []))
        self.put(self.jobs, job)
        if job["metadata"].get("deletionTimestamp") and not job["metadata"]["finalizers"]:
            del self.jobs[name]
        return web.json_response(job)

    async def list_pods(self, request: web.Request) -> web.Response:
        key, _, value = request.query["labelSelector"].partition("=")
        found = [p for p in self.pods.values() if p["metadata"].get("labels", {}).get(key) == value]
        return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": found})

    async def create_pod(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["metadata"]["name"]
        await self.hold_pods.wait()
        if name in self.pods:
            return _status(409, f'pods "{name}" already exists')
        if self.refuse_pods:
            return _status(*self.refuse_pods)
        body["metadata"].update(uid=f"uid-{name}", creationTimestamp=CREATED)
        return web.json_response(
            self.put(self.pods, {**body, "kind": "Pod", "status": {"phase": "Pending"}}), status=201
        )

    async def create_secret(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["metadata"]["name"]
        if name in self.secrets:
            return _status(409, f'secrets "{name}" already exists')
        if self.refuse_secrets:
            return _status(*self.refuse_secrets)
        return web.json_response(self.put(self.secrets, body), status=201)

    async def delete_pod(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if self.refuse_deletions:
            return _status(*self.refuse_deletions)
        if self.pods.pop(name, None) is None:
            return _status(404, f'pods "{name}" not found')
        return web.json_response({"kind": "Status"})

    def routes(self) -> list[web.RouteDef]:
        """Give what is served."""
        return [
            web.route("*", JOBS, self.job),
            web.patch(JOBS + "/status", self.job),
            web.get(PODS, self.list_pods),
            web.post(PODS, self.create_pod),
            web.post("/api/v1/namespaces/{namespace}/secrets", self.create_secret),
            web.delete(PODS + "/{name}", self.delete_pod),
            web.post("/api/v1/namespaces/{namespace}/events", self.event),
            web.post(LEASES, self.lease),
            web.route("*", LEASES + "/{name}", self.lease),
        ]

    async def event(self, request: web.Request) -> web.Response:
        body = await request.json()
        await self.hold_events.wait()
        self.events.append(body)
        return web.json_response({}, status=201)

    async def lease(self, request: web.Request) -> web.Response:
        name = request.match_info.get("name", "")
        if request.method == "GET":
            lease = self.leases.get(name)
            return _status(404, "not found") if lease is None else web.json_response(lease)
        body = await request.json()
        if request.method == "POST":
            if body["metadata"]["name"] in self.leases:
                return _status(409, "already exists")
        elif body["metadata"]["resourceVersion"] != self.leases[name]["metadata"]["resourceVersion"]:
            return _status(409, "the object has been modified")
        return web.json_response(self.put(self.leases, copy.deepcopy(body)))


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "message": message}, status=code)


@contextlib.asynccontextmanager
async def serving(server: ApiServer) -> AsyncIterator[Api]:
    """Serve on a port of loopback; gives the operator's calls to it."""
    application = web.Application(middlewares=[server.log])
    application.add_routes(server.routes())
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=web_servers.SHUTDOWN_S)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    api_client = client.ApiClient(client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}"))
    try:
        yield Api(api_client)
    finally:
        await api_client.close()  # type: ignore[no-untyped-call]  # the client has no annotations here
        await web_servers.end(runner)
