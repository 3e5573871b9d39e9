"""The status fields beside the conditions, and the size: exactly what the ecosystem's clients know (decision 11)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from .facts import Observed
from .growth import possible_size
from .health import View
from .names import master_port
from .record import Record


def size_text(seen: Observed, record: Record, view: View) -> str:
    """Give the size as it is printed: running/target/max."""
    policy = seen.job.policy
    maximum = policy.sizes.maximum if policy else 0
    transition = record.transition
    target = transition.goal if transition is not None else len(record.members)
    if transition is None and policy is not None:
        target = max(target, possible_size(record, view, policy))
    running = len(record.members) if transition is None and record.settled_at else 0
    return f"{0 if record.outcome else running}/{0 if record.outcome else target}/{maximum}"


def status_fields(seen: Observed, record: Record) -> dict[str, Any]:
    """Give everything of the status but the conditions."""
    status: dict[str, Any] = {"startTime": _stamp(seen.job.created_at), "restartCount": record.restarts}
    if record.ended_at is not None:
        status["completionTime"] = _stamp(record.ended_at)
    if record.generation:
        status["masterAddr"] = record.master_addr
        status["masterPort"] = str(master_port(record.generation))
    targets: dict[str, int] = {}
    for member in record.members:
        targets[member.spec] = targets.get(member.spec, 0) + 1
    window = record.window
    status["restartStatus"] = {
        "currentEvalPeriod": window.number, "fullJobRestartCount": window.full, "restartCount": window.restarts
    }  # fmt: skip
    if record.culprits:
        status["latestFaultyPodInstanceList"] = {
            "restartType": "JLR" if record.is_full_restart else "PLR",
            "faultyInstanceIdList": sorted({c.node for c in record.culprits if c.node}),
            "faultyPodList": [c.pod.name(seen.job.name) for c in record.culprits],
            "faultyRankList": [str(c.rank) for c in record.culprits if c.rank >= 0],
        }
    scaling: dict[str, Any] = {
        "targetReplicas": targets, "consecutiveScalingFailures": record.resize_failures
    }  # fmt: skip
    if record.resized_at is not None:
        scaling["lastScalingTime"] = _stamp(record.resized_at)
    if record.recovered_at is not None:
        scaling["lastRestartTime"] = _stamp(record.recovered_at)
    if seen.job.policy is not None and seen.job.policy.sizes.minimum != seen.job.policy.sizes.maximum:
        status["elasticScalingStatus"] = scaling
    return status


def _stamp(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
