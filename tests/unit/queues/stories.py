"""Histories of jobs in a queue, told step by step, and the verdict of the checker on them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from tests.api.etcd_history import Change
from tests.api.quota_checker import (
    JOB,
    POD,
    WORKLOAD,
    Verdict,
    check,
)

from elastipod_operator.core.reasons import OpenReason
from elastipod_operator.core.record import Record, Transition, TransitionKind
from elastipod_operator.core.record_codec import encode

GRACE_S = 3.0
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
QUOTAS = {"queue-a": 4000, "queue-b": 4000}


class Story:
    """A history, told one change after the other; a second passes with each."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._seconds = 0.0
        self._there: set[tuple[str, str]] = set()

    def wait(self, seconds: float) -> Story:
        self._seconds += seconds
        return self

    def pod(
        self,
        name: str,
        workload: str = "",
        *,
        phase: str = "Running",
        cpu: str = "1",
        leaves: bool = False,
        **labels: str,
    ) -> Story:
        """A pod `<job>-<n>` as it is from now on. workload: by default the base of its job."""
        job = name.rpartition("-")[0]
        meta: dict[str, Any] = {
            "name": name, "labels": {"HPJob": job, **labels},
            "annotations": {"kueue.x-k8s.io/workload": workload or f"{job}-base"},
        }  # fmt: skip
        if leaves:
            meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        container = {"name": "trainer", "resources": {"requests": {"cpu": cpu}}}
        return self._put(POD, {"metadata": meta, "spec": {"containers": [container]}, "status": {"phase": phase}})

    def workload(
        self, name: str, cpus: int = 0, *, queue: str = "queue-a", active: bool = True, **conditions: str
    ) -> Story:
        """A Workload `<job>-base` or `<job>-more-<n>`, admitted with so many CPUs, from now on; 0: it waits.

        conditions: status or, for Evicted, the message of what preempted it.
        """
        job, _, share = name.replace("-base", "-more-0").rpartition("-more-")
        meta = {"name": name, "labels": {"HPJob": job, "elastipod.io/share": share}}
        told = {"QuotaReserved": "True" if cpus else "False", "Admitted": "True" if cpus else "False", **conditions}
        status: dict[str, Any] = {"conditions": [_condition(kind, text) for kind, text in told.items()]}
        if cpus:
            assigned = {"name": "pods", "count": cpus, "resourceUsage": {"cpu": str(cpus)}}
            status["admission"] = {"clusterQueue": queue, "podSetAssignments": [assigned]}
        return self._put(WORKLOAD, {"metadata": meta, "spec": {"active": active}, "status": status})

    def job(self, name: str, *, drains: bool) -> Story:
        drain = Transition(
            kind=TransitionKind.RESIZE, cause=OpenReason("Preempted"), message="", from_size=2, target_size=1,
            began_at=NOON, detected_at=NOON, deadline=NOON,
        )  # fmt: skip
        state = {"elastipod.io/state": encode(Record(transition=drain if drains else None))}
        return self._put(JOB, {"metadata": {"name": name, "annotations": state}})

    def gone(self, kind: str, name: str) -> Story:
        last = next(c for c in reversed(self.changes) if (c.kind, c.body["metadata"]["name"]) == (kind, name))
        self._there.discard((kind, name))
        return self._add(kind, "DELETED", last.body)

    def verdict(self) -> Verdict:
        return check(self.changes, QUOTAS, GRACE_S)

    def _put(self, kind: str, body: dict[str, Any]) -> Story:
        name = body["metadata"]["name"]
        is_known = (kind, name) in self._there
        self._there.add((kind, name))
        body["metadata"]["uid"] = f"uid of {name}"
        return self._add(kind, "MODIFIED" if is_known else "ADDED", body)

    def _add(self, kind: str, type: str, body: dict[str, Any]) -> Story:
        self._seconds += 1
        version = len(self.changes) + 1
        meta = {**body["metadata"], "resourceVersion": str(version)}
        self.changes.append(Change(version, self._seconds, kind, type, {**body, "metadata": meta}))
        return self


def _condition(kind: str, text: str) -> dict[str, str]:
    if text in ("True", "False"):
        return {"type": kind, "status": text, "reason": kind, "message": ""}
    return {"type": kind, "status": "True", "reason": "Preempted", "message": text}


def by(name: str) -> str:
    """Give Kueue's sentence about a Workload that had to make room."""
    return (
        f"Preempted to accommodate a workload (UID: uid of {name}, JobUID: any) due to prioritization in the ClusterQueue; "
        "preemptor path: /queue-a; preemptee path: /queue-a"
    )


def preempted() -> Story:
    """A job on three CPUs of four, and a newcomer with two, for which the increment has to go."""
    story = (
        Story().workload("old-base", 2).workload("old-more-1", 1).pod("old-0").pod("old-1").pod("old-2", "old-more-1")
    )
    return story.workload("new-base").workload("old-more-1", 1, Evicted=by("new-base"))


def ended(story: Story) -> Story:
    """Let the old job and the new one come to their end."""
    story.workload("new-base", 2).pod("new-0").pod("new-1")
    for name in ("old-0", "old-1", "new-0", "new-1"):
        story.pod(name, phase="Succeeded")
    return story.workload("old-base", 2, Finished="True").workload("new-base", 2, Finished="True")
