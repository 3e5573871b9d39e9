"""The API server with Kueue's objects; a test plays Kueue itself."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web
from tests.unit.kube.bodies import CREATED
from tests.unit.kube.queue_bodies import condition
from tests.unit.operator_shell.api_server import ApiServer

Body = dict[str, Any]
KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
WORKLOADS = KUEUE + "/namespaces/{namespace}/workloads"
AWAY = (500, 'failed calling webhook "vworkload.kb.io": connection refused')
CANNOT_CONVERT = (
    500,
    "conversion webhook for kueue.x-k8s.io/v1beta1, TransitionKind=Workload failed: connection refused",
)


class QueueServer(ApiServer):
    """Keeps Workloads as well. refuse: answers by verb (list, read, create, patch, delete, release, tell), in place of the real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.workloads: dict[str, Body] = {}
        self.objects: dict[str, Body] = {}
        """Flavors, queues and classes by kind/name."""
        self.refuse: dict[str, tuple[int, str]] = {}
        self.keeps: Body = {}
        """What a webhook writes into the spec of every Workload."""
        self.managers: list[str] = []
        """Field managers of applies, in order."""

    def routes(self) -> list[web.RouteDef]:
        return [
            *super().routes(),
            web.get(WORKLOADS, self.list_workloads),
            web.post(WORKLOADS, self.create_workload),
            web.get(WORKLOADS + "/{name}", self.read_workload),
            web.delete(WORKLOADS + "/{name}", self.delete_workload),
            web.patch(WORKLOADS + "/{name}", self.patch_workload),
            web.patch(WORKLOADS + "/{name}/status", self.write_status),
            web.get(KUEUE + "/namespaces/{namespace}/{kind}/{name}", self.read_object),
            web.get(KUEUE + "/{kind}/{name}", self.read_object),
            web.get("/apis/scheduling.k8s.io/v1/{kind}/{name}", self.read_object),
            web.get("/apis/scheduling.k8s.io/v1/priorityclasses", self.no_classes),
        ]

    def admit(self, name: str, flavor: str = "gpus") -> Body:
        """Do what Kueue does when there is quota."""
        body = self.workloads[name]
        assigned = [
            {"name": s["name"], "count": s["count"], "flavors": {"cpu": flavor}} for s in body["spec"]["podSets"]
        ]
        body["status"] = {
            "admission": {"clusterQueue": "q", "podSetAssignments": assigned},
            "conditions": [condition("QuotaReserved"), condition("Admitted")],
        }
        return self.put(self.workloads, body)

    def evict(self, name: str, reason: str = "Preempted") -> Body:
        """Do what Kueue does when somebody else is to have the quota."""
        body = self.workloads[name]
        body["status"]["conditions"].append(condition("Evicted", reason=reason, message="room is needed"))
        return self.put(self.workloads, body)

    async def list_workloads(self, request: web.Request) -> web.Response:
        if "list" in self.refuse:
            return _status(*self.refuse["list"])
        uid = request.query["labelSelector"].split(",")[0].partition("=")[2]
        found = [w for w in self.workloads.values() if w["metadata"]["labels"]["kueue.x-k8s.io/job-uid"] == uid]
        return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": found})

    async def create_workload(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["metadata"]["name"]
        if "create" in self.refuse:
            return _status(*self.refuse["create"])
        if name in self.workloads:
            return _status(409, f'workloads "{name}" already exists')
        body["metadata"].update(uid=f"uid-{name}-{self.version}", creationTimestamp=CREATED)
        return web.json_response(self.put(self.workloads, {**body, "status": {}}), status=201)

    async def read_workload(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if "read" in self.refuse:
            return _status(*self.refuse["read"])
        if name not in self.workloads:
            return _status(404, f'workloads "{name}" not found')
        return web.json_response(self.workloads[name])

    async def delete_workload(self, request: web.Request) -> web.Response:
        name, body = request.match_info["name"], await request.json()
        if "delete" in self.refuse:
            return _status(*self.refuse["delete"])
        if name not in self.workloads:
            return _status(404, f'workloads "{name}" not found')
        found = self.workloads[name]
        if found["metadata"]["uid"] != body["preconditions"]["uid"]:
            return _status(409, "Precondition failed: UID in precondition")
        if found["metadata"].get("finalizers"):
            found["metadata"]["deletionTimestamp"] = CREATED
            return web.json_response(self.put(self.workloads, found))
        del self.workloads[name]
        return web.json_response({"kind": "Status"})

    async def patch_workload(self, request: web.Request) -> web.Response:
        name, wanted = request.match_info["name"], json.loads(await request.text())
        if "patch" in self.refuse:
            return _status(*self.refuse["patch"])
        if name not in self.workloads:
            return _status(404, f'workloads "{name}" not found')
        found = self.workloads[name]
        if found["metadata"]["uid"] != wanted["metadata"]["uid"]:
            return _status(409, "Precondition failed: UID in precondition")
        changed = {**found["spec"], **wanted["spec"], **self.keeps}
        found["spec"] = {key: value for key, value in changed.items() if value is not None}
        return web.json_response(self.put(self.workloads, found))

    async def write_status(self, request: web.Request) -> web.Response:
        name, wanted = request.match_info["name"], json.loads(await request.text())
        is_release = "merge-patch" in request.headers["Content-Type"]
        verb = "release" if is_release else "tell"
        if verb in self.refuse:
            return _status(*self.refuse[verb])
        found = self.workloads.get(name)
        if found is None:
            return _status(404, f'workloads "{name}" not found')
        if wanted["metadata"]["uid"] != found["metadata"]["uid"]:
            return _status(409, "uid mismatch")
        status = found["status"]
        if is_release:
            if wanted["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
                return _status(409, "the object has been modified")
            assert wanted["status"].pop("admission") is None
            status.pop("admission", None)
            status |= wanted["status"]
        else:
            self.managers.append(request.query["fieldManager"])
            (one,) = wanted["status"]["conditions"]
            others = [c for c in status.get("conditions", ()) if c["type"] != one["type"]]
            status["conditions"] = [*others, one]
        return web.json_response(self.put(self.workloads, found))

    async def read_object(self, request: web.Request) -> web.Response:
        key = f"{request.match_info['kind']}/{request.match_info['name']}"
        if key in self.refuse:
            return _status(*self.refuse[key])
        found = self.objects.get(key)
        return _status(404, f"{key} not found") if found is None else web.json_response(found)

    async def no_classes(self, request: web.Request) -> web.Response:
        return web.json_response({"items": []})


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "message": message}, status=code)
