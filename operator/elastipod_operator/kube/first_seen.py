"""Replace times that other hosts wrote by the time at which this operator first saw what they report.

Timestamps of the API server or of Kueue come from other clocks, which may differ by minutes, so no duration is measured from
them. A new operator sees everything for the first time: a restart may prolong a wait, but never shortens one. Pure.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from ..core.snapshot import ObservedJob, ObservedPod, ObservedWorkload


def job_as_seen(fact: ObservedJob, before: ObservedJob | None, now: datetime) -> ObservedJob:
    """Date a job and its deletion. before: the job as last known. Its status may already record its start."""
    deleting_since = before.deleting_since if before is not None else None
    return replace(
        fact,
        created_at=before.created_at if before is not None else min(fact.start_time or now, now),
        deleting_since=(deleting_since or now) if fact.deleting_since is not None else None,
    )


def pod_as_seen(fact: ObservedPod, before: ObservedPod | None, now: datetime) -> ObservedPod:
    """Date a pod, its scheduling, its deletion and its problem. before: the pod as last known."""
    considered_at = before.considered_at if before is not None else None
    fact = replace(
        fact,
        created_at=now if before is None else before.created_at,
        considered_at=(considered_at or now) if fact.considered_at is not None else None,
        kill_at=_kill_at(fact, before, now),
    )
    if fact.problem_reason:
        is_known = before is not None and before.problem_reason == fact.problem_reason
        fact = replace(fact, problem_since=before.problem_since if before and is_known else now)
    return fact


def workload_as_seen(fact: ObservedWorkload, before: ObservedWorkload | None, now: datetime) -> ObservedWorkload:
    """Date the admission and the eviction of a Workload. before: the Workload as last known."""
    admitted_at = before.admitted_at if before is not None else None
    evicted_at = before.evicted_at if before is not None else None
    return replace(
        fact,
        admitted_at=(admitted_at or now) if fact.admitted_at is not None else None,
        evicted_at=(evicted_at or now) if fact.evicted_at is not None else None,
    )


def _kill_at(fact: ObservedPod, before: ObservedPod | None, now: datetime) -> datetime | None:
    """Give when the kubelet kills the containers. A second deletion may shorten this time but never prolongs it."""
    if fact.deletion_grace is None:
        return None
    known = before.kill_at if before is not None else None
    if known is not None and before is not None and before.deletion_grace == fact.deletion_grace:
        return known
    at = now + fact.deletion_grace
    return at if known is None else min(known, at)
