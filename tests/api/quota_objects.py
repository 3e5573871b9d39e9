"""What the checker of quota reads from Workloads and pods."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kubernetes.utils.quantity import parse_quantity

ACCOMMODATES = re.compile(r"Preempted to accommodate a workload \(UID: ([^,]+), JobUID: ([^)]+)\)")
Body = Mapping[str, Any]


@dataclass(slots=True)
class _Workload:
    """A Workload as it is."""

    name: str
    job: str
    number: int
    queue: str
    granted: int
    """What it holds of quota; 0 when it holds none."""
    is_admitted: bool
    is_evicted: bool
    is_finished: bool
    reason: str
    message: str
    evicted_at: float = 0.0
    acted_at: float | None = None
    gone_at: float | None = None
    """Since when no pod lives on it, while it is evicted."""
    had_pods: bool = False


@dataclass(frozen=True, slots=True)
class _Pod:
    """A pod that lives. workload: the name of the one that it was made for."""

    name: str
    job: str
    workload: str
    cpu: int
    is_leaving: bool


def lives(body: Body) -> bool:
    """Whether a pod that is there has not ended."""
    return body.get("status", {}).get("phase") not in ("Succeeded", "Failed")


def _pod(body: Body) -> _Pod:
    meta = body["metadata"]
    asked = (one.get("resources", {}).get("requests", {}).get("cpu", "0") for one in body["spec"]["containers"])
    return _Pod(
        name=meta["name"],
        job=meta["labels"]["HPJob"],
        workload=meta.get("annotations", {}).get("kueue.x-k8s.io/workload", ""),
        cpu=sum(map(_millis, asked)),
        is_leaving="deletionTimestamp" in meta,
    )


def holds_quota(body: Body) -> bool:
    """Whether a Workload that is there holds quota: Kueue counts none of what is finished or deactivated any more."""
    return _is(body, "QuotaReserved") and not _is(body, "Finished") and bool(body["spec"].get("active", True))


def _workload(body: Body) -> _Workload:
    meta, status = body["metadata"], body.get("status") or {}
    admission = status.get("admission") or {}
    usage = (one.get("resourceUsage", {}).get("cpu", "0") for one in admission.get("podSetAssignments", ()))
    evicted = _condition(body, "Evicted")
    return _Workload(
        name=meta["name"],
        job=meta["labels"]["HPJob"],
        number=int(meta["labels"]["elastipod.io/share"]),
        queue=admission.get("clusterQueue", ""),
        granted=sum(map(_millis, usage)) if holds_quota(body) else 0,
        is_admitted=_is(body, "Admitted"),
        is_evicted=_is(body, "Evicted"),
        is_finished=_is(body, "Finished"),
        reason=evicted.get("reason", ""),
        message=evicted.get("message", ""),
    )


def _condition(body: Body, kind: str) -> Body:
    conditions = (body.get("status") or {}).get("conditions", ())
    return next((one for one in conditions if one["type"] == kind), {})


def _is(body: Body, kind: str) -> bool:
    return bool(_condition(body, kind).get("status") == "True")


def _millis(quantity: str) -> int:
    return int(1000 * parse_quantity(quantity))  # type: ignore[no-untyped-call]  # the client has no annotations here
