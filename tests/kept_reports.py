"""The newest report of each tier, long run and benchmark, kept in docs/reference/proven.json: machines forget theirs.

`make proven` adds what is below .run. What a report has beside what the pages show is left out: single tests, details.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KEPT = Path("docs", "reference", "proven.json")
FIELDS = {
    "tests": ("counts", "flaky", "seconds", "commit"),
    "long": ("result", "seed", "commit", "counts"),
    "bench": ("commit", "machine", "load_1m", "versions", "rows"),
}

Reports = Mapping[str, Mapping[str, Any]]


def with_those_below(run: Path, kept: Mapping[str, Reports], names: Mapping[str, frozenset[str]]) -> dict[str, Reports]:
    """Give what is kept with what is below a folder .run. names: of the reports of each kind, which others are not."""
    return {
        kind: {
            name: report
            for name, report in sorted({**kept.get(kind, {}), **_read(run / kind, FIELDS[kind])}.items())
            if name in names[kind]
        }
        for kind in FIELDS
    }


def _read(folder: Path, fields: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    reports = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}
    return {
        name: {field: report[field] for field in fields}
        for name, report in reports.items()
        if isinstance(report, dict) and all(field in report for field in fields)
    }


def read(root: Path = ROOT) -> dict[str, Reports]:
    """Give what is kept, by kind and name."""
    found: dict[str, Reports] = json.loads((root / KEPT).read_text(encoding="utf-8"))
    return found


def write(kept: Mapping[str, Reports], root: Path = ROOT) -> None:
    """Keep these and no others."""
    (root / KEPT).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
