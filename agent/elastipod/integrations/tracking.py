"""One run of an experiment tracker for the whole life of a job: what MLflow and W&B have in common.

Rank 0 writes. Each generation opens the run again and says its size and why it began, so resizes and recoveries are in the charts
and no new run appears.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from types import TracebackType
from typing import Protocol

from elastipod.elastic_event import has_left_last_run, is_leaving
from elastipod.errors import FencedError
from elastipod.local_worker import generation_from_env, job_from_env, run_id_from_env
from elastipod.rank_in_world import RankInWorld

GENERATION, SIZE, CAUSE, JOB, JOB_UID, HAS_LEFT = (
    f"elastipod.{name}" for name in ("generation", "size", "cause", "job", "job_uid", "has_left")
)


class RunOutcome(Enum):
    """How this process's part of the run ends."""

    COMPLETED = "completed"
    LEFT = "left"  # for a resize: the next generation goes on
    LOST = "lost"  # taken down by a fault elsewhere: the next generation goes on, in this process
    FAILED = "failed"


class Tracker(Protocol):
    """A tracker's client. One run is open at a time; rank 0 calls it."""

    def open(self, job_uid: str, name: str) -> Mapping[str, str]:
        """Open the run of a job, or begin one; give what was last given to `tag`. An empty job_uid always begins one."""

    def tag(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics of a step. A step may come again after a recovery."""

    def close(self, outcome: RunOutcome) -> None:
        """Close the run in this process."""


class TrackedRun:
    """A job's run, on every rank. `log` writes on rank 0 and does nothing on others, so it may be called anywhere.

    As a context manager it closes the run: as completed, as left for a resize when `elastic_event_detected()` has been True, or as
    failed. Processes that live through a resize (`elastipod.State`) keep one object; the rank 0 of each generation writes.
    """

    def __init__(self, tracker: Tracker, *, name: str = "") -> None:
        """name: of a new run; the job's name if empty."""
        self._tracker = tracker
        self._name = name
        self._open_for: int | None = None

    def log(self, step: int, /, **metrics: float) -> None:
        """Log metrics of a completed step. Any rank may call it; not a collective. Raises FencedError in a replaced generation."""
        if self._follow(step):
            self._tracker.log(metrics, step)

    def close(self, outcome: RunOutcome) -> None:
        """Close the run, if this process has it open; `log` opens it again."""
        if self._open_for is not None:
            if outcome is RunOutcome.LEFT:
                self._tracker.tag({HAS_LEFT: str(self._open_for)})
            self._open_for = None
            self._tracker.close(outcome)

    def __enter__(self) -> TrackedRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        has_failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
        self.close(RunOutcome.FAILED if has_failed else RunOutcome.LEFT if is_leaving() else RunOutcome.COMPLETED)

    def _follow(self, step: int) -> bool:
        """Open the run when this rank has become rank 0 of a generation. Gives whether it is rank 0."""
        generation = generation_from_env() or 1
        is_writer = _rank() == 0
        if not is_writer or self._open_for != generation:
            self.close(RunOutcome.LEFT if has_left_last_run() else RunOutcome.LOST)
        if is_writer and self._open_for is None:
            job = job_from_env()
            known = self._tracker.open(run_id_from_env(), self._name or job)
            self._open_for = generation
            self._note_generation(generation, step, job, known)
        return is_writer

    def _note_generation(self, generation: int, step: int, job: str, known: Mapping[str, str]) -> None:
        newest = int(known.get(GENERATION) or 0)
        if newest > generation:
            self._open_for = None
            self._tracker.close(RunOutcome.LEFT)
            raise FencedError(
                f"generation {newest} writes the tracker's run; this is generation {generation}, so it must end"
            )
        size = int(os.environ.get("NNODES") or 1)
        tags = {GENERATION: str(generation), SIZE: str(size), CAUSE: _cause(known, size)}
        self._tracker.tag({**tags, JOB: job, JOB_UID: run_id_from_env()})
        self._tracker.log({GENERATION: generation, SIZE: size}, step)


def _cause(known: Mapping[str, str], size: int) -> str:
    """Say why a generation began, from what the one before it left in the run; for the operator's reason see the job's history."""
    if GENERATION not in known:
        return "start"
    if known.get(HAS_LEFT) != known[GENERATION] and not has_left_last_run():
        return "recovery"
    return "resize" if known.get(SIZE) != str(size) else "restart"


def _rank() -> int:
    """Give this process's global rank: of the process group, or before there is one, as the launcher set it."""
    place = RankInWorld.current()
    return place.rank if place.world_size > 1 else int(os.environ.get("RANK") or 0)
