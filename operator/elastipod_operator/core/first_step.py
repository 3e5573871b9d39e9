"""The steps that members report of the present generation: until the first one, the world connects and resumes."""

from __future__ import annotations

from datetime import datetime

from .next_generation import FIRST_STEP_PATIENCE, takes_over_at
from .record import Record
from .replica import Replica, Replicas


def status_waits_until(record: Record, replicas: Replicas, now: datetime) -> datetime | None:
    """Give until when the status of a generation that has just begun may wait; None if it is due.

    A generation is marked as running at its first step, or FIRST_STEP_PATIENCE after it began, and its status is written then.
    """
    if record.transition is not None:
        return takes_over_at(record, replicas, now)
    began_at = record.generation_began_at
    if began_at is None or record.generation < 2 or record.running_since is not None:
        return None
    if record.outcome or not record.members:
        return None
    until = began_at + FIRST_STEP_PATIENCE
    return until if began_at <= now < until else None


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
