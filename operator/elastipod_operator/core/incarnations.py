"""The incarnations of pods: a pod's name is never used twice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .names import PodId, Slot
from .record import Record
from .replica import Replicas


def record_incarnations(record: Record, pods: Iterable[PodId]) -> Record:
    """Record the incarnations of observed pods, so that no pod's name is used again."""
    newest = dict(record.incarnations)
    for pod in (*record.members, *pods):
        newest[pod.slot] = max(pod.incarnation, newest.get(pod.slot, 0))
    return record if newest == record.incarnations else replace(record, incarnations=newest)


def newest_incarnations(record: Record, replicas: Replicas) -> dict[Slot, int]:
    """Give the newest known incarnation of each slot."""
    newest = dict(record.incarnations)
    for pod in (*record.members, *record.lost, *replicas.by_id):
        slot = pod.slot
        newest[slot] = max(pod.incarnation, newest.get(slot, -1))
    return newest
