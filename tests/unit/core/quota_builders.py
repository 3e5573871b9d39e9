"""Workloads and observations of a job in a queue, for the tests of its quota."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.unit.core.builders import (
    NOW,
    Seen,
    job,
    observed,
    pod,
    policy,
    running,
    seconds,
)

from elastipod_operator.core.names import PodId, workload_name
from elastipod_operator.core.record import Record
from elastipod_operator.core.snapshot import (
    ObservedWorkload,
    Policy,
    Snapshot,
)

QUEUE = "gpus"


def workload(number: int, pods: int = 1, **changes: Any) -> ObservedWorkload:
    """Give an admitted Workload over the one spec."""
    base = ObservedWorkload(
        name=workload_name("job", "job-uid", number), uid=f"uid-{number}", number=number, counts=(("workers", pods),),
        created_at=NOW - seconds(3600), queue=QUEUE, reserved=True, admitted=True, pods_ready=True,
    )  # fmt: skip
    return replace(base, **changes)


def pending(number: int, pods: int = 1, **changes: Any) -> ObservedWorkload:
    return workload(number, pods, reserved=False, admitted=False, pods_ready=None, pending_message="no room", **changes)


def evicted(number: int, pods: int = 1, **changes: Any) -> ObservedWorkload:
    return workload(number, pods, eviction_reason="Preempted", eviction_message="a more important job came", **changes)


def look(
    record: Record | None,
    workloads: Sequence[ObservedWorkload],
    *pods: Seen,
    wishes: Policy | None = None,
    **changes: Any,
) -> Snapshot:
    """Give an observation of a job in the queue."""
    about = {name: changes.pop(name) for name in ("queue", "queue_in_template", "pending_edits") if name in changes}
    fact = job(record, wishes or policy(2, 4, payback=False), **{"queue": QUEUE, **about})
    return observed(fact, pods, workloads=tuple(workloads), **changes)


def queued(record: Record) -> Record:
    return replace(record, queue=QUEUE)


def on(number: int, identity: PodId | int, **changes: Any) -> Any:
    return pod(identity, workload=workload_name("job", "job-uid", number), **changes)


def train(size: int, **changes: Any) -> list[Seen]:
    """Give the pods of a job that trains with its base of 2 and increments of one."""
    return [(on(max(0, n - 1), n, **changes), running()) for n in range(size)]


FOUR = [workload(0, 2), workload(1), workload(2)]
