"""Options of the simulator: which schedules are played. They are there when pytest is given this folder."""

from __future__ import annotations

import os

import pytest
from tests.sim.operator_errors import collect_operator_errors

DEFAULT_SCHEDULES = 400


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("elastipod")
    group.addoption(
        "--sim-seed", type=int, default=None, help="play only the schedule of this seed, and tell its story"
    )
    group.addoption(
        "--sim-count", type=int, default=None, help="how many schedules are played (default: $SIM_COUNT or 400)"
    )


@pytest.fixture(scope="session", autouse=True)
def _errors_are_seen() -> None:
    """What the operator logs as an error ends a schedule."""
    collect_operator_errors()


@pytest.fixture(scope="session")
def seeds(request: pytest.FixtureRequest) -> range:
    """The seeds of the schedules to be played."""
    only: int | None = request.config.getoption("--sim-seed", None)
    if only is not None:
        return range(only, only + 1)
    count: int | None = request.config.getoption("--sim-count", None)
    return range(count if count is not None else int(os.environ.get("SIM_COUNT", DEFAULT_SCHEDULES)))
