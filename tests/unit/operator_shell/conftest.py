"""What the tests of the shell share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta

import pytest
from tests.unit.operator_shell.api_server import ApiServer, serving
from tests.unit.operator_shell.shells import Decisions, Shell, open_shell

from elastipod_operator import clock, reconcile_pass
from elastipod_operator.core.actions import Plan
from elastipod_operator.core.plan import plan
from elastipod_operator.core.snapshot import Snapshot
from elastipod_operator.kube.api import Api


@pytest.fixture
def server() -> ApiServer:
    """An API server that knows nothing yet."""
    return ApiServer()


@pytest.fixture
async def api(server: ApiServer) -> AsyncIterator[Api]:
    """The operator's calls to it."""
    async with serving(server) as api:
        yield api


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that goes only when it is told to."""
    now = [datetime(2026, 3, 1, 12, 10, tzinfo=UTC)]
    monkeypatch.setattr(clock, "now", lambda: now[0])
    monkeypatch.setattr(clock, "steady", lambda: now[0].timestamp())

    def pass_by(seconds: float) -> None:
        now[0] += timedelta(seconds=seconds)

    return pass_by


@pytest.fixture
async def shell(api: Api, server: ApiServer) -> AsyncIterator[Shell]:
    """A shell that knows no job."""
    async with open_shell(api, server) as shell:
        yield shell


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> Decisions:
    """The real decisions, noted."""
    seen = Decisions()

    def noting(observed: Snapshot) -> Plan:
        seen.append(observed)
        if len(seen) <= seen.fail:
            raise RuntimeError("not this time")
        return plan(observed)

    monkeypatch.setattr(reconcile_pass, "plan", noting)
    return seen
