"""The LocalQueues and ClusterQueues of Kueue, read into facts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..core.queue_facts import ClusterQueueFact, QueueFact
from .reading import condition_of, mapping, mappings, name_of, text

Body = Mapping[str, Any]


class QueueTable:
    """All queues of the cluster at one moment. cluster_queues: None if the operator may not read them."""

    def __init__(self, local_queues: Iterable[Body], cluster_queues: Iterable[Body] | None) -> None:
        self._local = {
            (text(mapping(b.get("metadata")).get("namespace")), name_of(b)): b for b in mappings(local_queues)
        }
        self._cluster = {name_of(b): b for b in mappings(cluster_queues)} if cluster_queues is not None else None

    def fact(self, namespace: str, name: str) -> QueueFact:
        """Give a LocalQueue and the ClusterQueue that it points to."""
        body = self._local.get((namespace, name))
        if body is None:
            return QueueFact(name=name, exists=False)
        stop, inactive = _stop(body), _inactive(body)
        if self._cluster is None:
            return QueueFact(name=name, stop=stop, inactive=inactive)
        points_to = text(mapping(body.get("spec")).get("clusterQueue"))
        return QueueFact(name=name, stop=stop, inactive=inactive, cluster_queue=self._cluster_queue(points_to))

    def _cluster_queue(self, name: str) -> ClusterQueueFact:
        body = (self._cluster or {}).get(name)
        if body is None:
            return ClusterQueueFact(name=name, exists=False)
        spec = mapping(body.get("spec"))
        within = mapping(spec.get("preemption")).get("withinClusterQueue") or "Never"
        return ClusterQueueFact(
            name=name,
            stop=_stop(body),
            inactive=_inactive(body),
            can_preempt_within=within != "Never",
            is_strict=spec.get("queueingStrategy") == "StrictFIFO",
        )


def _stop(body: Body) -> str:
    policy = text(mapping(body.get("spec")).get("stopPolicy")) or "None"
    return "" if policy == "None" else policy


def _inactive(body: Body) -> str:
    """Give the reason and message of Kueue; empty while the queue is active, and before Kueue has reconciled it."""
    active = condition_of(body, "Active")
    return f"{text(active.get('reason'))}: {text(active.get('message'))}" if active.get("status") == "False" else ""
