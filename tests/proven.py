"""Write docs/reference/proven.md: what is proven, and how much, from the reports of runs. No figure in it is typed by hand.

Usage: python -m tests.proven. `make proven` calls it, and fills the page of tested versions too. It reads what whole tiers
(`make test`) and long runs (`make test-long`) left below .run, and counts lines of code and tests in the checkout. What has
no report is named as such.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import tested_versions

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "proven.md"
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
    functions: Mapping[str, int]
    lines: Mapping[str, int]
    where: str


def read_evidence(root: Path = ROOT) -> Evidence:
    """Read the reports below .run, and count tests and lines of the files that git tracks."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=root, check=True, capture_output=True, text=True).stdout
    texts = {name: (root / name).read_text() for name in listed.split() if (root / name).is_file()}
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, check=True, capture_output=True, text=True)
    parts = ("operator", "agent", "localcluster", "tests", "bench", "examples")
    tests = [text for name, text in texts.items() if name.startswith("tests/")]
    return Evidence(
        tiers=_reports(root / ".run" / "tests"),
        long_runs=_reports(root / ".run" / "long"),
        known_long_runs=sorted({name for text in tests for name in LONG_RUN.findall(text)}),
        functions={
            tier: sum(len(TEST.findall(text)) for name, text in texts.items() if name.startswith(f"tests/{tier}/"))
            for tier in TIERS
        },
        lines={
            part: sum(text.count("\n") for name, text in texts.items() if name.startswith(f"{part}/")) for part in parts
        },
        where=f"commit {head.stdout.strip()}, {os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}",
    )


def _reports(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


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
    """Write the page."""
    PAGE.parent.mkdir(exist_ok=True)
    evidence = read_evidence()
    PAGE.write_text(page(evidence))
    tested_versions.main(evidence.long_runs)
    print(f"{PAGE.relative_to(ROOT)} is written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
