"""Keeps the authority of the webhook's certificates in its configuration, from which the API server knows it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from ..kube.api import CALL_ERRORS
from ..kube.api_ports import RawCalls
from ..kube.reading import mapping, mappings, text
from .certificates import SelfMade
from .webhook import CHECK_AGAIN_S, wall_clock

log = logging.getLogger(__name__)

CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
STANDBY_CHECK_S = 1.0
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"


async def keep_bundle(
    api: RawCalls,
    name: str,
    certificates: SelfMade,
    leads: Callable[[], bool],
    clock: Callable[[], datetime] = wall_clock,
) -> None:
    """While this replica leads, write the authority whenever the configuration has none that will do. Runs until cancelled."""
    problem = ""
    while True:
        if not leads():
            await asyncio.sleep(STANDBY_CHECK_S)
            continue
        try:
            await refresh_bundle(api, name, certificates, clock())
            problem = ""
        except CALL_ERRORS as error:
            found = f"{type(error).__name__} {error}"
            if found != problem:
                log.warning("the authority of the admission webhook cannot be written to %s: %s", name, found)
            problem = found
        await asyncio.sleep(CHECK_AGAIN_S)


async def refresh_bundle(api: RawCalls, name: str, certificates: SelfMade, now: datetime) -> bool:
    """Write the authority if the configuration has none that will do; gives whether it wrote."""
    path = f"{CONFIGURATIONS}/{name}"
    webhooks = mappings((await api.call("GET", path)).get("webhooks"))
    if all(certificates.is_current(_bundle_of(one), now) for one in webhooks):
        return False
    bundle = base64.b64encode(certificates.bundle(now)).decode()
    patch = {"webhooks": [{"name": one["name"], "clientConfig": {"caBundle": bundle}} for one in webhooks]}
    await api.call("PATCH", path, patch, content_type=STRATEGIC_MERGE_PATCH)
    log.info("the authority of the admission webhook was written to %s", name)
    return True


def _bundle_of(webhook: Mapping[str, Any]) -> bytes:
    try:
        return base64.b64decode(text(mapping(webhook.get("clientConfig")).get("caBundle")))
    except binascii.Error:
        return b""
