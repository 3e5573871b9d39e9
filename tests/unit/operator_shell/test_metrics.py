"""An operator that stands by says nothing about jobs: it looks after none."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.patience import PATIENCE_S

from elastipod_operator.core.depth_reasons import DepthReason
from elastipod_operator.metrics import EVICTION_CAUSES, FAILED_PARTS

# In a process of its own: the metrics are one set for a process.
EXPORTS = """
from prometheus_client import generate_latest
from elastipod_operator import app, metrics
def exported():
    return sorted(line.split()[0].split("{")[0] for line in generate_latest().decode().splitlines() if not line.startswith("#"))
before = exported()
from elastipod_operator.job_metrics import JobMetrics
JobMetrics(), JobMetrics()
after = exported()
lines = generate_latest().decode().splitlines()
for name in ("operator_errors", "changes", "quota_evictions"):
    print(sum(line.startswith(f"elastipod_{name}_total{{") and line.endswith("} 0.0") for line in lines))
print("elastipod_goodput_ratio" in before, "elastipod_goodput_ratio" in after, "elastipod_jobs" in before, "elastipod_jobs" in after)
print("elastipod_quota_evictions_overdue" in before, "elastipod_quota_evictions_overdue" in after)
"""


@pytest.fixture(scope="module")
def said() -> list[list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", EXPORTS], check=True, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S
    )
    return [line.split() for line in done.stdout.splitlines()]


def test_only_who_looks_after_jobs_exports_what_it_knows_of_them(said: list[list[str]]) -> None:
    assert said[3:] == [["False", "True", "False", "True"], ["False", "True"]]


def test_the_first_of_what_panels_and_alerts_count_is_an_increase_to_prometheus(said: list[list[str]]) -> None:
    kinds, shares = ("resize", "recovery"), ("base", "increment")
    explained = sum(len(reason.depths) for reason in DepthReason)
    assert explained < 20, "each is two time series of every operator"
    evictions = len(shares) * len([*EVICTION_CAUSES, "Other"])
    assert said[:3] == [[str(len(FAILED_PARTS))], [str(len(kinds) * explained)], [str(evictions)]]
