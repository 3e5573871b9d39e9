"""What the annotations of a job show of its training: the newest step, when it will end, and the newest durable checkpoint.

They are written along with other changes of the job. Otherwise a tenth of the time that the generation has run passes between two
writes, at least a minute and at most ten, so that a thousand jobs cost the API server about two writes in a second. Nothing is
decided from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from .names import ANNOTATION_CHECKPOINT, ANNOTATION_ETA, ANNOTATION_STEP, ANNOTATION_STEP_AT
from .record import Record
from .record_codec import RecordError, format_time, parse_time
from .snapshot import ObservedAgent

SOONEST, LATEST = timedelta(minutes=1), timedelta(minutes=10)
LONGEST_S = 3650 * 86400


def progress_interval(record: Record, at: datetime) -> timedelta | None:
    """Give the time from a write to the next one; None while no generation runs."""
    if record.running_since is None or record.transition is not None or record.outcome:
        return None
    return min(max((at - record.running_since) / 10, SOONEST), LATEST)


def next_progress(record: Record, present: Mapping[str, str], now: datetime) -> datetime:
    """Give when the progress is to be written even if nothing else is. A generation must run. present: the job's annotations."""
    since = _written_at(record, present, now) or record.running_since or now
    return since + (progress_interval(record, since) or LATEST)


def progress_changes(
    record: Record, present: Mapping[str, str], members: Iterable[ObservedAgent], checkpoint: int | None, now: datetime
) -> dict[str, str | None]:
    """Give the annotations that change; None for one to be removed. checkpoint: the step of the newest one, if known."""
    newest = max((a for a in members if a.step is not None), key=lambda agent: agent.step or 0, default=ObservedAgent())
    wanted: dict[str, str | None] = {ANNOTATION_ETA: None}
    if checkpoint is not None:
        wanted[ANNOTATION_CHECKPOINT] = str(checkpoint)
    if newest.step is not None:
        wanted[ANNOTATION_STEP] = f"{newest.step}/{newest.total_steps}" if newest.total_steps else str(newest.step)
        pace = _pace(record, present, newest, now)
        if newest.total_steps and pace is not None and progress_interval(record, now) is not None:
            left_s = min(max(0, newest.total_steps - newest.step) * pace.total_seconds(), LONGEST_S)
            wanted[ANNOTATION_ETA] = f"{now + timedelta(seconds=left_s):%Y-%m-%dT%H:%M:00Z}"
    changed = {name: value for name, value in wanted.items() if value != present.get(name)}
    if set(changed) == {ANNOTATION_ETA} and changed[ANNOTATION_ETA]:
        return {}  # a hang is no news
    return {**changed, ANNOTATION_STEP_AT: format_time(now)} if changed else {}


def read_step(present: Mapping[str, str]) -> tuple[int, int | None] | None:
    """Read the annotation of the step: completed steps, and all steps if they are known. None for anything else."""
    step, _, total = present.get(ANNOTATION_STEP, "").partition("/")
    if not all(part.isdecimal() and part.isascii() and len(part) < 17 for part in (step, total or "0")):
        return None
    return int(step), int(total) if total else None


def _written_at(record: Record, present: Mapping[str, str], now: datetime) -> datetime | None:
    """Give when the progress was last written in the present generation; None for a time that cannot be."""
    try:
        at = parse_time(present.get(ANNOTATION_STEP_AT))
    except (RecordError, ValueError):  # a user may write anything there
        return None
    return at if at is not None and record.running_since is not None and record.running_since <= at <= now else None


def _pace(record: Record, present: Mapping[str, str], newest: ObservedAgent, now: datetime) -> timedelta | None:
    """Give the time of one step: the average since the last write, if that is a while ago, else as the agent was heard."""
    at, before = _written_at(record, present, now), read_step(present)
    made = (newest.step or 0) - before[0] if before is not None else 0
    return (now - at) / made if at is not None and now - at >= SOONEST and made > 0 else newest.step_pace
