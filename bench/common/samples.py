"""What was measured, run by run: the figures, and the runs that failed with the reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.common.report import Spread


@dataclass(slots=True)
class Samples:
    """Measurements by side (who is measured) and metric, in the order in which they were taken.

    repeat: measurements of each that are asked for; 0: not known.
    """

    repeat: int = 0
    values: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    failures: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def add(self, side: str, metric: str, value: float) -> None:
        self.values.setdefault((side, metric), []).append(value)

    def fail(self, side: str, metric: str, why: str) -> None:
        """Note a run in which a metric could not be measured, and the reason."""
        self.failures.setdefault((side, metric), []).append(why)

    def missing(self, side: str, metric: str) -> int:
        """Give how many of the measurements that were asked for there are not, whatever failed before them."""
        return max(0, self.repeat - len(self.values.get((side, metric), ())))

    def spread(self, side: str, metric: str) -> Spread | None:
        """Give the spread of what was measured; None when it never was."""
        values = self.values.get((side, metric))
        return Spread.of(values) if values else None

    def as_json(self) -> dict[str, Any]:
        """Give everything, for a file beside the report."""
        return {
            "runs": [{"side": s, "metric": m, "values": values} for (s, m), values in self.values.items()],
            "failures": [{"side": s, "metric": m, "reasons": whys} for (s, m), whys in self.failures.items()],
        }


def quantile(values: Sequence[float], share: float) -> float:
    """Give the smallest of some values that at least this share of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
