"""Which versions have run, from reports of long runs: `make proven` keeps them in docs/reference/versions.json and fills the page.

A report is of one session; the file keeps the newest of each version. Nothing of it is typed by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "docs" / "reference" / "versions.json"
PAGE = ROOT / "docs" / "reference" / "versions.md"
TORCH = re.compile(r"torch (\d+\.\d+)\S*, python (\S+): (drained and continued|in memory)")
WHEEL = re.compile(r"python (\S+): (elastipod|elastipod-agent) installed")
CLUSTER = re.compile(r"kubernetes (\d+\.\d+)(\S*), kueue (\d+\.\d+)(\S*): tests/(\w+)")
WAYS = {"drained and continued", "in memory"}
TIERS = ("api", "chart", "e2e")
NO_REPORT = "passed once; no report is kept"
UNTESTED = "untested"

Kept = dict[str, dict[str, dict[str, Any]]]


def read() -> Kept:
    """Give what is kept: by kind and version, the commit and what was counted."""
    found: Kept = json.loads(KEPT.read_text(encoding="utf-8"))
    return found


def with_reports(kept: Kept, reports: Mapping[str, Mapping[str, Any]]) -> Kept:
    """Give what is kept after these reports, by the name of their run."""
    found = {kind: dict(versions) for kind, versions in kept.items()}
    for kind, version, entry in _entries(reports):
        found.setdefault(kind, {})[version] = entry
    return {kind: dict(sorted(versions.items(), key=lambda one: _number(one[0]))) for kind, versions in found.items()}


def _entries(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    matrix = reports.get("matrix", {})
    commit, counts = matrix.get("commit", ""), matrix.get("counts", {})
    ways: dict[tuple[str, str], set[str]] = {}
    for name in counts:
        if told := TORCH.match(name):
            ways.setdefault((told[1], told[2]), set()).add(told[3])
        elif told := WHEEL.match(name):
            yield told[2], told[1], {"commit": commit}
    for (torch, python), done in ways.items():
        if done == WAYS:
            yield "torch", torch, {"python": python, "commit": commit}
    clusters = reports.get("kubernetes", {})
    passed: dict[tuple[str, ...], dict[str, int]] = {}
    for name, count in clusters.get("counts", {}).items():
        if told := CLUSTER.match(name):
            passed.setdefault(told.groups()[:4], {})[told[5]] = count
    for (kubernetes, patch, kueue, kueue_patch), tiers in passed.items():
        if set(tiers) == set(TIERS):
            entry = {"commit": clusters.get("commit", ""), "tests": sum(tiers.values())}
            yield "kubernetes", kubernetes, {"version": kubernetes + patch, "kueue": kueue + kueue_patch, **entry}
            yield "kueue", kueue, {"version": kueue + kueue_patch, "kubernetes": kubernetes + patch, **entry}


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def said(kept: Kept, kind: str, version: str) -> str:
    """Say in the words of the page how a version has been tested."""
    entry = kept.get(kind, {}).get(version)
    if entry is None:
        return UNTESTED
    if not entry["commit"]:
        return NO_REPORT
    if kind in ("kubernetes", "kueue"):
        other = "kueue" if kind == "kubernetes" else "kubernetes"
        beside = f"{other.capitalize()} {entry[other]}"
        return f"{entry['tests']} tests passed on {entry['version']} with {beside}, at {entry['commit']}"
    return f"tested at {entry['commit']}"


def filled(text: str, kept: Kept) -> str:
    """Give the page with what is kept in it: a cell between `<!-- KIND VERSION -->` and the next bar is written anew."""
    return re.sub(
        r"(<!-- (\S+) (\S+) --> )[^|\n]*?( ?\|)",
        lambda found: f"{found[1]}{said(kept, found[2], found[3])}{found[4]}",
        text,
    )


def main(reports: Mapping[str, Mapping[str, Any]]) -> None:
    """Keep the reports and write the page."""
    kept = with_reports(read(), reports)
    KEPT.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), kept), encoding="utf-8")
