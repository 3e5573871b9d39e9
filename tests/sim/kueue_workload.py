"""A Workload object in the model of Kueue."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tests.sim.kueue_choice import Asker, PodSet
from tests.sim.quota_capacity import ClusterQueue, Place

Body = dict[str, Any]

# Evictions that Kueue itself takes back after a while.
AT_ITS_TIME = ("PodsReadyTimeout", "AdmissionCheck")


@dataclass(eq=False, slots=True)
class Workload:
    """A Workload object. tenant: whose it is; names are unique there. version: of the object."""

    tenant: str
    meta: Body
    spec: Body
    version: int = 0
    conditions: dict[str, Body] = field(default_factory=dict)
    admission: Body | None = None
    requeues: int = 0
    requeue_at: datetime | None = None
    status: Body = field(default_factory=dict)
    """What others wrote into its status."""

    @property
    def uid(self) -> str:
        return str(self.meta["uid"])

    @property
    def name(self) -> str:
        return str(self.meta["name"])

    @property
    def priority(self) -> int:
        return int(self.spec.get("priority") or 0)

    @property
    def is_active(self) -> bool:
        return self.spec.get("active") is not False

    @property
    def holds(self) -> bool:
        """Whether quota is booked for it."""
        return self.admission is not None and self.has("QuotaReserved") and self.is_active and not self.has("Finished")

    @property
    def must_release_quota(self) -> bool:
        """Whether Kueue waits for its quota."""
        return self.has("Evicted") and self.has("QuotaReserved") and not self.has("Finished")

    @property
    def phase(self) -> str:
        """As Kueue reads it."""
        return next((kind for kind in ("Finished", "Admitted", "QuotaReserved") if self.has(kind)), "Pending")

    def has(self, kind: str) -> bool:
        condition = self.conditions.get(kind)
        return condition is not None and condition.get("status") == "True"

    def said(self, kind: str) -> str:
        """Give the message of a condition."""
        return str(self.conditions.get(kind, {}).get("message") or "")

    def counts(self) -> dict[str, int]:
        return {one["name"]: int(one["count"]) for one in self.spec["podSets"]}

    def body(self) -> Body:
        conditions = [{"type": kind, **one} for kind, one in self.conditions.items()]
        status: Body = {**self.status, "conditions": conditions}
        if self.admission is not None:
            status["admission"] = self.admission
        return {
            "kind": "Workload",
            "metadata": {**self.meta, "resourceVersion": str(self.version)},
            "spec": copy.copy(self.spec),
            "status": status,
        }


def asker(one: Workload, name: str, queue: ClusterQueue | None) -> Asker:
    """Give a Workload as the scheduler sees it. queue: of this name, where it asks or holds quota."""
    pod_sets = tuple(_pod_set(body, queue) for body in one.spec["podSets"])
    held: dict[Place, int] = {}
    if one.admission is not None:
        for assigned in one.admission["podSetAssignments"]:
            for resource, flavor in assigned["flavors"].items():
                held[flavor, resource] = held.get((flavor, resource), 0) + assigned["resourceUsage"][resource]
    created = str(one.meta["creationTimestamp"])
    if one.has("Evicted") and one.conditions["Evicted"]["reason"] in AT_ITS_TIME:
        created = one.conditions["Evicted"]["lastTransitionTime"]
    reserved = one.conditions.get("QuotaReserved", {}).get("lastTransitionTime", "") if held else ""
    return Asker(one.uid, name, one.priority, created, pod_sets, held, reserved, is_evicted=one.has("Evicted"))


def _pod_set(body: Mapping[str, Any], queue: ClusterQueue | None) -> PodSet:
    count, pod = int(body["count"]), body["template"]["spec"]
    requests: dict[str, int] = {}
    for container in pod["containers"]:
        for resource, amount in ((container.get("resources") or {}).get("requests") or {}).items():
            requests[resource] = requests.get(resource, 0) + count * int(amount)
    if queue is not None and queue.covers("pods"):
        requests["pods"] = count
    return PodSet(body["name"], requests, pod.get("nodeSelector") or {})
