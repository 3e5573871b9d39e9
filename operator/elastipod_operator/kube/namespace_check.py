"""Tells which of the watched namespaces the operator may not read: they do not exist (any more), or it has no Role there.

Their watches go on trying (`kopf_handlers.EndlessBackoffs`), so this only tells what nobody would find in the log of each attempt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ..core.names import GROUP, PLURAL, VERSION
from .api import CALL_ERRORS, ApiError
from .api_ports import RawCalls

log = logging.getLogger(__name__)

CHECK_EVERY_S = 180.0
REFUSALS = (403, 404)


class NamespaceCheck:
    """Reads one job in each of the namespaces, if there are any: an operator of all namespaces has nothing to check."""

    def __init__(self, api: RawCalls, namespaces: Sequence[str]) -> None:
        self._api, self._namespaces = api, namespaces
        self._refused: dict[str, ApiError] = {}

    async def first(self) -> None:
        """Check all namespaces. Raises ApiError if none of them may be read."""
        await self._check()
        if self._namespaces and len(self._refused) == len(self._namespaces):
            raise next(iter(self._refused.values()))

    async def run(self) -> None:
        """Check again every few minutes, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            await self._check()

    async def _check(self) -> None:
        await asyncio.gather(*map(self._check_one, self._namespaces))

    async def _check_one(self, namespace: str) -> None:
        path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}"
        try:
            await self._api.call("GET", path, query=[("limit", "1")])
        except CALL_ERRORS as error:
            if isinstance(error, ApiError) and error.status in REFUSALS:
                self._note_refusal(namespace, error)
            return
        if self._refused.pop(namespace, None) is not None:
            log.info("the jobs of namespace %s can be read again", namespace)

    def _note_refusal(self, namespace: str, error: ApiError) -> None:
        if namespace not in self._refused:
            log.warning(
                "the jobs of namespace %s cannot be read, those of other namespaces are run as before; create the namespace and "
                "upgrade the release, or remove it from watchNamespaces: %s", namespace, error,
            )  # fmt: skip
        self._refused[namespace] = error
