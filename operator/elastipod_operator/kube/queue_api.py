"""The calls that concern Kueue: Workloads, and what their admission refers to. As of kueue.x-k8s.io/v1beta2 only."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from ..core.names import LABEL_INCREMENT
from .api import APPLY_PATCH, MERGE_PATCH, as_yaml
from .api_ports import RawCalls
from .workloads import GROUP, LABEL_OF_JOB, VERSION

ROOT = f"/apis/{GROUP}/{VERSION}"
PRIORITY_CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"
# A watch that the API server has not ended by then counts as dead.
WATCH_MARGIN_S = 30

Body = dict[str, Any]


class QueueApi:
    """Reads and writes around queues. Raises as Api does."""

    def __init__(self, api: RawCalls) -> None:
        self._api = api

    async def list_workloads(self, namespace: str, job_uid: str = "") -> tuple[list[Body], int]:
        """Give Workloads, consistently read, and the version of the list: a job's, or those of all jobs. namespace: "" for all."""
        selector = f"{LABEL_OF_JOB}={job_uid},{LABEL_INCREMENT}" if job_uid else LABEL_INCREMENT
        answer = await self._api.call("GET", _workloads(namespace), query=[("labelSelector", selector)])
        return answer["items"], int(answer["metadata"].get("resourceVersion") or 0)

    def watch_workloads(self, namespace: str, version: int, seconds: int) -> AsyncIterator[Body]:
        """Give the events of the Workloads of all jobs after a version, for some seconds."""
        query = [
            ("labelSelector", LABEL_INCREMENT),
            ("resourceVersion", str(version)),
            ("timeoutSeconds", str(seconds)),
            ("allowWatchBookmarks", "true"),
        ]
        return self._api.watch(_workloads(namespace), query, seconds + WATCH_MARGIN_S)

    async def read_workload(self, namespace: str, name: str) -> Body:
        """Give a Workload as it is now."""
        return await self._api.call("GET", f"{_workloads(namespace)}/{name}")

    async def create_workload(self, manifest: Mapping[str, Any]) -> Body:
        """Create a Workload; 409 if it exists."""
        path = _workloads(manifest["metadata"]["namespace"])
        return await self._api.call("POST", path, dict(manifest))

    async def delete_workload(self, namespace: str, name: str, uid: str) -> Body:
        """Delete a Workload if it is still the same one; gives the Workload if a finalizer keeps it, else a Status."""
        return await self._api.call("DELETE", f"{_workloads(namespace)}/{name}", {"preconditions": {"uid": uid}})

    async def patch_workload_status(self, namespace: str, name: str, patch: Mapping[str, Any]) -> Body:
        """Merge into the status if the Workload is still at the patch's version; otherwise the answer is 409."""
        path = f"{_workloads(namespace)}/{name}/status"
        return await self._api.call("PATCH", path, patch, content_type=MERGE_PATCH)

    async def apply_workload_status(self, manager: str, body: Mapping[str, Any]) -> Body:
        """Apply the conditions of one field manager."""
        meta = body["metadata"]
        path = f"{_workloads(meta['namespace'])}/{meta['name']}/status"
        query = [("fieldManager", manager), ("force", "true")]
        return await self._api.call("PATCH", path, as_yaml(body), query=query, content_type=APPLY_PATCH)

    async def read_local_queue(self, namespace: str, name: str) -> Body:
        """Give a LocalQueue."""
        return await self._api.call("GET", f"{ROOT}/namespaces/{namespace}/localqueues/{name}")

    async def list_local_queues(self, namespace: str) -> list[Body]:
        """Give the LocalQueues of a namespace; "" for all."""
        return await self._list(f"{ROOT}/namespaces/{namespace}/localqueues" if namespace else f"{ROOT}/localqueues")

    async def list_cluster_queues(self) -> list[Body]:
        """Give all ClusterQueues."""
        return await self._list(f"{ROOT}/clusterqueues")

    async def patch_workload(self, namespace: str, name: str, patch: Mapping[str, Any]) -> Body:
        """Merge into a Workload; 409 if its UID differs from that in the patch."""
        path = f"{_workloads(namespace)}/{name}"
        return await self._api.call("PATCH", path, patch, content_type=MERGE_PATCH)

    async def read_flavor(self, name: str) -> Body:
        """Give a ResourceFlavor."""
        return await self._api.call("GET", f"{ROOT}/resourceflavors/{name}")

    async def read_class(self, kind: str, name: str) -> Body:
        """Give a WorkloadPriorityClass or a PriorityClass."""
        folder = f"{ROOT}/workloadpriorityclasses" if kind == "WorkloadPriorityClass" else PRIORITY_CLASSES
        return await self._api.call("GET", f"{folder}/{name}")

    async def list_priority_classes(self) -> list[Body]:
        """Give all PriorityClasses."""
        return await self._list(PRIORITY_CLASSES)

    async def read_node(self, name: str) -> Body:
        """Give a node."""
        return await self._api.call("GET", f"/api/v1/nodes/{name}")

    async def _list(self, path: str) -> list[Body]:
        answer = await self._api.call("GET", path)
        found: list[Body] = answer["items"]
        return found


def _workloads(namespace: str) -> str:
    return f"{ROOT}/namespaces/{namespace}/workloads" if namespace else f"{ROOT}/workloads"
