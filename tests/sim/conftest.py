"""Options of the simulator: which schedules are played."""

from __future__ import annotations

import os

import pytest

DEFAULT_SCHEDULES = 400


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("elastipod")
    group.addoption(
        "--sim-seed", type=int, default=None, help="play only the schedule of this seed, and tell its story"
    )
    group.addoption(
        "--sim-count",
        type=int,
        default=int(os.environ.get("SIM_COUNT", DEFAULT_SCHEDULES)),
        help="how many schedules the simulator plays (default: $SIM_COUNT or %(default)s)",
    )


@pytest.fixture(scope="session")
def seeds(request: pytest.FixtureRequest) -> range:
    """The seeds of the schedules to be played."""
    only: int | None = request.config.getoption("--sim-seed")
    return range(only, only + 1) if only is not None else range(request.config.getoption("--sim-count"))
