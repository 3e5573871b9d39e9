"""The shell of the tests around quota."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.unit.kube.queue_bodies import flavor_body
from tests.unit.operator_shell.api_server import serving
from tests.unit.operator_shell.queue_server import QueueServer
from tests.unit.operator_shell.queueing.queue_shell import (
    QueueShell,
)


@pytest.fixture
async def shell() -> AsyncIterator[QueueShell]:
    """The calls, beside an API server whose only flavor is gpus."""
    server = QueueServer()
    server.objects["resourceflavors/gpus"] = flavor_body("gpus", {"type": "p5"})
    async with serving(server) as api:
        yield QueueShell(api, server)
