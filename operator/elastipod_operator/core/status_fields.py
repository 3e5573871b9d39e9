"""The status fields beside the conditions, and the size: exactly what the ecosystem's clients know."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import Any

from ..api.job_status import RUNNING, SELECTOR
from .actions import JobSize
from .grant import Grant
from .growth import possible_size
from .names import LABEL_JOB, PodId, master_port
from .record import Record, TransitionKind
from .replica import Replicas
from .snapshot import Snapshot
from .time_order import timestamp


def job_size(snapshot: Snapshot, record: Record, replicas: Replicas, grant: Grant | None) -> JobSize:
    """Give the size of the job; of one that has ended nothing trains."""
    policy = snapshot.job.policy
    maximum = policy.sizes.maximum if policy else 0
    transition = record.transition
    target = transition.target_size if transition is not None else len(record.members)
    if transition is None and grant is not None:
        target = max(target, possible_size(record, replicas, grant))
    running = len(record.members) if transition is None and record.running_since else 0
    return JobSize(0, 0, maximum) if record.outcome else JobSize(running, target, maximum)


def status_fields(snapshot: Snapshot, record: Record, replicas: Replicas, grant: Grant | None) -> dict[str, Any]:
    """Give the status without the conditions."""
    status: dict[str, Any] = {"restartCount": record.restarts}
    started_at = _start_time(snapshot, record)
    if started_at is not None:
        status["startTime"] = timestamp(started_at)
    if record.ended_at is not None:
        status["completionTime"] = timestamp(record.ended_at)
    if record.generation:
        status["masterAddr"] = record.master_addr
        status["masterPort"] = str(master_port(record.generation))
    window = record.window
    status["restartStatus"] = {
        "currentEvalPeriod": window.number, "fullJobRestartCount": window.full_restarts, "restartCount": window.restarts
    }  # fmt: skip
    if record.faulty_replicas:
        status["latestFaultyPodInstanceList"] = {
            "restartType": "JLR" if record.is_full_restart else "PLR",
            "faultyInstanceIdList": sorted({c.node for c in record.faulty_replicas if c.node}),
            "faultyPodList": [_name_of(c.pod, snapshot.job.name, replicas) for c in record.faulty_replicas],
            "faultyRankList": [str(c.rank) for c in record.faulty_replicas if c.rank >= 0],
        }
    policy = snapshot.job.policy
    if policy is not None and grant is not None and policy.sizes.minimum != policy.sizes.maximum:
        scaling = _scaling(record, replicas, grant)
        status["elasticWorkloadRef"] = {SELECTOR: f"{LABEL_JOB}={snapshot.job.name}"}
        status["elasticScalingStatus"] = {**scaling, "lastUpdated": _last_updated(scaling, snapshot)}
    return status


def _name_of(pod: PodId, job: str, replicas: Replicas) -> str:
    """Give the name that a pod has, or had."""
    replica = replicas.get(pod)
    return replica.pod.name if replica is not None else pod.name(job)


def _start_time(snapshot: Snapshot, record: Record) -> datetime | None:
    """Give when the job was accepted, or in a queue first admitted; a reported time is kept."""
    if snapshot.job.start_time is not None or not record.queue:
        return snapshot.job.start_time or record.accepted_at or snapshot.job.created_at
    return next((w.admitted_at for w in snapshot.workloads if w.number == 0 and w.is_granted), None)


def _scaling(record: Record, replicas: Replicas, grant: Grant) -> dict[str, Any]:
    targets = target_replicas(record, grant)
    living = Counter(r.id.spec for r in replicas.newest.values() if r.may_train and r.pod.kill_at is None)
    scaling: dict[str, Any] = {
        "targetReplicas": {**targets, RUNNING: _running(record)},
        "podsScaled": all(living[spec] >= number for spec, number in targets.items()),
        "isFaultyPodScaleDown": record.shrank_after_fault,
        "consecutiveScalingFailures": record.resize_failures,
    }
    if record.resized_at is not None:
        scaling["lastScalingTime"] = timestamp(record.resized_at)
    if record.recovered_at is not None:
        scaling["lastRestartTime"] = timestamp(record.recovered_at)
    return scaling


def _running(record: Record) -> int:
    """Count the replicas that train. During a transition count those of before, so that autoscalers do not see the job vanish."""
    if record.outcome:
        return 0
    if record.transition is None:
        return len(record.members)
    return (
        record.transition.from_size if record.transition.kind in (TransitionKind.RESIZE, TransitionKind.RECOVERY) else 0
    )


def target_replicas(record: Record, grant: Grant) -> dict[str, int]:
    """Give the target number of replicas of each spec: those that train, or those that the next start waits for; the base spec first."""
    targets = dict.fromkeys((spec.name for spec in grant.specs), 0)
    if record.outcome:
        return targets
    if record.transition is None:
        return targets | Counter(member.spec for member in record.members)
    left = min(record.transition.target_size, grant.sizes.maximum)
    for spec in grant.specs:
        targets[spec.name] = min(left, spec.limit)
        left -= targets[spec.name]
    return targets


def _last_updated(scaling: dict[str, Any], snapshot: Snapshot) -> str:
    """Keep the time while nothing else changes."""
    before = dict(snapshot.job.scaling)
    at = before.pop("lastUpdated", None)
    return str(at) if at and before == scaling else timestamp(snapshot.now)
