"""From which checkpoint a job resumes, by what its agents tell of each series.

An agent counts the ranks of its own pod, so a step that one pod has completed may be torn: a rank of another pod may have died before it
wrote its part. Only what all pods that report a series have completed can be resumed from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LARGEST_STEP = 2**53
# The series of CheckpointManager, which reports a step once all ranks of the job have written it.
WHOLE_SERIES = "elastipod"
_REPORTED = "progressReported"


@dataclass(frozen=True, slots=True)
class ToldCheckpoint:
    """What one agent tells of a series. generation: that the agent runs or has run last; 0 if it does not say."""

    generation: int
    entry: Any

    @property
    def is_reported(self) -> bool:
        """Whether ranks of this pod report the series in that generation."""
        return isinstance(self.entry, dict) and self.entry.get(_REPORTED) is True


def agreed_checkpoint(prefix: str, told: Sequence[ToldCheckpoint], generation: int) -> Any:
    """Give the entry of a series for the /start of a generation; None if no step is complete.

    Agents that have this /start already were told the same. Among the others, those count whose ranks have reported the series in the
    generation before. Where none has, as with agents of earlier versions, the newest step that any agent knows is taken.
    """
    started = [each for each in told if generation and each.generation == generation]
    reported = [each for each in told if each.is_reported]
    if started or prefix == WHOLE_SERIES or not reported:
        found = max(started or told, key=lambda each: checkpoint_step(each.entry)).entry
    else:
        last = max(each.generation for each in reported)
        found = min((each.entry for each in reported if each.generation == last), key=checkpoint_step)
    if not isinstance(found, dict):
        return found
    is_complete = "progressCount" not in found or found["progressCount"] != -1
    return {name: value for name, value in found.items() if name != _REPORTED} if is_complete else None


def last_completed(one: ToldCheckpoint, other: ToldCheckpoint | None) -> ToldCheckpoint:
    """Give the one of two that limits what a job can resume from: that of the newer generation, or else of the lower step."""
    if other is None:
        return one
    return min(one, other, key=lambda each: (-each.generation, checkpoint_step(each.entry)))


def checkpoint_step(entry: Any) -> int:
    """Give the step of a checkpoint that an agent reports; -1 for what is none."""
    count = entry.get("progressCount") if isinstance(entry, dict) else None
    return count if isinstance(count, int) and count < LARGEST_STEP else -1
