"""Warnings about a job's queue, or about what the job requests from it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from .queue_facts import ClusterQueueFact, QueueFact
from .quota import Quota, pods_by_workload
from .reasons import AnyReason, Reason
from .replica import Health, Replica, Replicas
from .snapshot import ObservedJob, ObservedWorkload, Policy, Snapshot

# How long the pods of an evicted Workload may take to end after the time for a checkpoint.
POD_EXIT_TIME = timedelta(seconds=60)
NAMED_PODS = 3

Warnings = list[tuple[AnyReason, str]]
"""Reasons (CamelCase) and sentences."""


def queue_warnings(job: ObservedJob, policy: Policy, queue: QueueFact | None, quota: Quota | None) -> Warnings:
    """Check the queue of a job; no warnings if the queue is unknown or the job is in none."""
    if queue is None or quota is None or not quota.queue:
        return []
    found, behind = queue_problems(job.namespace, queue), queue.cluster_queue
    if not queue.exists or behind is None or not behind.exists:
        return found
    return [*found, *_strategy_warnings(policy, behind, quota)]


def queue_problems(namespace: str, queue: QueueFact) -> Warnings:
    """Say why a queue admits nothing."""
    if not queue.exists:
        text = f"LocalQueue {queue.name} does not exist in namespace {namespace}; create it, or name another in the job's label"
        return [(Reason.QUEUE_MISSING, text)]
    found: Warnings = []
    if queue.stop:
        found.append((Reason.QUEUE_STOPPED, _stopped(f"LocalQueue {queue.name}", queue.stop, queue.inactive)))
    cluster_queue = queue.cluster_queue
    if cluster_queue is None:
        return found or _inactive(f"LocalQueue {queue.name}", queue.inactive)
    if not cluster_queue.exists:
        what = f"ClusterQueue {cluster_queue.name}, to which LocalQueue {queue.name} leads, does not exist"
        return [*found, (Reason.QUEUE_MISSING, f"{what}; nothing is admitted until it does")]
    whole = f"ClusterQueue {cluster_queue.name}"
    if cluster_queue.stop:
        return [*found, (Reason.QUEUE_STOPPED, _stopped(whole, cluster_queue.stop, cluster_queue.inactive))]
    return found + _inactive(whole, cluster_queue.inactive)


def eviction_due_at(workload: ObservedWorkload, policy: Policy) -> datetime | None:
    """Give when the quota of an evicted Workload must have been returned; after that it is overdue. None if it is not evicted."""
    return workload.evicted_at + policy.graceful_timeout + POD_EXIT_TIME if workload.evicted_at is not None else None


def overdue_evictions(
    snapshot: Snapshot, policy: Policy, replicas: Replicas, quota: Quota | None
) -> tuple[Warnings, datetime | None]:
    """Say what blocks the return of overdue quota; gives too when the next becomes overdue."""
    if quota is None:
        return [], None
    evicted = [(at, w) for w in quota.present.values() if (at := eviction_due_at(w, policy)) is not None]
    next_at = min((at for at, _ in evicted if at > snapshot.now), default=None)
    overdue = [w for at, w in evicted if at <= snapshot.now]
    using = pods_by_workload(replicas, overdue, quota.requests)
    return [(Reason.EVICTION_OVERDUE, _late(w, using[w.name], snapshot)) for w in overdue], next_at


def _late(workload: ObservedWorkload, using: list[Replica], snapshot: Snapshot) -> str:
    assert workload.evicted_at is not None
    pods = sorted(using, key=lambda replica: replica.id)
    since = f"{workload.evicted_at.astimezone(UTC):%H:%M:%S} UTC"
    text = f"Kueue has waited for the quota of Workload {workload.name} since {since} ({workload.eviction_reason})"
    if not pods:
        return f"{text}; no pod uses it any more, and the operator keeps trying to return it (see the operator's log)"
    more = f" and {len(pods) - NAMED_PODS} more" if len(pods) > NAMED_PODS else ""
    return f"{text}; it is blocked by {', '.join(_where(r, snapshot) for r in pods[:NAMED_PODS])}{more}"


def _where(replica: Replica, snapshot: Snapshot) -> str:
    pod = replica.pod
    if not pod.node:
        return f"pod {pod.name} (without a node)"
    node = snapshot.nodes.get(pod.node)
    if node is not None and not node.ready:
        how = "the node is not ready"
    elif pod.kill_at is not None:
        how = "being deleted"
    elif replica.health in (Health.SILENT, Health.LOST):
        how = "its agent does not answer"
    else:
        how = "still running"
    return f"pod {pod.name} on node {pod.node} ({how})"


def _stopped(what: str, policy: str, words: str) -> str:
    means = "running jobs are evicted" if policy == "HoldAndDrain" else "running jobs continue"
    return f"{what} admits nothing more, and {means} (stopPolicy {policy}){f': {words}' if words else ''}"


def _inactive(what: str, words: str) -> Warnings:
    return [(Reason.QUEUE_INACTIVE, f"{what} admits nothing: {words}")] if words else []


def _strategy_warnings(policy: Policy, queue: ClusterQueueFact, quota: Quota) -> Warnings:
    """Warn of queue settings that affect increments."""
    found: Warnings = []
    if not queue.can_preempt_within and len(policy.sizes.allowed) > 1:
        text = f"ClusterQueue {queue.name} has preemption.withinClusterQueue Never"
        text += (
            ": increments of this job are never preempted for other jobs in that queue; LowerPriority would allow it"
        )
        found.append((Reason.PREEMPTION_NEVER, text))
    # Only increments that Kueue has considered: others may be admitted at once.
    if queue.is_strict and any(n and not w.reserved and w.pending_message for n, w in quota.present.items()):
        text = f"ClusterQueue {queue.name} has queueingStrategy StrictFIFO and increments of the job wait there"
        text += ": an increment that does not fit blocks everything behind it; use BestEffortFIFO"
        found.append((Reason.STRICT_FIFO, text))
    return found
