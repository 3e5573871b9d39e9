"""The watch of all Workloads of jobs.

It is the operator's own and not kopf's, for Kueue comes and goes. kopf looks once which resources there are, and would have
to scan the cluster's CustomResourceDefinitions to see more of them later, which only a cluster-wide operator may do; and its
watches end the operator when the API server refuses one: with 404 once Kueue was removed, with 500 while Kueue, which
converts its objects, is away. This one tries again. It lists every few minutes anyway, since a job must never wait on what a
broken watch has missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .api import CALL_ERRORS, ApiError
from .queue_api import QueueApi
from .store import Store

log = logging.getLogger(__name__)

LIST_AGAIN_S = 300
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 15.0
# A list that is refused with 404 so many times in a row says that the API server knows no Workloads (any more).
GONE_AFTER = 2


class WorkloadWatch:
    """Keeps a store up to date. wake: have a job looked at soon. is_back: Kueue's objects can be read again.

    wanted: set once there is a job with a queue. Without one nothing is asked: most clusters have no Kueue to ask.
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
                # The outer edge of this task: whatever came over the wire must not end the operator.
                log.exception("the watch of Workloads failed")
                failures += 1
            if missing == GONE_AFTER:
                self._wake_all(self._store.clear_workloads(namespace))
            await asyncio.sleep(min(LAST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures, 10)))

    async def _stream(self, namespace: str, version: int) -> None:
        async for event in self._api.watch_workloads(namespace, version, LIST_AGAIN_S):
            kind, body = event.get("type"), event.get("object") or {}
            if kind == "ERROR":  # mostly a version that is too old by now: the next list mends it
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
        log.info("the API server knows no Workloads of Kueue; jobs without a queue do not need them")
    else:
        log.warning("Workloads cannot be read for now: %s %s", type(error).__name__, error)
