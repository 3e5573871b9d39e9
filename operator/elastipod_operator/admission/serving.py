"""Runs the webhook beside the operator, which can do without it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ..kube.api import Api
from ..kube.job_keys import read_install_keys
from ..kube.queue_api import QueueApi
from ..options import Options

log = logging.getLogger(__name__)


@asynccontextmanager
async def webhook_beside(options: Options, api: Api, leads: Callable[[], bool]) -> AsyncIterator[None]:
    """Serve the webhook, if there is to be one, until the block ends. leads: whether this replica leads now."""
    running = [asyncio.create_task(task) for task in _tasks(options, api, leads)]
    for task in running:
        task.add_done_callback(_log_end)
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _tasks(options: Options, api: Api, leads: Callable[[], bool]) -> list[Coroutine[Any, Any, None]]:
    if not options.webhook_port:
        return []
    # Imported only here: cryptography takes 11 MB of memory.
    from .authority_bundle import keep_bundle
    from .certificates import Files, SelfMade
    from .webhook import Webhook

    queues, scope = QueueApi(api), options.scope
    if options.webhook_certificates:
        return [Webhook(options.webhook_port, Files(Path(options.webhook_certificates)), queues, api, scope).run()]
    own = SelfMade(read_install_keys(options.install_key_file), options.webhook_name)
    serves = Webhook(options.webhook_port, own, queues, api, scope).run()
    configuration = options.webhook_configuration
    return [serves, keep_bundle(api, configuration, own, leads)] if configuration else [serves]


def _log_end(ended: asyncio.Task[None]) -> None:
    if not ended.cancelled() and (error := ended.exception()) is not None:
        log.error("the admission webhook ended; jobs are accepted without its warnings", exc_info=error)
