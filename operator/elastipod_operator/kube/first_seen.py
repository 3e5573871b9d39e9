"""Times that other hosts wrote, replaced by when this operator first saw what they tell.

A timestamp of the API server, or of Kueue, is of another host's clock, which may differ from ours by minutes: no duration is
measured from it. Whoever has just started sees everything for the first time, so a restart may lengthen a wait, and never
shortens one. Pure.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from ..core.snapshot import ObservedJob, ObservedPod, ObservedWorkload


def job_as_seen(fact: ObservedJob, before: ObservedJob | None, now: datetime) -> ObservedJob:
    """Date a job and its deletion. before: the same job as it was known. Its start may be on record in its status."""
    deleting_since = before.deleting_since if before is not None else None
    return replace(
        fact,
        created_at=before.created_at if before is not None else min(fact.start_time or now, now),
        deleting_since=(deleting_since or now) if fact.deleting_since is not None else None,
    )


def pod_as_seen(fact: ObservedPod, before: ObservedPod | None, now: datetime) -> ObservedPod:
    """Date a pod, its deletion and its problem. before: the same pod as it was known."""
    fact = replace(fact, created_at=now if before is None else before.created_at, kill_at=_kill_at(fact, before, now))
    if fact.problem_reason:
        is_known = before is not None and before.problem_reason == fact.problem_reason
        fact = replace(fact, problem_since=before.problem_since if before and is_known else now)
    return fact


def workload_as_seen(fact: ObservedWorkload, before: ObservedWorkload | None, now: datetime) -> ObservedWorkload:
    """Date the admission and the eviction of a Workload. before: the same one as it was known."""
    admitted_at = before.admitted_at if before is not None else None
    evicted_at = before.evicted_at if before is not None else None
    return replace(
        fact,
        admitted_at=(admitted_at or now) if fact.admitted_at is not None else None,
        evicted_at=(evicted_at or now) if fact.evicted_at is not None else None,
    )


def _kill_at(fact: ObservedPod, before: ObservedPod | None, now: datetime) -> datetime | None:
    """Give when the kubelet kills what is left. A second deletion may shorten the time, and never lengthens it."""
    if fact.deletion_grace is None:
        return None
    known = before.kill_at if before is not None else None
    if known is not None and before is not None and before.deletion_grace == fact.deletion_grace:
        return known
    at = now + fact.deletion_grace
    return at if known is None else min(known, at)
