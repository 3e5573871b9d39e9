"""The reports of long runs: what `make test-long` did with which seed and counts, and how it ended."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
from tests.commit_under_test import commit_under_test

TESTS = Path(__file__).resolve().parent


def long_names() -> list[str]:
    """Give the names of all long runs, as the marks of the tests have them."""
    marks = (
        re.findall(r'mark\.long\("([^"]+)"\)', path.read_text(encoding="utf-8")) for path in TESTS.rglob("test_*.py")
    )
    return sorted({name for names in marks for name in names})


def reports_folder(root: Path, keyword: str, arguments: Sequence[str]) -> Path:
    """Give where reports go. Those of tests that were chosen by -k, file or name prove less than a run, and are kept apart."""
    is_part = keyword != "" or not all(Path(each).is_dir() for each in arguments)
    return root / ".run" / ("long-parts" if is_part else "long")


@dataclass(slots=True)
class LongRun:
    """One named long run: the seed to start from, and the counts that the test notes as it goes. path: of its report."""

    name: str
    seed: int
    path: Path
    commit: str = field(default_factory=commit_under_test)
    counts: dict[str, int | float] = field(default_factory=dict)
    tests: dict[str, dict[str, object]] = field(default_factory=dict)
    details: dict[str, object] = field(default_factory=dict)

    def count(self, **counts: int | float) -> None:
        """Note what was run, such as `schedules=5000`; later values of a name replace earlier ones."""
        self.counts.update(counts)

    def detail(self, **details: object) -> None:
        """Note what figures alone do not tell, such as who was not found; it comes last in the report."""
        self.details.update(details)

    def write(self) -> None:
        """Write the report as far as it is: whoever ends the run early keeps what it has found."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.as_json(), indent=2) + "\n")

    def as_json(self) -> dict[str, object]:
        """Give the report as it is written: seed, counts, and the result, which is unfinished before a test ended."""
        outcomes = [test["outcome"] for test in self.tests.values()]
        skipped = outcomes.count("skipped")
        passed = f"passed, {skipped} skipped" if skipped else "passed"
        result = (passed if set(outcomes) - {"skipped"} == {"passed"} else "failed") if outcomes else "unfinished"
        return {
            "name": self.name,
            "seed": self.seed,
            "commit": self.commit,
            "counts": self.counts,
            "result": result,
            "tests": self.tests,
            **self.details,
        }


class LongRuns:
    """The long runs of one pytest session; each is written anew whenever one of its tests ends."""

    key: ClassVar[pytest.StashKey[LongRuns]] = pytest.StashKey()

    def __init__(self, folder: Path, *, seed: int) -> None:
        self._folder = folder
        self._seed = seed
        self._runs: dict[str, LongRun] = {}

    def open(self, name: str) -> LongRun:
        """Give the run of this name, made on first use."""
        return self._runs.setdefault(name, LongRun(name, self._seed, self._folder / f"{name}.json"))

    def close(self, name: str, test: str, report: pytest.TestReport) -> None:
        """Note how one test of the run ended and write the report."""
        run = self.open(name)
        if report.failed or test not in run.tests:
            run.tests[test] = {"outcome": report.outcome, "seconds": round(report.duration, 1)}
        run.write()
