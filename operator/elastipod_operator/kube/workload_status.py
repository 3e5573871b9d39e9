"""What the operator writes into the status of its Workloads (facts of Kueue 3 and 4). Pure.

Nobody but the owner of a Workload gives its quota back after an eviction, and only a complete patch does so: Kueue stands
still, or ends, over one that takes the admission away and leaves conditions as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ..core.actions import FinishWorkload, SetPodsReady
from ..core.names import FIELD_MANAGER
from .times import time_or
from .workloads import GROUP, VERSION, conditions_of

# After these Kueue itself lets the Workload back into the queue: at its time, or when what stopped it is over. After all
# others nobody would.
BY_KUEUE = frozenset({"PodsReadyTimeout", "AdmissionCheck", "ClusterQueueStopped", "LocalQueueStopped"})
DEACTIVATED = "Deactivated"
MESSAGE_LIMIT = 1024

Body = Mapping[str, Any]


def release_patch(body: Body, now: datetime) -> dict[str, Any]:
    """Give the merge patch of the status that gives the quota of an evicted Workload back and leaves it in the queue.

    It rests on the version of `body`: of a condition that Kueue writes meanwhile none is lost, for the patch is refused then.
    """
    meta, status = body["metadata"], body.get("status") or {}
    present = conditions_of(body)
    evicted = present.get("Evicted", {})
    why = str(evicted.get("message") or "")
    reason, is_requeued = _requeued(str(evicted.get("reason") or ""))
    changes = {
        "QuotaReserved": (False, "Pending", why),
        "Admitted": (False, "NoReservation", "The workload has no reservation"),
        "Requeued": (is_requeued, reason, why),
        "PodsReady": (False, "WaitForStart", "Not all pods are ready or succeeded"),
    }
    fresh = [
        _condition(kind, *change, body=body, now=now, before=present.get(kind)) for kind, change in changes.items()
    ]
    kept = [dict(c) for kind, c in present.items() if kind not in changes]
    wanted: dict[str, Any] = {"admission": None, "conditions": [*kept, *fresh]}
    if (body.get("spec") or {}).get("maximumExecutionTimeSeconds"):
        wanted["accumulatedPastExecutionTimeSeconds"] = _executed_s(status, present.get("Admitted", {}), now)
    return {"metadata": {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}, "status": wanted}


def finished_status(namespace: str, order: FinishWorkload, now: datetime) -> tuple[str, dict[str, Any]]:
    """Give the field manager and the body of the apply that ends a Workload."""
    reason = "Succeeded" if order.succeeded else "Failed"
    return _applied(namespace, order.name, order.uid, _condition("Finished", True, reason, order.message, now=now))


def pods_ready_status(namespace: str, order: SetPodsReady, now: datetime) -> tuple[str, dict[str, Any]]:
    """Give the field manager and the body of the apply that says whether all pods of a Workload are ready."""
    if order.ready:
        reason, why = ("Recovered" if order.was_ready else "Started"), "All pods are ready or succeeded"
    else:
        reason = "WaitForRecovery" if order.was_ready else "WaitForStart"
        why = "Not all pods are ready or succeeded"
    return _applied(namespace, order.name, order.uid, _condition("PodsReady", order.ready, reason, why, now=now))


def _requeued(reason: str) -> tuple[str, bool]:
    """Give reason and status of condition Requeued. False keeps it out until Kueue turns it, which it does by exact reasons."""
    if reason.startswith(DEACTIVATED):  # "DeactivatedDueTo..." would never be turned
        return DEACTIVATED, False
    return reason or "Evicted", reason not in BY_KUEUE


def _condition(
    kind: str,
    status: bool,
    reason: str,
    message: str,
    *,
    now: datetime,
    body: Body | None = None,
    before: Body | None = None,
) -> dict[str, Any]:
    text = "True" if status else "False"
    is_same = before is not None and before.get("status") == text and before.get("lastTransitionTime")
    since = before["lastTransitionTime"] if before is not None and is_same else _text(now)
    found: dict[str, Any] = {
        "type": kind, "status": text, "reason": reason, "message": message[:MESSAGE_LIMIT], "lastTransitionTime": since,
    }  # fmt: skip
    if body is not None and "generation" in body["metadata"]:
        found["observedGeneration"] = body["metadata"]["generation"]
    return found


def _applied(namespace: str, name: str, uid: str, condition: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """One field manager for each type: what a manager leaves out of its next apply is taken away."""
    return f"{FIELD_MANAGER}-{condition['type']}", {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "Workload",
        "metadata": {"name": name, "namespace": namespace, "uid": uid},
        "status": {"conditions": [condition]},
    }


def _executed_s(status: Body, admitted: Body, now: datetime) -> int:
    before = status.get("accumulatedPastExecutionTimeSeconds")
    past = before if isinstance(before, int) else 0
    since = time_or(admitted.get("lastTransitionTime"), now) if admitted.get("status") == "True" else now
    return past + max(0, int((now - since).total_seconds()))


def _text(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
