"""Objects to which Workloads refer: priority classes, flavors, and the nodes of a base. Read on demand and cached briefly."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from .. import clock
from ..core.actions import CreateWorkload
from ..core.reasons import AnyReason, Reason
from .api import ApiError
from .placement import first_domain, node_labels
from .pods import HOSTNAME
from .queue_api import QueueApi
from .workloads import (
    CLASS_OF_QUEUES,
    Priority,
    PrioritySource,
    base_priority_source,
    increment_priority,
    is_placed_alike,
    own_priority_source,
    required_level,
)

KEPT_FOR = timedelta(seconds=30)

Body = Mapping[str, Any]


class QuotaError(Exception):
    """Quota cannot be requested, with a reason and one sentence."""

    def __init__(self, reason: AnyReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class BaseNotPlaced(Exception):
    """The pods of the base have no nodes yet, so the increments cannot be placed beside them."""


class KueueLookups:
    """Reads flavors and classes. Raises QuotaError if one is missing, else as Api does."""

    def __init__(self, api: QueueApi) -> None:
        self._api = api
        self._kept: dict[tuple[str, str], tuple[datetime, Body]] = {}

    async def priority(self, job: Body, spec: Body, order: CreateWorkload, base: Body | None) -> Priority:
        """Compute the priority of a new Workload. base: the job's base, for increments."""
        wish = base_priority_source(job, spec) if base is None else own_priority_source(spec, order)
        if wish is not None:
            return await self._of_class(wish)
        assert base is not None
        return increment_priority(_value((base.get("spec") or {}).get("priority")))

    async def _of_class(self, wish: PrioritySource) -> Priority:
        if not wish.name:
            return await self._default()
        body = await self._read(wish.kind, wish.name, lambda: self._api.read_class(wish.kind, wish.name))
        if body is None:
            what = "label kueue.x-k8s.io/priority-class" if wish.kind == CLASS_OF_QUEUES else "priorityClassName"
            raise QuotaError(
                Reason.PRIORITY_CLASS_MISSING, f"{wish.kind} {wish.name}, which {what} names, does not exist"
            )
        return Priority(_value(body.get("value")), wish.kind, wish.name)

    async def _default(self) -> Priority:
        found = [c for c in await self._api.list_priority_classes() if c.get("globalDefault")]
        if not found:
            return Priority(0)
        # Kubernetes itself uses the lowest if several are marked as the default.
        first = min(found, key=lambda c: _value(c.get("value")))
        return Priority(_value(first.get("value")), "PriorityClass", first["metadata"]["name"])

    async def flavors(self, names: Iterable[str]) -> dict[str, Body]:
        """Give flavors by name; those that do not exist are left out."""
        found: dict[str, Body] = {}
        for name in names:
            body = await self._read("ResourceFlavor", name, lambda name=name: self._api.read_flavor(name))  # type: ignore[misc]
            if body is not None:
                found[name] = body
        return found

    async def pins(
        self, base: Body, spec: Body, order: CreateWorkload, flavors: Mapping[str, Body], nodes: Iterable[str]
    ) -> dict[str, dict[str, str]]:
        """Give the node labels by spec that pods of an increment must have: training is as slow as its slowest replica.

        They are the labels of the base's flavors, if the spec requests the same nodes, and the topology domain of the base, if all
        pods of a spec must share one. nodes: those of the base's pods. Raises BaseNotPlaced if the domain is unknown.
        """
        by_name = {s["name"]: s for s in spec["replicaSpecs"]}
        in_base = [s["name"] for s in (base.get("spec") or {}).get("podSets") or () if s.get("name") in by_name]
        found: dict[str, dict[str, str]] = {}
        for name, count in order.counts:
            like = next((n for n in in_base if n == name or is_placed_alike(by_name[n], by_name[name])), "")
            if not count or not like:
                continue
            found[name] = node_labels(base, like, flavors)
            level = required_level(spec, name)
            if level:
                found[name][level] = await self._domain(level, first_domain(base, like), nodes)
        return found

    async def _domain(self, level: str, place: Mapping[str, str], nodes: Iterable[str]) -> str:
        if level in place:
            return place[level]
        # If hosts are the lowest level, Kueue names only hosts.
        for node in (*filter(None, [place.get(HOSTNAME)]), *nodes):
            body = await self._read("Node", node, lambda node=node: self._api.read_node(node))  # type: ignore[misc]
            value = ((body or {}).get("metadata", {}).get("labels") or {}).get(level)
            if value:
                return str(value)
        raise BaseNotPlaced(f"no pod of the base is on a node whose {level} is known yet")

    async def _read(self, kind: str, name: str, read: Callable[[], Awaitable[Body]]) -> Body | None:
        now = clock.now()
        at, body = self._kept.get((kind, name), (None, None))
        if at is not None and now - at < KEPT_FOR:
            return body
        try:
            body = await read()
        except ApiError as error:
            if error.status != 404:
                raise
            self._kept.pop((kind, name), None)
            return None
        self._kept = {key: (at, kept) for key, (at, kept) in self._kept.items() if now - at < KEPT_FOR}
        self._kept[kind, name] = (now, body)
        return body


def _value(found: Any) -> int:
    return found if isinstance(found, int) and not isinstance(found, bool) else 0
