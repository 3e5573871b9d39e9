"""Queues as they are read from the API server: what a job has to know of them (facts of Kueue 6 and 7). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.queue_facts import ClusterQueueFact, FlavorCapacity, QueueFact
from .needs import thousandths
from .reading import mapping, mappings, name_of, text, texts

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
        self._local = {
            (text(mapping(b.get("metadata")).get("namespace")), name_of(b)): b for b in mappings(local_queues)
        }
        self._cluster = {name_of(b): b for b in mappings(cluster_queues)} if cluster_queues is not None else None
        self._holders = {name: _holder(b, "cohortName") for name, b in (self._cluster or {}).items()}
        self._cohorts = {name_of(b): _holder(b, "parentName") for b in mappings(cohorts)}
        self._knows_cohorts = cohorts is not None
        for one in (*self._holders.values(), *list(self._cohorts.values())):
            if one.parent:  # a cohort need not have an object of its own
                self._cohorts.setdefault(one.parent, Holder()).children.append(one)

    def flavors_of(self, namespace: str, name: str) -> list[str]:
        """Give the names of the flavors behind a LocalQueue."""
        body = (self._cluster or {}).get(_leads_to(self._local.get((namespace, name), {})), {})
        return list(dict.fromkeys(text(f.get("name")) for g in _groups(body) for f in mappings(g.get("flavors"))))

    def fact(self, namespace: str, name: str, flavors: Mapping[str, Body]) -> QueueFact:
        """Give a LocalQueue with what it leads to. flavors: those behind it, by name."""
        body = self._local.get((namespace, name))
        if body is None:
            return QueueFact(name=name, exists=False)
        stop, inactive = _stop(body), _inactive(body)
        if self._cluster is None:
            return QueueFact(name=name, stop=stop, inactive=inactive)
        return QueueFact(
            name=name, stop=stop, inactive=inactive, cluster_queue=self._cluster_queue(_leads_to(body), flavors)
        )

    def _cluster_queue(self, name: str, flavors: Mapping[str, Body]) -> ClusterQueueFact:
        body = (self._cluster or {}).get(name)
        if body is None:
            return ClusterQueueFact(name=name, exists=False)
        spec, holder = mapping(body.get("spec")), self._holders[name]
        within = mapping(spec.get("preemption")).get("withinClusterQueue") or "Never"
        return ClusterQueueFact(
            name=name,
            stop=_stop(body),
            inactive=_inactive(body),
            can_preempt_within=within != "Never",
            is_strict=spec.get("queueingStrategy") == "StrictFIFO",
            cohort=holder.parent,
            groups=self._groups(body, holder, flavors) if self._is_known(holder) else (),
        )

    def _groups(
        self, body: Body, holder: Holder, flavors: Mapping[str, Body]
    ) -> tuple[tuple[FlavorCapacity, ...], ...]:
        found: list[tuple[FlavorCapacity, ...]] = []
        for group in _groups(body):
            rooms: list[FlavorCapacity] = []
            for flavor in mappings(group.get("flavors")):
                name = text(flavor.get("name"))
                labels = texts(mapping(mapping(flavors.get(name)).get("spec")).get("nodeLabels"))
                resources = [text(r.get("name")) for r in mappings(flavor.get("resources"))]
                most = tuple((r, self._most(holder, (name, r))) for r in resources)
                rooms.append(FlavorCapacity(name, most, tuple(sorted(labels.items()))))
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
        (text(flavor.get("name")), text(resource.get("name"))): Limits(
            thousandths(resource.get("nominalQuota")) or 0,
            thousandths(resource.get("borrowingLimit")),
            thousandths(resource.get("lendingLimit")),
        )
        for group in _groups(body)
        for flavor in mappings(group.get("flavors"))
        for resource in mappings(flavor.get("resources"))
    }
    return Holder(text(mapping(body.get("spec")).get(parent)), quotas)


def _groups(body: Body) -> list[Body]:
    return mappings(mapping(body.get("spec")).get("resourceGroups"))


def _leads_to(body: Body) -> str:
    return text(mapping(body.get("spec")).get("clusterQueue"))


def _stop(body: Body) -> str:
    policy = text(mapping(body.get("spec")).get("stopPolicy")) or "None"
    return "" if policy == "None" else policy


def _inactive(body: Body) -> str:
    """Give Kueue's own words; empty while the queue is active, or was not looked at yet."""
    conditions = mappings(mapping(body.get("status")).get("conditions"))
    active: Body = next((c for c in conditions if c.get("type") == "Active"), {})
    return f"{text(active.get('reason'))}: {text(active.get('message'))}" if active.get("status") == "False" else ""
