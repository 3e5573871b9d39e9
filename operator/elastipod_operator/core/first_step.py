"""The steps that members report of the present generation: until the first one, the world connects and resumes."""

from __future__ import annotations

from .record import Record
from .replica import Replica, Replicas


def steps_of_members(record: Record, replicas: Replicas) -> list[int]:
    """Give the newest step of each member that has reported one in the present generation."""
    return [step for m in record.members if (step := _step(replicas.get(m), record)) is not None]


def has_made_step(record: Record, replicas: Replicas) -> bool:
    """Whether a member has reported a step of the present generation. Workers that report none never have."""
    return bool(steps_of_members(record, replicas))


def _step(replica: Replica | None, record: Record) -> int | None:
    if replica is None or not replica.runs(record.generation):
        return None
    return replica.agent.step
