"""Writes the objects of a staged situation into a real API server, where `kubectl elastipod why` can read them.

The API server decides about UIDs, times of creation and deletion, and versions; all else is as the situation has it, its times
moved so that its present is now. No controller may change what is written: pods that were not placed have a scheduling gate, so
that no scheduler considers them.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from elastipod_client.situation import Situation
from elastipod_operator.core.names import API_VERSION, KIND, PLURAL
from elastipod_operator.core.time_order import timestamp
from elastipod_operator.kube.api import MERGE_PATCH, Api, ApiError
from elastipod_operator.kube.times import time_or

Body = dict[str, Any]
QUEUES = "/apis/kueue.x-k8s.io/v1beta2"
A_TIME = re.compile(r"2026-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z")
OURS = "elastipod.io/staged"  # the finalizer that keeps a pod which is being deleted
LONG_S = 3600
CONFLICT = 409


class StagedObjects:
    """Writes situations. number: of the stage; names of nodes and of the namespace contain it, because stages share a server."""

    def __init__(self, api: Api, number: int) -> None:
        self._api = api
        self.namespace = f"team-{number}"
        self._number = number

    async def write(self, staged: Situation) -> None:
        """Write a situation. Raises ApiError for an object that the API server does not take."""
        await self._make_namespace()
        job = await self._api.call("POST", self._path(PLURAL, f"/apis/{API_VERSION}"), _new_job(staged.job))
        uid = str(job["metadata"]["uid"])
        later = datetime.now(UTC).replace(microsecond=0) - staged.now
        moved = self._moved(staged, uid, later)
        await asyncio.gather(
            self._finish_job(moved["job"]),
            *(self._write_pod(pod, staged.now + later) for pod in moved["pods"]),
            *(self._write_node(node) for node in moved["nodes"]),
            *(self._write_event(event, number, uid) for number, event in enumerate(moved["events"])),
            *(self._write_workload(one) for one in moved["workloads"]),
            *(self._create("localqueues", _queue(one), QUEUES) for one in moved["queues"]),
        )

    def plain(self, text: str) -> str:
        """Give a text with the namespace and the nodes as the situation calls them."""
        return text.replace(f"{self.namespace}/", "team/").replace(f"node-{self._number}00", "node-")

    def _moved(self, staged: Situation, uid: str, later: timedelta) -> dict[str, Any]:
        """Give the objects with the UID of the written job, with their times moved, and with names of this stage."""
        objects = {
            "job": staged.job,
            "pods": list(staged.pods),
            "nodes": list(staged.nodes.values()),
            "events": list(staged.events),
            "workloads": list(staged.workloads),
            "queues": [staged.local_queue] if staged.local_queue else [],
        }
        old = re.escape(str(staged.job["metadata"]["uid"]))
        text = re.sub(rf"\b{old}\b", uid, json.dumps(objects))
        text = re.sub(r"\bnode-(\d+)\b", rf"node-{self._number}00\1", text)

        def move(found: re.Match[str]) -> str:
            return timestamp(time_or(found[0], staged.now) + later)

        moved: dict[str, Any] = json.loads(A_TIME.sub(move, text))
        return moved

    async def _make_namespace(self) -> None:
        metadata = {"metadata": {"name": self.namespace}}
        await self._api.call("POST", "/api/v1/namespaces", metadata)
        try:
            await self._create("serviceaccounts", {"metadata": {"name": "default"}})
        except ApiError as error:
            if error.status != CONFLICT:  # the controller manager was faster
                raise

    async def _finish_job(self, job: Body) -> None:
        path = f"{self._path(PLURAL, f'/apis/{API_VERSION}')}/{job['metadata']['name']}"
        annotations = {"metadata": {"annotations": job["metadata"]["annotations"]}}
        await self._api.call("PATCH", path, annotations, content_type=MERGE_PATCH)
        if job["status"]:
            await self._api.call("PATCH", f"{path}/status", {"status": job["status"]}, content_type=MERGE_PATCH)
        if "deletionTimestamp" in job["metadata"]:
            await self._api.call("DELETE", path)

    async def _write_pod(self, pod: Body, now: datetime) -> None:
        meta, spec = pod["metadata"], pod["spec"]
        kept = {key: meta[key] for key in ("name", "labels", "annotations", "ownerReferences")}
        placed = {"nodeName": spec["nodeName"]} if spec["nodeName"] else {"schedulingGates": [{"name": OURS}]}
        until = meta.get("deletionTimestamp")
        body = {
            "metadata": {**kept, **({"finalizers": [OURS]} if until else {})},
            "spec": {"containers": spec["containers"], "automountServiceAccountToken": False, **placed},
        }
        await self._create("pods", body)
        path = f"{self._path('pods')}/{meta['name']}"
        await self._api.call("PATCH", f"{path}/status", {"status": pod["status"]}, content_type=MERGE_PATCH)
        if until:
            is_late = time_or(until, now) < now
            await self._api.call("DELETE", path, {"gracePeriodSeconds": 0 if is_late else LONG_S})

    async def _write_node(self, node: Body) -> None:
        meta, spec = node["metadata"], node["spec"]
        body = {"metadata": {"name": meta["name"], "labels": meta["labels"]}, "spec": spec}
        await self._api.call("POST", "/api/v1/nodes", body)
        path = f"/api/v1/nodes/{meta['name']}/status"
        await self._api.call("PATCH", path, {"status": node["status"]}, content_type=MERGE_PATCH)

    async def _write_event(self, event: Body, number: int, uid: str) -> None:
        about = {"apiVersion": API_VERSION, "kind": KIND, "name": "train", "namespace": self.namespace, "uid": uid}
        # Names in the opposite order, because those of real Events say nothing about their order.
        name = f"train.{9999 - number}"
        await self._create("events", {"metadata": {"name": name}, "involvedObject": about, **event})

    async def _write_workload(self, one: Body) -> None:
        meta, status = one["metadata"], one["status"]
        kept = {key: meta[key] for key in ("name", "labels", "annotations", "ownerReferences") if key in meta}
        await self._create("workloads", {"kind": "Workload", "metadata": kept, "spec": one["spec"]}, QUEUES)
        path = f"{self._path('workloads', QUEUES)}/{meta['name']}/status"
        written = {key: value for key, value in status.items() if key in ("conditions", "admission")}
        await self._api.call("PATCH", path, {"status": written}, content_type=MERGE_PATCH)

    async def _create(self, plural: str, body: Mapping[str, Any], group: str = "/api/v1") -> None:
        versioned = {**body, "apiVersion": group.removeprefix("/apis/").removeprefix("/api/")}
        await self._api.call("POST", self._path(plural, group), versioned)

    def _path(self, plural: str, group: str = "/api/v1") -> str:
        return f"{group}/namespaces/{self.namespace}/{plural}"


def _new_job(job: Mapping[str, Any]) -> Body:
    kept = {key: job["metadata"][key] for key in ("name", "labels", "finalizers")}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": kept, "spec": job["spec"]}


def _queue(one: Mapping[str, Any]) -> Body:
    return {"kind": "LocalQueue", "metadata": one["metadata"], "spec": {"clusterQueue": "staged"}}
