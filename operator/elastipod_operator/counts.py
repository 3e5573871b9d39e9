"""What the metrics say of all jobs together."""

from __future__ import annotations

import math

from . import clock, metrics
from .core.actions import Plan
from .core.phase_accounting import Phase, booked_since, goodput
from .core.record import Ledger, Record


class JobCounts:
    """Jobs by state and by phase, and how their time was spent; by UID."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}
        self._ledgers: dict[str, Ledger] = {}
        metrics.GOODPUT.set_function(self._goodput)
        metrics.export_leading()
        for name in metrics.STATES:
            metrics.JOBS.labels(name).set(0)

    def note(self, uid: str, state: str, ledger: Ledger) -> None:
        """Take what a job is in now."""
        self._note_state(uid, state)
        self._note_phase(uid, ledger)

    def forget(self, uid: str) -> None:
        """Leave a job out that is gone."""
        self._note_state(uid, None)
        self._note_phase(uid, Ledger())

    def written(self, before: Record, todo: Plan) -> None:
        """Count what became true with a record that was written: the ends of phases, and generations."""
        for phase, spent in booked_since(before.ledger, todo.record.ledger).items():
            metrics.PHASE_SECONDS.labels(phase).inc(spent.total_seconds())
        for entry in todo.history:
            metrics.GENERATIONS.labels(entry.kind.value).inc()

    def _note_state(self, uid: str, state: str | None) -> None:
        if self._states.get(uid) == state:
            return
        before = self._states.pop(uid, None)
        if before is not None:
            metrics.JOBS.labels(before).dec()
        if state is not None:
            self._states[uid] = state
            metrics.JOBS.labels(state).inc()

    def _note_phase(self, uid: str, ledger: Ledger) -> None:
        before = self._ledgers.pop(uid, Ledger())
        if ledger != Ledger():
            self._ledgers[uid] = ledger
        if before.phase != ledger.phase:
            for phase, change in ((before.phase, -1), (ledger.phase, 1)):
                if phase in tuple(Phase):
                    metrics.JOBS_IN_PHASE.labels(phase).inc(change)

    def _goodput(self) -> float:
        share = goodput(self._ledgers.values(), clock.now())
        return math.nan if share is None else share
