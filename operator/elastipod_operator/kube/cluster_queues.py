"""Queues as they are read from the API server: what a job has to know of them (facts of Kueue 6 and 7). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.queue_facts import ClusterQueueFact, FlavorRoom, QueueFact
from .needs import thousandths

Body = Mapping[str, Any]
FlavorResource = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Limits:
    """One quota. None: unlimited."""

    nominal: int
    borrowing: int | None
    lending: int | None


@dataclass(slots=True)
class Holder:
    """A ClusterQueue or a Cohort in the tree of those that lend to each other."""

    parent: str = ""
    """Its cohort."""
    quotas: dict[FlavorResource, Limits] = field(default_factory=dict)
    children: list[Holder] = field(default_factory=list)


class QueueTable:
    """All queues of the cluster as they were at one moment. cluster_queues, cohorts: None where they may not be read."""

    def __init__(
        self, local_queues: Iterable[Body], cluster_queues: Iterable[Body] | None, cohorts: Iterable[Body] | None
    ) -> None:
        self._local = {(b["metadata"]["namespace"], b["metadata"]["name"]): b for b in local_queues}
        self._cluster = {b["metadata"]["name"]: b for b in cluster_queues} if cluster_queues is not None else None
        self._holders = {name: _holder(b, "cohortName") for name, b in (self._cluster or {}).items()}
        self._cohorts = {b["metadata"]["name"]: _holder(b, "parentName") for b in cohorts or ()}
        self._knows_cohorts = cohorts is not None
        for one in (*self._holders.values(), *list(self._cohorts.values())):
            if one.parent:  # a cohort need not have an object of its own
                self._cohorts.setdefault(one.parent, Holder()).children.append(one)

    def flavors_of(self, namespace: str, name: str) -> list[str]:
        """Give the names of the flavors behind a LocalQueue."""
        body = (self._cluster or {}).get(_leads_to(self._local.get((namespace, name), {})), {})
        return list(dict.fromkeys(str(f.get("name")) for g in _groups(body) for f in g.get("flavors") or ()))

    def fact(self, namespace: str, name: str, flavors: Mapping[str, Body]) -> QueueFact:
        """Give a LocalQueue with what it leads to. flavors: those behind it, by name."""
        body = self._local.get((namespace, name))
        if body is None:
            return QueueFact(name=name, is_there=False)
        stop, inactive = _stop(body), _inactive(body)
        if self._cluster is None:
            return QueueFact(name=name, stop=stop, inactive=inactive)
        return QueueFact(
            name=name, stop=stop, inactive=inactive, cluster_queue=self._cluster_queue(_leads_to(body), flavors)
        )

    def _cluster_queue(self, name: str, flavors: Mapping[str, Body]) -> ClusterQueueFact:
        body = (self._cluster or {}).get(name)
        if body is None:
            return ClusterQueueFact(name=name, is_there=False)
        spec, holder = body.get("spec") or {}, self._holders[name]
        within = (spec.get("preemption") or {}).get("withinClusterQueue") or "Never"
        return ClusterQueueFact(
            name=name,
            stop=_stop(body),
            inactive=_inactive(body),
            sheds=within != "Never",
            is_strict=spec.get("queueingStrategy") == "StrictFIFO",
            cohort=holder.parent,
            groups=self._groups(body, holder, flavors) if self._is_known(holder) else (),
        )

    def _groups(self, body: Body, holder: Holder, flavors: Mapping[str, Body]) -> tuple[tuple[FlavorRoom, ...], ...]:
        found: list[tuple[FlavorRoom, ...]] = []
        for group in _groups(body):
            rooms: list[FlavorRoom] = []
            for flavor in group.get("flavors") or ():
                name = str(flavor.get("name"))
                labels = (flavors.get(name, {}).get("spec") or {}).get("nodeLabels") or {}
                resources = [str(r.get("name")) for r in flavor.get("resources") or ()]
                most = tuple((r, self._most(holder, (name, r))) for r in resources)
                rooms.append(FlavorRoom(name, most, tuple(sorted(labels.items()))))
            found.append(tuple(rooms))
        return tuple(found)

    def _is_known(self, holder: Holder) -> bool:
        """Whether it can be told what cohorts lend: not where they are each other's parents, which Kueue itself tells of."""
        seen: set[str] = set()
        while holder.parent:
            if holder.parent in seen or not self._knows_cohorts:
                return False
            seen.add(holder.parent)
            holder = self._cohorts[holder.parent]
        return True

    def _most(self, holder: Holder, what: FlavorResource) -> int:
        """Give the most that a holder can ever use: what it keeps for itself, and what its cohort can let it have."""
        total = _subtree(holder, what)
        if not holder.parent:
            return total
        limits = holder.quotas.get(what)
        most = total - _lent(holder, what) + self._most(self._cohorts[holder.parent], what)
        if limits is None or limits.borrowing is None:
            return most
        return min(most, total + limits.borrowing)


def _subtree(holder: Holder, what: FlavorResource) -> int:
    """Give all that a holder has of its own and from those below it."""
    own = holder.quotas.get(what)
    return (own.nominal if own is not None else 0) + sum(_lent(child, what) for child in holder.children)


def _lent(holder: Holder, what: FlavorResource) -> int:
    """Give how much of that others may have."""
    total, limits = _subtree(holder, what), holder.quotas.get(what)
    return total if limits is None or limits.lending is None else min(total, limits.lending)


def _holder(body: Body, parent: str) -> Holder:
    quotas = {
        (str(flavor.get("name")), str(resource.get("name"))): Limits(
            thousandths(resource.get("nominalQuota")) or 0,
            thousandths(resource.get("borrowingLimit")),
            thousandths(resource.get("lendingLimit")),
        )
        for group in _groups(body)
        for flavor in group.get("flavors") or ()
        for resource in flavor.get("resources") or ()
    }
    return Holder(str((body.get("spec") or {}).get(parent) or ""), quotas)


def _groups(body: Body) -> Iterable[Body]:
    found: Iterable[Body] = (body.get("spec") or {}).get("resourceGroups") or ()
    return found


def _leads_to(body: Body) -> str:
    return str((body.get("spec") or {}).get("clusterQueue") or "")


def _stop(body: Body) -> str:
    policy = str((body.get("spec") or {}).get("stopPolicy") or "None")
    return "" if policy == "None" else policy


def _inactive(body: Body) -> str:
    """Give Kueue's own words; empty while the queue is active, or was not looked at yet."""
    conditions = (body.get("status") or {}).get("conditions") or ()
    active: Body = next((c for c in conditions if c.get("type") == "Active"), {})
    return f"{active.get('reason')}: {active.get('message')}" if active.get("status") == "False" else ""
