"""Options of the simulator: which schedules run. They are there when pytest is given this folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.sim.operator_errors import collect_operator_errors
from tests.sim.readings import read_each_spec_once
from tests.slow import all_but_first

DEFAULT_SCHEDULES = 280
SEEDS_OF_A_TEST = 40


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("elastipod")
    group.addoption(
        "--sim-seed", type=int, default=None, help="run only the schedule of this seed, and print it step by step"
    )
    group.addoption("--sim-count", type=int, default=None, help="how many schedules run (default: $SIM_COUNT or 280)")


@pytest.fixture(scope="session", autouse=True)
def _errors_are_seen() -> None:
    """What the operator logs as an error ends a schedule."""
    collect_operator_errors()


@pytest.fixture(autouse=True)
def _specs_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read_each_spec_once(monkeypatch.setattr)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Share the schedules out to tests of `SEEDS_OF_A_TEST` each, which several processes run at the same time."""
    if "seeds" in metafunc.fixturenames:
        seeds = all_seeds(metafunc.config)
        parts = [seeds[begin : begin + SEEDS_OF_A_TEST] for begin in range(0, len(seeds), SEEDS_OF_A_TEST)]
        ids = [f"seeds {part[0]} to {part[-1]}" for part in parts]
        metafunc.parametrize("seeds", all_but_first(parts), ids=ids)


def all_seeds(config: pytest.Config) -> range:
    """Give the seeds of the schedules to run."""
    only: int | None = config.getoption("--sim-seed", None)
    if only is not None:
        return range(only, only + 1)
    count: int | None = config.getoption("--sim-count", None)
    return range(count if count is not None else int(os.environ.get("SIM_COUNT", DEFAULT_SCHEDULES)))


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "schedules"
    folder.mkdir(exist_ok=True)
    return folder
