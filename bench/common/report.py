"""Figures of a benchmark: the spread of repeated measurements, rows with a ratio and a verdict, and the report file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from tests.commit_under_test import commit_under_test

LEAST_RUNS = 5  # behind a figure that is published


@dataclass(frozen=True, slots=True)
class Spread:
    """Smallest, middle and largest of some measurements, and how many they were."""

    min: float
    median: float
    max: float
    runs: int = field(default=1, compare=False)

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError when there is none."""
        if not values:
            raise ValueError("a spread needs at least one measurement")
        return cls(min(values), statistics.median(values), max(values), len(values))

    def as_json(self) -> dict[str, float]:
        spread = {"min": rounded(self.min), "median": rounded(self.median), "max": rounded(self.max)}
        return {**spread, "runs": self.runs}


class Better(Enum):
    """Which direction of a metric is the good one."""

    SMALLER = "smaller"
    LARGER = "larger"


class Judged(Enum):
    """By what a row is held against the number that it is to reach."""

    RATIO = "ratio of the medians"
    MEDIAN = "our median"
    WORST = "our worst run"


@dataclass(frozen=True, slots=True)
class Reach:
    """What is to be reached, and by what: see Judged."""

    number: float
    by: Judged

    @classmethod
    def ratio(cls, number: float) -> Reach:
        return cls(number, Judged.RATIO)

    @classmethod
    def median(cls, number: float) -> Reach:
        return cls(number, Judged.MEDIAN)

    @classmethod
    def worst(cls, number: float) -> Reach:
        return cls(number, Judged.WORST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a report.

    theirs: of the peer, None where there is no peer or it did not manage. reach: None where the row only informs.
    how: the conditions of the measurement, in a sentence. missing: runs of ours that were asked for and gave no figure.
    """

    metric: str
    unit: str
    ours: Spread | None
    peer: str | None = None
    theirs: Spread | None = None
    better: Better = Better.SMALLER
    reach: Reach | None = None
    how: str = ""
    missing: int = 0

    @property
    def ratio(self) -> float | None:
        """How many times better our median is than theirs; None when one is missing or the divisor is 0."""
        if self.ours is None or self.theirs is None:
            return None
        ours, theirs = self.ours.median, self.theirs.median
        above, below = (theirs, ours) if self.better is Better.SMALLER else (ours, theirs)
        return above / below if below else None

    @property
    def is_measured(self) -> bool:
        """Whether there is a figure of ours, and of the peer where there is one."""
        return self.ours is not None and (self.theirs is not None or not self.peer)

    @property
    def met(self) -> bool | None:
        """Tell whether what is to be reached was reached; None where the row only informs.

        A run without a figure is worse than any number: the worst run misses with it, and a median when they are half of all.
        """
        if self.reach is None:
            return None
        if self.ours is None or self.missing >= (1 if self.reach.by is Judged.WORST else max(1, self.ours.runs)):
            return False
        if self.reach.by is Judged.RATIO:
            return self.ratio is not None and self.ratio >= self.reach.number
        is_small = self.better is Better.SMALLER
        worst = self.ours.max if is_small else self.ours.min
        judged = self.ours.median if self.reach.by is Judged.MEDIAN else worst
        return judged <= self.reach.number if is_small else judged >= self.reach.number

    def as_json(self) -> dict[str, Any]:
        """Give the row as it stands in the report file."""
        return {
            "metric": self.metric,
            "unit": self.unit,
            "ours": self.ours.as_json() if self.ours else None,
            "peer": self.peer,
            "theirs": self.theirs.as_json() if self.theirs else None,
            "ratio": None if self.ratio is None else rounded(self.ratio),
            "reach": self.reach.number if self.reach else None,
            "met": self.met,
            "missing": self.missing,
            "how": self.how,
        }


def report(
    name: str, rows: Sequence[Row], *, machine: str, load_1m: float, versions: Mapping[str, str]
) -> dict[str, Any]:
    """Give the content of a report file."""
    return {
        "name": name,
        "commit": commit_under_test(),
        "machine": machine,
        "load_1m": load_1m,
        "versions": dict(versions),
        "rows": [row.as_json() for row in rows],
    }


def report_name(name: str, *, is_whole: bool, repeat: int) -> str:
    """Give the name of a report's file: the published one only for a whole run with as many repetitions as figures need."""
    return name if is_whole and repeat >= LEAST_RUNS else f"{name}-part"


def conclude(rows: Sequence[Row]) -> int:
    """Print how many rows reached what they are to reach; give the exit status.

    It is 1 when a row was missed or not measured, or has fewer runs than were asked for.
    """
    wanted = [row for row in rows if row.reach is not None]
    print(f"{sum(row.met is True for row in wanted)} of {len(wanted)} rows with a number to reach met it")
    missed = [_name(row) for row in wanted if row.met is False and row.is_measured]
    absent = [_name(row) for row in rows if not row.is_measured]
    fewer = [
        f"{_name(row)} ({row.ours.runs} of {row.ours.runs + row.missing})" for row in rows if row.ours and row.missing
    ]
    for what, names in (("missed", missed), ("not measured", absent), ("fewer runs than asked for", fewer)):
        if names:
            print(f"{what}: {', '.join(names)}")
    return 1 if missed or absent or fewer or not rows else 0


def write_json(path: Path, content: object) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(content, indent=1) + "\n")
    new.replace(path)


def table(rows: Sequence[Row]) -> str:
    """Lay the rows out for a person, a line each."""
    lines = [("metric", "ours min/med/max", "peer", "theirs min/med/max", "ratio", "reach", "")]
    for row in rows:
        lines.append(
            (
                f"{row.metric} [{row.unit}]",
                _shown(row.ours),
                row.peer or "",
                _shown(row.theirs) if row.peer else "",
                "" if row.ratio is None else f"{row.ratio:.3g}x",
                _reach_shown(row),
                "" if row.reach is None else ("met" if row.met else "MISSED"),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def rounded(number: float) -> float:
    """Keep four digits: more is noise in a file that people read."""
    return float(f"{number:.4g}")


def _name(row: Row) -> str:
    return row.metric + (f" ({row.peer})" if row.peer else "")


def _shown(spread: Spread | None) -> str:
    if spread is None:
        return "none"
    return " / ".join(f"{rounded(number):g}" for number in (spread.min, spread.median, spread.max))


def _reach_shown(row: Row) -> str:
    if row.reach is None:
        return ""
    if row.reach.by is Judged.RATIO:
        return f">= {row.reach.number:g}x"
    return f"{'<=' if row.better is Better.SMALLER else '>='} {row.reach.number:g} {row.unit}"
