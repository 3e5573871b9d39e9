"""The status fields beside the conditions, and the size: exactly what the ecosystem's clients know (decision 11)."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Any

from ..api.status import RUNNING, SELECTOR
from .growth import possible_size
from .health import View
from .names import LABEL_JOB, PodId, master_port
from .record import Record, TransitionKind
from .snapshot import Observed, Policy


def size_text(seen: Observed, record: Record, view: View) -> str:
    """Give the size as it is printed: running/target/max."""
    policy = seen.job.policy
    maximum = policy.wished_sizes.maximum if policy else 0
    transition = record.transition
    target = transition.goal if transition is not None else len(record.members)
    if transition is None and policy is not None:
        target = max(target, possible_size(record, view, policy))
    running = len(record.members) if transition is None and record.running_since else 0
    return f"{0 if record.outcome else running}/{0 if record.outcome else target}/{maximum}"


def status_fields(seen: Observed, record: Record, view: View) -> dict[str, Any]:
    """Give everything of the status but the conditions."""
    status: dict[str, Any] = {"restartCount": record.restarts}
    started_at = _start_time(seen, record)
    if started_at is not None:
        status["startTime"] = _stamp(started_at)
    if record.ended_at is not None:
        status["completionTime"] = _stamp(record.ended_at)
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
            "faultyPodList": [_name_of(c.pod, seen.job.name, view) for c in record.faulty_replicas],
            "faultyRankList": [str(c.rank) for c in record.faulty_replicas if c.rank >= 0],
        }
    policy = seen.job.policy
    if policy is not None and policy.wished_sizes.minimum != policy.wished_sizes.maximum:
        scaling = _scaling(record, view, policy)
        status["elasticWorkloadRef"] = {SELECTOR: f"{LABEL_JOB}={seen.job.name}"}
        status["elasticScalingStatus"] = {**scaling, "lastUpdated": _last_updated(scaling, seen)}
    return status


def _name_of(pod: PodId, job: str, view: View) -> str:
    """Give the name that a pod has, or had."""
    replica = view.get(pod)
    return replica.pod.name if replica is not None else pod.name(job)


def _start_time(seen: Observed, record: Record) -> datetime | None:
    """Give when the job was accepted, in a queue when it was admitted for the first time; what was told once stays."""
    if seen.job.start_time is not None or not record.queue:
        return seen.job.start_time or record.accepted_at or seen.job.created_at
    return next((w.admitted_at for w in seen.workloads if w.number == 0 and w.is_granted), None)


def _scaling(record: Record, view: View, policy: Policy) -> dict[str, Any]:
    targets = target_replicas(record, policy)
    living = Counter(r.id.spec for r in view.newest.values() if r.lives and r.pod.kill_at is None)
    scaling: dict[str, Any] = {
        "targetReplicas": {**targets, RUNNING: _running(record)},
        "podsScaled": all(living[spec] >= number for spec, number in targets.items()),
        "isFaultyPodScaleDown": record.shrank_after_fault,
        "consecutiveScalingFailures": record.resize_failures,
    }
    if record.resized_at is not None:
        scaling["lastScalingTime"] = _stamp(record.resized_at)
    if record.recovered_at is not None:
        scaling["lastRestartTime"] = _stamp(record.recovered_at)
    return scaling


def _running(record: Record) -> int:
    """Count the replicas that train; while their workers are exchanged, those that did: autoscalers must not see a job vanish."""
    if record.outcome:
        return 0
    if record.transition is None:
        return len(record.members)
    return (
        record.transition.from_size if record.transition.kind in (TransitionKind.RESIZE, TransitionKind.RECOVERY) else 0
    )


def target_replicas(record: Record, policy: Policy) -> dict[str, int]:
    """Give how many replicas of each spec are to train: those that do, or those that are waited for, the base spec first."""
    targets = dict.fromkeys((spec.name for spec in policy.specs), 0)
    if record.outcome:
        return targets
    if record.transition is None:
        return targets | Counter(member.spec for member in record.members)
    left = min(record.transition.goal, policy.sizes.maximum)
    for spec in policy.specs:
        targets[spec.name] = min(left, spec.limit)
        left -= targets[spec.name]
    return targets


def _last_updated(scaling: dict[str, Any], seen: Observed) -> str:
    """Keep the time while nothing else changes."""
    before = dict(seen.job.scaling)
    at = before.pop("lastUpdated", None)
    return str(at) if at and before == scaling else _stamp(seen.now)


def _stamp(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
