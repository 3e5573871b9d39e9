"""Queues as Kueue has them, in small records; amounts are whole thousandths of a resource's unit."""

from __future__ import annotations

from dataclasses import dataclass

Amounts = tuple[tuple[str, int], ...]
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class PodRequests:
    """What one pod of a spec takes of a quota, as far as its template tells, and the node labels that it wants."""

    spec: str
    amounts: Amounts
    selector: Labels = ()


@dataclass(frozen=True, slots=True)
class FlavorCapacity:
    """The most that a ClusterQueue can ever have of a flavor by resource, borrowed quota included; labels: of its nodes."""

    name: str
    most: Amounts
    labels: Labels = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterQueueFact:
    """A ClusterQueue. stop: its stopPolicy where that is not None. inactive: Kueue's reason and message, empty when it is active.

    groups: its flavors by resource group; empty where they cannot be told. cohort: empty for none.
    """

    name: str
    exists: bool = True
    stop: str = ""
    inactive: str = ""
    can_preempt_within: bool = True
    """preemption.withinClusterQueue is not Never."""
    is_strict: bool = False
    """queueingStrategy is StrictFIFO."""
    cohort: str = ""
    groups: tuple[tuple[FlavorCapacity, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFact:
    """A job's LocalQueue, and the ClusterQueue that it leads to; None where the operator may not read that one."""

    name: str
    exists: bool = True
    stop: str = ""
    inactive: str = ""
    cluster_queue: ClusterQueueFact | None = None
