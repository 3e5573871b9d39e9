"""An operator with a planted mistake: it gives quota back without waiting for pods to be gone. Run as a script."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from elastipod_operator import app
from elastipod_operator.core import quota_requests
from elastipod_operator.core.snapshot import ObservedWorkload
from elastipod_operator.queueing import quota_release


def no_pods(*_: Any, **__: Any) -> list[Any]:
    """Say that no pod lives on a Workload's quota."""
    return []


def none_of_them(_: Any, workloads: Iterable[ObservedWorkload], *__: Any) -> dict[str, list[Any]]:
    """Say the same of several Workloads."""
    return {workload.name: [] for workload in workloads}


if __name__ == "__main__":
    # Both of those who look, the decision and the call; each would do alone.
    vars(quota_requests)["pods_by_workload"] = none_of_them
    quota_release.pods_on = no_pods
    sys.exit(app.main([]))
