"""The newest complete checkpoint of each series that the ranks of this pod report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_SERIES = 64
NOTHING_COMPLETE = -1
_MAX_PENDING = 16  # incomplete steps per series; a rank that died never completes its step


@dataclass(slots=True)
class _Pending:
    ranks: dict[str, set[int]] = field(default_factory=dict)
    path: str | None = None


@dataclass(slots=True)
class _Series:
    """is_told: the complete step was named by a start. has_reported: ranks of this pod have reported in this run."""

    expected: dict[str, int] = field(default_factory=dict)
    pending: dict[int, _Pending] = field(default_factory=dict)
    complete: tuple[int, str | None] | None = None
    is_told: bool = False
    has_reported: bool = False

    def progress(self) -> dict[str, Any]:
        """Give the entry of /status. One without a complete step says that a step of this pod would be torn."""
        step, path = (NOTHING_COMPLETE, None) if self.complete is None else self.complete
        entry: dict[str, Any] = {"progressData": path, "progressCount": step}
        return entry | ({"progressReported": True} if self.has_reported else {})


class CheckpointSeries:
    """Collects reports. A step is complete once as many ranks as expected have reported every part (model, data)."""

    def __init__(self) -> None:
        self._series: dict[str, _Series] = {}

    def begin_run(self, progress: Mapping[str, Any]) -> None:
        """Take the checkpoints from which a start resumes the job, and drop incomplete steps."""
        for series in self._series.values():
            series.pending.clear()
            series.has_reported = False
        for prefix, entry in progress.items():
            known, named = _entry(entry), self._of(prefix)
            if known is not None and named is not None:
                named.complete, named.is_told = known, True

    def expect(self, prefix: str, expected: Mapping[str, int]) -> None:
        """Set how many ranks report each part of a series. Raises ValueError for a series beyond the limit."""
        series = self._of(prefix)
        if series is None:
            raise ValueError(f"{prefix!r} exceeds the limit of {MAX_SERIES} series per agent")
        series.expected = {kind: count for kind, count in expected.items() if count > 0}

    def report(self, prefix: str, step: int, path: str | None, kind: str, local_rank: int) -> None:
        """Record that a rank has written its part. Raises ValueError for a series beyond the limit.

        An older step than the complete one comes too late, unless a start has named that: then the script has gone back further.
        """
        series = self._of(prefix)
        if series is None:
            raise ValueError(f"{prefix!r} exceeds the limit of {MAX_SERIES} series per agent")
        series.has_reported = True
        if series.complete is not None and step <= series.complete[0] and not series.is_told:
            return
        pending = series.pending.setdefault(step, _Pending())
        pending.ranks.setdefault(kind, set()).add(local_rank)
        pending.path = path or pending.path
        if series.expected and all(
            len(pending.ranks.get(kind, ())) >= count for kind, count in series.expected.items()
        ):
            series.complete, series.is_told = (step, pending.path), False
            series.pending = {later: one for later, one in series.pending.items() if later > step}
        while len(series.pending) > _MAX_PENDING:
            del series.pending[min(series.pending)]

    def latest(self, prefix: str) -> str | None:
        """Give the path of the newest complete checkpoint of a series, None if none is known."""
        series = self._series.get(prefix)
        return None if series is None or series.complete is None else series.complete[1]

    def progress(self) -> dict[str, Any]:
        """Give the checkpoints as /status shows them: {prefix: {progressData: path, progressCount: step, progressReported?: true}}."""
        return {
            prefix: series.progress()
            for prefix, series in self._series.items()
            if series.complete is not None or (series.has_reported and any(series.expected.values()))
        }

    def _of(self, prefix: str) -> _Series | None:
        if prefix not in self._series and len(self._series) >= MAX_SERIES:
            return None
        return self._series.setdefault(prefix, _Series())


def _entry(entry: object) -> tuple[int, str | None] | None:
    if not isinstance(entry, Mapping):
        return None
    step, path = entry.get("progressCount"), entry.get("progressData")
    if isinstance(step, bool) or not isinstance(step, int) or step < 0 or not (path is None or isinstance(path, str)):
        return None
    return step, path
