"""A job's LocalQueue and ClusterQueue, as Kueue reports them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterQueueFact:
    """A ClusterQueue.

    stop: its stopPolicy, empty for None. inactive: the reason and message of Kueue, empty while the queue is active.
    """

    name: str
    exists: bool = True
    stop: str = ""
    inactive: str = ""
    can_preempt_within: bool = True
    """preemption.withinClusterQueue is not Never."""
    is_strict: bool = False
    """queueingStrategy is StrictFIFO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFact:
    """A job's LocalQueue and its ClusterQueue. cluster_queue: None if the operator may not read ClusterQueues."""

    name: str
    exists: bool = True
    stop: str = ""
    inactive: str = ""
    cluster_queue: ClusterQueueFact | None = None
