"""What the tests of the shell share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.unit.operator_shell.api_server import ApiServer, serving

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
