"""Reads how many more pods of a job fit on existing nodes, for jobs with `growth: SpareCapacityOnly`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from . import clock
from .core.avoided_nodes import avoided
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
from .operator_errors import error_location, log_operator_error

# Nodes whose pods are read at a time, and for one observation. The next one begins with other nodes.
PARALLEL, NODES_AT_A_TIME = 16, 64
# How long all calls of one observation may take together, and how long a job that starts waits for the first one.
READ_LIMIT_S, FIRST_WAIT_S = 20.0, 2.0
NOT_ALLOWED = (
    "the operator may not list nodes and the pods of all namespaces, which growth: SpareCapacityOnly needs; install the chart with "
    "spareCapacity.readAllPods=true"
)


class SpareCapacityReader:
    """Keeps what was last read for each job. All of it can be lost without harm. wake: requests a pass for a job.

    Nodes are read beside the reconcile passes, because a slow API server must not delay decisions about workers.
    """

    def __init__(self, api: RawCalls, wake: Callable[[str], None]) -> None:
        self._api = api
        self._wake = wake
        self._found: dict[str, SpareCapacity] = {}
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._reads = 0

    def of(self, job: Job) -> SpareCapacity | None:
        """Give what was last read for a job; None before that, and for jobs that do not ask for it."""
        return self._found.get(job.fact.uid)

    def forget(self, uid: str) -> None:
        """Drop what was read for a deleted job."""
        self._found.pop(uid, None)
        if (reading := self._reading.pop(uid, None)) is not None:
            reading.cancel()

    async def close(self) -> None:
        """End all reading."""
        readings = [*self._reading.values()]
        for reading in readings:
            reading.cancel()
        await asyncio.gather(*readings, return_exceptions=True)

    async def observe(self, job: Job, capacity_freed_at: datetime | None) -> None:
        """Begin to read the nodes for a job that trains below its maximum; at its end the job is woken.

        Nothing is begun if they were read a moment ago, nothing became free since and the same nodes are avoided. A job without
        members waits for a result for a short time, so that it starts at the size for which there is room. So does a job whose pods
        wait for nodes, after a change of the leader: they would be deleted for lack of room that nobody has looked for.
        """
        policy, record, uid = job.fact.policy, job.fact.record, job.fact.uid
        if policy is None or policy.growth is not GrowthMode.SPARE_CAPACITY_ONLY or record is None or record.outcome:
            self.forget(uid)
            return
        known, now = self._found.get(uid), clock.now()
        avoids = avoided(record, policy, now)
        is_fresh = known is not None and now - known.read_at < READ_EVERY and known.avoids == avoids
        if uid in self._reading or (known is not None and is_fresh and not _is_after(capacity_freed_at, known.read_at)):
            return
        placed = frozenset(pod.name for pod in job.pods.values() if pod.node and not pod.ended)
        most = policy.sizes.maximum + sum(spec.spares for spec in policy.specs) - len(placed)
        if most <= 0:
            self._found[uid] = SpareCapacity(read_at=now, placed=placed, avoids=avoids)
            return
        blank = SpareCapacity(read_at=now, placed=placed, avoids=avoids)
        if known is not None:  # so that the next pass is not due before the result
            self._found[uid] = replace(known, read_at=now, avoids=avoids)
        reading = asyncio.create_task(self._keep(job, most, blank), name=f"room for job {uid}")
        self._reading[uid] = reading
        if not is_fresh and (not record.members or (known is None and _awaits_node(job))):
            await asyncio.wait({reading}, timeout=FIRST_WAIT_S)

    async def _keep(self, job: Job, most: int, blank: SpareCapacity) -> None:
        """Read the nodes for a job and keep the result. After a failure, what was read before is kept with the reason.

        blank: the result without any room.
        """
        uid, before = job.fact.uid, self._found.get(job.fact.uid) or blank
        try:
            async with asyncio.timeout(READ_LIMIT_S):
                found = replace(blank, places=await self._read(job, most, blank.avoids))
        except CALL_ERRORS as error:
            found = replace(before, problem=f"the nodes cannot be read: {type(error).__name__} {error}")
            if isinstance(error, ApiError) and error.status == 403:
                found = replace(blank, problem=NOT_ALLOWED)
        except Exception as error:
            # The outer edge of this task: no node may keep the job from being decided about.
            log_operator_error("task", error, job)
            found = replace(before, problem=f"the nodes cannot be read: internal error ({error_location(error)})")
        self._found[uid] = found
        del self._reading[uid]
        self._wake(uid)

    async def _read(self, job: Job, most: int, avoids: Sequence[str]) -> dict[str, int]:
        """Give the places for up to `most` pods by the host name of their node. The last spec is the one that grows."""
        spec = mappings(effective_spec(job.body).get("replicaSpecs"))[-1]
        template = mapping(mapping(spec.get("template")).get("spec"))
        answer = await self._api.call("GET", "/api/v1/nodes", query=[("resourceVersion", "0")])
        there = (node for node in mappings(answer.get("items")) if may_host(template, node, avoids))
        nodes = sorted(there, key=name_of)
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


def _awaits_node(job: Job) -> bool:
    """Whether a pod is restricted to nodes that had room, and has none yet."""
    return any(pod.only_on and not pod.node and not pod.ended for pod in job.pods.values())


def _is_after(at: datetime | None, other: datetime) -> bool:
    return at is not None and at > other
