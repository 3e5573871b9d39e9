"""How the operator shows whether it leads: /readyz and a label on its pod, beside /healthz and /metrics."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from .kube.api import CALL_ERRORS, Api
from .options import Options

log = logging.getLogger(__name__)

LABEL_TIMEOUT_S = 2.0
# `hyp get-operator-logs` finds the operator by this label, which only the leader's pod has.
LEADER_LABEL = "hp-training-control-plane"


@dataclass(slots=True)
class Leadership:
    """Whether this process leads. leading: it holds the lease."""

    leading: bool = False


async def serve_health(port: int, leadership: Leadership) -> web.AppRunner | None:
    """Serve /healthz, /readyz and /metrics; None when the port is 0."""
    if not port:
        return None

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="leading\n" if leadership.leading else "standing by\n")

    application = web.Application()
    application.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner


async def mark_leader(api: Api, options: Options, *, leads: bool) -> None:
    """Set or remove the leader's label on this pod. Failures are only logged: the label helps users to find the right log."""
    if not options.is_pod:
        return
    try:
        async with asyncio.timeout(LABEL_TIMEOUT_S):
            await api.label_pod(options.pod_namespace, options.pod_name, {LEADER_LABEL: "true" if leads else None})
    except CALL_ERRORS as error:
        log.warning("cannot %s label %s: %s", "set" if leads else "remove", LEADER_LABEL, error)
