"""The watch of all Workloads of jobs.

It does not use kopf, because Kueue may be installed and removed at any time. kopf discovers resources once; to see later ones
it would have to watch CustomResourceDefinitions, which needs cluster-wide permissions. Its watches also end the operator when
the API server refuses one: with 404 after Kueue was removed, with 500 while Kueue, which converts its objects, is down. This
watch retries. It also lists every few minutes, so that no job waits for an event that a broken watch missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from ..core.backoff import doubled
from .api import CALL_ERRORS, ApiError
from .queue_api import QueueApi
from .store import Store

log = logging.getLogger(__name__)

LIST_AGAIN_S = 300
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 15.0
# After this many consecutive 404 responses to a list, the API server has no Workloads (any more).
GONE_AFTER = 2


class WorkloadWatch:
    """Keeps a store up to date. wake: requests a pass for a job. is_back: called when Kueue's objects can be read again.

    wanted: set once there is a job with a queue. Before that no call is made, because most clusters have no Kueue.
    """

    def __init__(
        self,
        api: QueueApi,
        store: Store,
        wake: Callable[[str], None],
        is_back: Callable[[], None],
        needed: asyncio.Event,
    ) -> None:
        self._api = api
        self._store = store
        self._wake = wake
        self._is_back = is_back
        self._needed = needed

    async def run(self, namespaces: Sequence[str]) -> None:
        """Watch these namespaces, or all when there are none, until cancelled."""
        await self._needed.wait()
        async with asyncio.TaskGroup() as group:
            for namespace in namespaces or ("",):
                group.create_task(self._follow(namespace), name=f"workloads of {namespace or 'all namespaces'}")

    async def _follow(self, namespace: str) -> None:
        failures = missing = 0
        while True:
            try:
                bodies, version = await self._api.list_workloads(namespace)
                if failures:
                    log.info("Workloads can be read again")
                    self._is_back()
                failures = missing = 0
                self._wake_all(self._store.replace_all_workloads(namespace, bodies, version))
                await self._stream(namespace, version)
            except CALL_ERRORS as error:
                is_missing = isinstance(error, ApiError) and error.status == 404
                missing = missing + 1 if is_missing else 0
                if not failures:
                    _tell(error, is_missing=is_missing)
                failures += 1
            except Exception:
                # The outer edge of this task: no response may end the operator.
                log.exception("the watch of Workloads failed")
                failures += 1
            if missing == GONE_AFTER:
                self._wake_all(self._store.clear_workloads(namespace))
            pause = doubled(timedelta(seconds=FIRST_PAUSE_S), timedelta(seconds=LAST_PAUSE_S), failures + 1)
            await asyncio.sleep(pause.total_seconds())

    async def _stream(self, namespace: str, version: int) -> None:
        async for event in self._api.watch_workloads(namespace, version, LIST_AGAIN_S):
            kind, body = event.get("type"), event.get("object") or {}
            if kind == "ERROR":  # usually a version that is too old: the next list solves that
                return
            if kind != "BOOKMARK":
                self._take(kind == "DELETED", body)

    def _take(self, is_gone: bool, body: Mapping[str, Any]) -> None:
        uid = self._store.drop_workload(body) if is_gone else self._store.put_workload(body)
        if uid is not None:
            self._wake(uid)

    def _wake_all(self, uids: Sequence[str]) -> None:
        for uid in uids:
            self._wake(uid)


def _tell(error: Exception, *, is_missing: bool) -> None:
    if is_missing:
        log.info("the API server has no Workloads of Kueue; jobs without a queue do not need them")
    else:
        log.warning("Workloads cannot be read now: %s %s", type(error).__name__, error)
