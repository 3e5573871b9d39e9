"""How long a drain waits for a save, and the mark that this rank is inside a checkpoint call."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from elastipod.json_records import json_row
from elastipod.local_worker import local_worker
from elastipod.worker_file import EventLevel

log = logging.getLogger(__name__)

SHORT_DRAIN_S = 180.0  # a shorter drain does not wait for storage if memory survives it; Spot gives 120 s
EXIT_MARGIN_S = 10.0  # of the drain's time, reserved for the exit


@json_row
@dataclass(frozen=True, slots=True)
class DrainNotice:
    """A drain as one rank knows it. left_s: until its deadline; leaves: whether this rank's pod ends, None if unknown."""

    left_s: float
    leaves: bool | None


def current_drain() -> DrainNotice | None:
    """Return the drain that was announced to this rank, None if there is none or it has no deadline."""
    worker = local_worker()
    if worker is None:
        return None
    event = worker.file.event()
    if event.level == EventLevel.NONE or not event.deadline:
        return None
    steady = worker.file.steady_deadline()
    left_s = steady - time.monotonic() if steady else event.deadline - time.time()
    return DrainNotice(left_s, worker.file.leaves())


def storage_wait_s(left_s: Sequence[float], *, survives_drain: bool, reserve_s: float = 0.0) -> float:
    """Return how long a drain waits for durable storage once the step is in memory, in seconds.

    left_s: remaining time of each rank that knows a deadline; survives_drain: whether the memory of the pods that stay holds the
    whole state. If it does not, or if nobody knows who stays, wait for storage as long as the deadline allows. reserve_s: what else
    must be done before the deadline.
    """
    least = min(left_s)
    return 0.0 if survives_drain and least < SHORT_DRAIN_S else max(0.0, least - EXIT_MARGIN_S - reserve_s)


@contextmanager
def checkpoint_call() -> Iterator[None]:
    """Tell the agent that this rank is inside a checkpoint call, so that its silence is not taken for a hang."""
    worker = local_worker()
    if worker is None or worker.file.is_in_checkpoint(worker.local_rank):
        yield
        return
    worker.file.set_in_checkpoint(worker.local_rank, True)
    try:
        yield
    finally:
        worker.file.set_in_checkpoint(worker.local_rank, False)
