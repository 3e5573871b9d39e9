"""Reads how many more pods of a job fit on existing nodes, for jobs with `growth: SpareCapacityOnly`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from . import clock
from .core.growth_mode import GrowthMode
from .core.requested_pods import READ_EVERY
from .core.snapshot import SpareCapacity
from .kube.api import CALL_ERRORS, ApiError
from .kube.api_ports import Body, RawCalls
from .kube.applied import effective_spec
from .kube.pods import HOSTNAME
from .kube.reading import labels_of, mapping, mappings, name_of
from .kube.spare_room import may_host, places
from .kube.store import Job

# Nodes whose pods are read at a time, and for one observation. The next one begins with other nodes.
PARALLEL, NODES_AT_A_TIME = 16, 64
NOT_ALLOWED = (
    "the operator may not list nodes and the pods of all namespaces, which growth: SpareCapacityOnly needs; install the chart with "
    "spareCapacity.readAllPods=true"
)


class SpareCapacityReader:
    """Keeps what was last read for each job. All of it can be lost without harm."""

    def __init__(self, api: RawCalls) -> None:
        self._api = api
        self._found: dict[str, SpareCapacity] = {}
        self._reads = 0

    def of(self, job: Job) -> SpareCapacity | None:
        """Give what was last read for a job; None before that, and for jobs that do not ask for it."""
        return self._found.get(job.fact.uid)

    def forget(self, uid: str) -> None:
        """Drop what was read for a deleted job."""
        self._found.pop(uid, None)

    async def observe(self, job: Job, capacity_freed_at: datetime | None) -> None:
        """Read the nodes for a job that trains below its maximum, unless that was done a moment ago and nothing became free since."""
        policy, record = job.fact.policy, job.fact.record
        if policy is None or policy.growth is not GrowthMode.SPARE_CAPACITY_ONLY or record is None or record.outcome:
            self.forget(job.fact.uid)
            return
        known, now = self._found.get(job.fact.uid), clock.now()
        if known is not None and now - known.read_at < READ_EVERY and not _is_after(capacity_freed_at, known.read_at):
            return
        placed = frozenset(pod.name for pod in job.pods.values() if pod.node and not pod.ended)
        most = policy.sizes.maximum + sum(spec.spares for spec in policy.specs) - len(placed)
        try:
            found = await self._read(job, most) if most > 0 else {}
            problem = ""
        except CALL_ERRORS as error:
            is_forbidden = isinstance(error, ApiError) and error.status == 403
            found, problem = (
                {},
                NOT_ALLOWED if is_forbidden else f"the nodes cannot be read: {type(error).__name__} {error}",
            )
        self._found[job.fact.uid] = SpareCapacity(read_at=now, places=found, placed=placed, problem=problem)

    async def _read(self, job: Job, most: int) -> dict[str, int]:
        """Give the places for up to `most` pods by the host name of their node. The last spec is the one that grows."""
        spec = mappings(effective_spec(job.body).get("replicaSpecs"))[-1]
        template = mapping(mapping(spec.get("template")).get("spec"))
        answer = await self._api.call("GET", "/api/v1/nodes", query=[("resourceVersion", "0")])
        nodes = sorted((node for node in mappings(answer.get("items")) if may_host(template, node)), key=name_of)
        first = self._reads * NODES_AT_A_TIME % max(1, len(nodes))
        self._reads += 1
        nodes = [*nodes[first:], *nodes[:first]][:NODES_AT_A_TIME]
        found: dict[str, int] = {}
        for at in range(0, len(nodes), PARALLEL):
            some = nodes[at : at + PARALLEL]
            pods = await asyncio.gather(*map(self._pods_on, some))
            for node, beside in zip(some, pods, strict=True):
                room = places(template, node, beside, most - sum(found.values()))
                if room:
                    found[labels_of(node)[HOSTNAME]] = room
            if sum(found.values()) >= most:
                break
        return found

    async def _pods_on(self, node: Mapping[str, Any]) -> list[Body]:
        """Give the pods of a node that have not ended; the API server finds them by an index."""
        chosen = f"spec.nodeName={name_of(node)},status.phase!=Succeeded,status.phase!=Failed"
        query = [("fieldSelector", chosen), ("resourceVersion", "0")]
        answer = await self._api.call("GET", "/api/v1/pods", query=query)
        return [dict(pod) for pod in mappings(answer.get("items"))]


def _is_after(at: datetime | None, other: datetime) -> bool:
    return at is not None and at > other
