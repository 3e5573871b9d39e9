"""How busy and how fast the machine is while a benchmark runs: what figures of different hours are compared by."""

from __future__ import annotations

import os
import time
from statistics import median

from bench.common.machine import busy_share, describe
from bench.common.report import rounded

NOISY = 0.05  # share of the machine used by others from which on figures are to be doubted
_LOOP = (
    300_000  # additions: some 20 ms on a fast machine, so that it tells more than the clock's noise and costs nothing
)
_TRIES = 3


class Surroundings:
    """Watches the machine from before a benchmark until its last run. load_1m: the load before it."""

    def __init__(self) -> None:
        self.load_1m = rounded(os.getloadavg()[0])
        self._busy: list[float] = []
        self._loops_ms: list[float] = []

    def await_quiet(self, within_s: float) -> None:
        """Before a run: wait until others leave the machine alone, not longer than this, and see how fast it is."""
        deadline = time.monotonic() + within_s
        while (busy := busy_share(0.5)) > NOISY and time.monotonic() < deadline:
            pass
        self._busy.append(busy)
        self._loops_ms.append(min(_loop_ms() for _ in range(_TRIES)))

    def describe(self) -> str:
        """Name the machine, and say how much of it others used before the runs and how fast it was then."""
        busy, loops = self._busy, self._loops_ms
        if not busy:  # interrupted before the first run
            return describe()
        used = f"{median(busy):.1%} of it" if len(busy) == 1 else f"{median(busy):.1%} of it, at most {max(busy):.1%}"
        spread = "" if len(loops) == 1 else f" ({min(loops):.0f} to {max(loops):.0f})"
        return f"{describe()}; before a run others used {used}; a loop of a million additions took {median(loops):.0f} ms{spread}"

    def warn(self) -> None:
        """Say so when others used too much of the machine."""
        if any(share > NOISY for share in self._busy):
            print("WARNING: the machine was not quiet; measure again before quoting these figures")


def _loop_ms() -> float:
    """Give what a million additions of the interpreter take now, in milliseconds: the machine's speed for one thread."""
    began, total = time.perf_counter(), 0
    for _ in range(_LOOP):
        total += 1
    return (time.perf_counter() - began) * 1000 * 1_000_000 / total
