"""Pods of a job, and what the supply of pods makes of them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from tests.unit.core.builders import (
    LONG_AGO,
    Seen,
    context,
    job,
    observed,
    policy,
    replicas_of,
)

from elastipod_operator.core.actions import Action, DeletePod
from elastipod_operator.core.names import Slot
from elastipod_operator.core.pod_supply import CreationLimits, supply_pods
from elastipod_operator.core.record import Record
from elastipod_operator.core.slots import wanted_slots
from elastipod_operator.core.snapshot import ObservedNode, Policy

PAIR = policy(2, 2)
AWAY = ObservedNode(name="node-0", ready=False, not_ready_since=LONG_AGO)


def supplied(
    record: Record,
    *pods: Seen,
    wishes: Policy = PAIR,
    nodes: Any = (),
    workloads: dict[Slot, str] | None = None,
    **limits: Any,
) -> tuple[list[Action], datetime | None]:
    replicas = replicas_of(record, *pods, nodes=nodes)
    given = context(observed(job(record, wishes)), replicas, workloads=workloads)
    return supply_pods(record, given, wanted_slots(given.grant, record, replicas), CreationLimits(**limits))


def removed(actions: list[Action]) -> list[tuple[str, str, bool]]:
    return [(a.name, a.reason, a.force) for a in actions if isinstance(a, DeletePod)]
