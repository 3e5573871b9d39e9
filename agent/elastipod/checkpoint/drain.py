"""What a process that is about to end still waits for: a save that is under way, or nothing more of it.

A process that leaves in order waits for its saves. One that failed does not: its agent learns of a failure by the end of the
process, and a save may take minutes. What such a save has begun in storage is hidden, and the next generation deletes it.
A process that was asked to leave by a deadline waits no longer than that allows, once memory holds the step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from elastipod.local_worker import local_worker
from elastipod.worker_file import EventLevel

log = logging.getLogger(__name__)

SHORT_DRAIN_S = (
    180.0  # a drain with less time than this does not wait for storage if memory outlives it; Spot gives 120 s
)
EXIT_MARGIN_S = 10.0  # of the drain's time, kept for leaving


@dataclass(frozen=True, slots=True)
class DrainNotice:
    """A drain as one rank knows it. left_s: until its deadline; leaves: whether this rank's pod goes, None when not known."""

    left_s: float
    leaves: bool | None

    def as_json(self) -> list[Any]:
        return [self.left_s, self.leaves]


def current_drain() -> DrainNotice | None:
    """Give the drain that this rank was asked for, None where it was not, or has no deadline."""
    worker = local_worker()
    if worker is None:
        return None
    event = worker.file.event()
    if event.level == EventLevel.NONE or not event.deadline:
        return None
    return DrainNotice(event.deadline - time.time(), worker.file.leaves())


def storage_wait_s(left_s: Sequence[float], *, survives_drain: bool) -> float:
    """Give how long a drain waits for durable storage once memory holds the step, in seconds.

    left_s: what each rank that knows a deadline has left; outlives: whether the memory of the pods that stay holds all of the
    state. Where it does not, or nobody knows who stays, storage is waited for as far as the deadline allows.
    """
    least = min(left_s)
    return 0.0 if survives_drain and least < SHORT_DRAIN_S else max(0.0, least - EXIT_MARGIN_S)


@contextmanager
def checkpoint_call() -> Iterator[None]:
    """Let the agent know that this rank is inside a checkpoint call, so that its silence is not taken for a hang."""
    worker = local_worker()
    if worker is None or worker.file.is_in_checkpoint(worker.local_rank):
        yield
        return
    worker.file.set_in_checkpoint(worker.local_rank, True)
    try:
        yield
    finally:
        worker.file.set_in_checkpoint(worker.local_rank, False)
