"""Write docs/reference/proven.md: what is proven, and how much, from the reports of runs. No figure in it is typed by hand.

Usage: python -m tests.proven. `make proven` calls it, and writes the pages of benchmarks and of tested versions too. It reads
what whole tiers (`make test ALL=1`), long runs (`make test-long`) and benchmarks (`make bench`) left below .run, keeps the newest
report of each (`kept_reports.py`), and counts lines of code and tests in the checkout. What has no report is named as such.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import benchmark_page, kept_reports, tested_versions

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "proven.md"
BENCHMARKS = ROOT / "docs" / "reference" / "benchmarks.md"
TIERS = ("unit", "sim", "api", "e2e", "chart")
LONG_RUN = re.compile(r'mark\.long\("([a-z-]+)"\)')
TEST = re.compile(r"^(?:async )?def test_", re.MULTILINE)
HEAD = """# What is proven, and how much

Written by `make proven` from the reports of runs; do not edit. [How it is tested](../design/testing.md) explains each kind of test.
"""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the page is made of: reports by name, and counts of the checkout."""

    tiers: Mapping[str, Mapping[str, Any]]
    long_runs: Mapping[str, Mapping[str, Any]]
    known_long_runs: Sequence[str]
    benchmarks: Mapping[str, Mapping[str, Any]]
    known_benchmarks: Sequence[str]
    functions: Mapping[str, int]
    lines: Mapping[str, int]
    where: str


def read_evidence(root: Path = ROOT) -> Evidence:
    """Read the reports below .run and those that are kept, and count tests and lines of the files that git tracks."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=root, check=True, capture_output=True, text=True).stdout
    texts = {name: (root / name).read_text() for name in listed.split() if (root / name).is_file()}
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, check=True, capture_output=True, text=True)
    parts = ("operator", "agent", "localcluster", "tests", "bench", "examples")
    tests = [text for name, text in texts.items() if name.startswith("tests/")]
    runs = sorted({name for text in tests for name in LONG_RUN.findall(text)})
    benchmarks = sorted(path.stem for path in (root / "bench").glob("*.py"))
    names = {"tests": frozenset(TIERS), "long": frozenset(runs), "bench": frozenset(benchmarks)}
    reports = kept_reports.with_those_below(root / ".run", kept_reports.read(root), names)
    return Evidence(
        tiers=reports["tests"],
        long_runs=reports["long"],
        known_long_runs=runs,
        benchmarks=reports["bench"],
        known_benchmarks=benchmarks,
        functions={
            tier: sum(len(TEST.findall(text)) for name, text in texts.items() if name.startswith(f"tests/{tier}/"))
            for tier in TIERS
        },
        lines={
            part: sum(text.count("\n") for name, text in texts.items() if name.startswith(f"{part}/")) for part in parts
        },
        where=f"commit {head.stdout.strip()}, {os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}",
    )


def page(evidence: Evidence) -> str:
    """Give the page."""
    return "\n".join(
        [HEAD, f"Counted on: {evidence.where}.", *_tiers(evidence), *_long_runs(evidence), *_code(evidence), ""]
    )


def _tiers(evidence: Evidence) -> Iterator[str]:
    yield "\n## Tests by tier\n\nOne test function may stand for many cases; the last columns come from the last whole run of the tier."
    yield "A flaky test failed beside others and passed alone.\n"
    yield "| tier | test functions | passed | skipped | failed | flaky | seconds | at commit |\n|---|---|---|---|---|---|---|---|"
    for tier in TIERS:
        found = evidence.tiers.get(tier)
        if found is None:
            ran = "no report | | | | | |"
        else:
            counts = found["counts"]
            flaky = len(found["flaky"])
            failed = counts.get("failed", 0) + counts.get("error", 0) - flaky
            passed = f"{counts.get('passed', 0)} | {counts.get('skipped', 0)} | {failed} | {flaky}"
            ran = f"{passed} | {found['seconds']:.0f} | {found['commit']}"
        yield f"| {tier} | {evidence.functions[tier]} | {ran} |"


def _long_runs(evidence: Evidence) -> Iterator[str]:
    yield "\n## Long runs\n\n`make test-long NAME=<run> SEED=<seed>` repeats one.\n"
    yield "| run | result | seed | at commit | counts |\n|---|---|---|---|---|"
    for name in evidence.known_long_runs:
        found = evidence.long_runs.get(name)
        if found is None:
            yield f"| {name} | no report | | | |"
        else:
            counts = ", ".join(f"{what.replace('_', ' ')} {_figure(count)}" for what, count in found["counts"].items())
            yield f"| {name} | {found['result']} | {found['seed']} | {found.get('commit', 'unknown')} | {counts} |"


def _code(evidence: Evidence) -> Iterator[str]:
    yield "\n## Code and tests\n\n| part | lines of Python |\n|---|---|"
    for part, lines in evidence.lines.items():
        yield f"| {part} | {lines:,} |"


def _figure(count: float) -> str:
    return f"{count:,}" if isinstance(count, int) else f"{count:,.4g}"


def main() -> int:
    """Keep the reports and write the pages."""
    PAGE.parent.mkdir(exist_ok=True)
    evidence = read_evidence()
    kept_reports.write({"tests": evidence.tiers, "long": evidence.long_runs, "bench": evidence.benchmarks})
    PAGE.write_text(page(evidence))
    BENCHMARKS.write_text(benchmark_page.page(evidence.known_benchmarks, evidence.benchmarks))
    tested_versions.main(evidence.long_runs)
    print(f"{PAGE.relative_to(ROOT)} is written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
