"""What unit tests of several parts share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from tests.unit.torch_processes import TorchProcesses


@pytest.fixture
def without_nohup() -> Iterator[None]:
    """Let SIGHUP act as in a terminal, also where the tests themselves run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def torch_processes() -> Iterator[TorchProcesses]:
    """Processes in which torch is loaded already."""
    processes = TorchProcesses()
    yield processes
    processes.close()
