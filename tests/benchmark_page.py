"""The page of benchmark results, docs/reference/benchmarks.md, from reports alone; `make proven` writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HEAD = (
    "# Benchmark results\n\n"
    "Written by `make proven` from the reports of runs; do not edit. [Benchmarks](../../bench/README.md) says what each one "
    "measures and how to repeat it.\n\n"
    "A cell has the median, and in brackets the smallest and the largest measurement and the number of runs. *Times better* "
    "compares the medians. "
    "A target is a limit on our median or our worst run, or how many times better our median has to be."
)
COLUMNS = "| measured | ours | peer | theirs | times better | target | | how |\n|---|---|---|---|---|---|---|---|"


def page(known: Sequence[str], reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Give the page. known: the names of all benchmarks."""
    return "\n".join([HEAD, *(line for name in known for line in _section(name, reports.get(name))), ""])


def _section(name: str, found: Mapping[str, Any] | None) -> Iterator[str]:
    yield f"\n## {name}\n"
    if found is None:
        yield f"No report. `make bench NAME={name}` makes one."
        return
    versions = "".join(f", {what} {version}" for what, version in found["versions"].items())
    yield f"`make bench NAME={name}` at commit {found['commit']}, on {found['machine']}{versions}.\n"
    yield COLUMNS
    for row in found["rows"]:
        yield _row(row)


def _row(row: Mapping[str, Any]) -> str:
    cells = (
        f"{row['metric']} [{row['unit']}]",
        _spread(row["ours"], row.get("missing", 0)),
        row["peer"] or "",
        _spread(row["theirs"]) if row["peer"] else "",
        "" if row["ratio"] is None else f"{row['ratio']:g}",
        "" if row["reach"] is None else f"{row['reach']:g}",
        "" if row["met"] is None else ("met" if row["met"] else "missed"),
        row.get("how", ""),
    )
    return f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |"


def _spread(found: Mapping[str, float] | None, missing: int = 0) -> str:
    """missing: further runs, which gave no figure. Reports of earlier versions do not count their runs."""
    if found is None:
        return "none"
    runs = f", n={found['runs']}" + (f" of {found['runs'] + missing}" if missing else "") if "runs" in found else ""
    return f"{found['median']:g} ({found['min']:g} to {found['max']:g}{runs})"
