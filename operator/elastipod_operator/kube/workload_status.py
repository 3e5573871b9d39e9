"""What the operator writes into the status of its Workloads (docs/design/queues.md). Pure.

After an eviction only the owner of a Workload can return its quota, and only with a complete patch: Kueue stalls or crashes
if a patch removes the admission and keeps the conditions.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from ..core.actions import FinishWorkload, SetPodsReady
from ..core.names import FIELD_MANAGER
from ..core.time_order import timestamp
from .times import time_or
from .workloads import GROUP, VERSION, conditions_of

# After these evictions Kueue requeues the Workload itself, in time or when the obstacle is gone. After all others it does not.
BY_KUEUE = frozenset({"PodsReadyTimeout", "AdmissionCheck", "ClusterQueueStopped", "LocalQueueStopped"})
DEACTIVATED = "Deactivated"
MESSAGE_LIMIT = 1024

Body = Mapping[str, Any]


def release_patch(body: Body, now: datetime) -> dict[str, Any]:
    """Give the merge patch of the status that returns the quota of an evicted Workload and keeps it in the queue.

    It names the version of `body`: if Kueue has written a condition since, the patch is refused and no condition is lost.
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
    """Give the field manager and the body of the apply that finishes a Workload."""
    reason = "Succeeded" if order.succeeded else "Failed"
    return _applied(namespace, order.name, order.uid, _condition("Finished", True, reason, order.message, now=now))


def pods_ready_status(namespace: str, order: SetPodsReady, now: datetime) -> tuple[str, dict[str, Any]]:
    """Give the field manager and the body of the apply that sets condition PodsReady of a Workload."""
    if order.ready:
        reason, why = ("Recovered" if order.was_ready else "Started"), "All pods are ready or succeeded"
    else:
        reason = "WaitForRecovery" if order.was_ready else "WaitForStart"
        why = "Not all pods are ready or succeeded"
    return _applied(namespace, order.name, order.uid, _condition("PodsReady", order.ready, reason, why, now=now))


def _requeued(reason: str) -> tuple[str, bool]:
    """Give reason and status of condition Requeued. With False it waits until Kueue changes it, which depends on the exact reason."""
    if reason.startswith(DEACTIVATED):  # Kueue never changes "DeactivatedDueTo..."
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
    since = before["lastTransitionTime"] if before is not None and is_same else timestamp(now)
    found: dict[str, Any] = {
        "type": kind, "status": text, "reason": reason, "message": message[:MESSAGE_LIMIT], "lastTransitionTime": since,
    }  # fmt: skip
    if body is not None and "generation" in body["metadata"]:
        found["observedGeneration"] = body["metadata"]["generation"]
    return found


def _applied(namespace: str, name: str, uid: str, condition: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Use one field manager for each type, because an apply removes what its manager leaves out."""
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
