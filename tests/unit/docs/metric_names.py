"""The metrics that the operator exports, by the names and labels that Prometheus stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastipod_operator import metrics

HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")


@dataclass(frozen=True, slots=True)
class MetricName:
    """A metric. labels: without `le`, which the buckets of a histogram have."""

    name: str
    kind: str
    labels: frozenset[str]

    @property
    def series(self) -> dict[str, frozenset[str]]:
        """The names that a query uses, with their labels."""
        if self.kind != "histogram":
            return {self.name: self.labels}
        return {self.name + part: self.labels | ({"le"} if part == "_bucket" else set()) for part in HISTOGRAM_PARTS}


def operator_metrics() -> list[MetricName]:
    """Give all metrics of the operator."""
    found: list[Any] = [value for value in vars(metrics).values() if _is_metric(value)]
    names = [
        MetricName(_stored(value._name, value._type), value._type, frozenset(value._labelnames)) for value in found
    ]
    each_job: list[Any] = list(metrics.EACH_JOB.collect())
    return names + [MetricName(_stored(f.name, f.type), f.type, frozenset(f._labelnames)) for f in each_job]


def _is_metric(value: Any) -> bool:
    return hasattr(value, "_labelnames") and str(getattr(value, "_name", "")).startswith("elastipod_")


def _stored(name: str, kind: str) -> str:
    return f"{name}_total" if kind == "counter" else name
