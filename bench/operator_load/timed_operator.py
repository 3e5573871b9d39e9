"""The operator as it is shipped, which also notes each time that its histograms take: their buckets are too coarse for a percentile.

python -m bench.operator_load.timed_operator TIMES operator [its options]. One line in the file TIMES for each: when it was
over (monotonic), what it was, its kind where it has one, and how many seconds it took.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import Histogram

from elastipod import cli

PREFIX, SUFFIX = "elastipod_", "_seconds"


def note_times(file: int) -> None:
    """Have everything that is observed by any histogram of this process written to an open file as well."""
    observe = Histogram.observe

    def noting(self: Histogram, amount: float, exemplar: dict[str, str] | None = None) -> None:
        observe(self, amount, exemplar)
        what = self._name.removeprefix(PREFIX).removesuffix(SUFFIX)
        os.write(file, f"{time.monotonic()!r} {' '.join((what, *self._labelvalues))} {amount!r}\n".encode())

    Histogram.observe = noting  # type: ignore[method-assign]


def read_times(path: Path, since: float, until: float) -> dict[str, list[float]]:
    """Give the times noted between two moments, by what they are of: writes by their kind too, as "what kind"."""
    found: dict[str, list[float]] = {}
    for at, names, seconds in _lines(path):
        if since <= at < until:
            for name in {names[0], " ".join(names)}:
                found.setdefault(name, []).append(seconds)
    return found


def _lines(path: Path) -> Iterator[tuple[float, list[str], float]]:
    """Read whole lines: the last one may be on its way."""
    text = path.read_text(encoding="utf-8")
    for line in text[: text.rfind("\n") + 1].splitlines():
        at, *names, seconds = line.split(" ")
        yield float(at), names, float(seconds)


def main() -> int:
    path, *arguments = sys.argv[1:]
    note_times(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
