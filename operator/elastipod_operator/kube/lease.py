"""The leader lease: one operator acts at a time.

It uses the raw API: the client's own election fails on its first create (it passes `pretty=True`, which its generated call
rejects) and writes times without a zone. A lease expires when it has not changed for some time on this machine's clock, so
clocks of other machines do not matter.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from .. import clock
from .api import CALL_ERRORS, Api, ApiError
from .preflight import Refusal
from .scope import Scope, scope_of

log = logging.getLogger(__name__)

LEASE_S, RENEW_DEADLINE_S, RETRY_S = 15.0, 10.0, 2.0


@dataclass(slots=True)
class Lease:
    """A lease in the operator's namespace. Its holder is the pod's name, so a restarted container takes it back at once.

    scope: which jobs the release runs; the lease tells others. leads: nobody else runs them, so this process does.
    """

    api: Api
    namespace: str
    name: str
    holder: str
    scope: Scope
    leads: bool = False
    _seen: str = ""
    _seen_at: float = 0.0
    _last_error: str = ""
    _is_foreign: bool = False
    _held_since: float = 0.0

    async def acquire(self) -> None:
        """Wait until this process holds the lease. Raises Refusal if another release in this namespace holds it."""
        while not await self._try("acquire"):  # noqa: ASYNC110  # the lease is elsewhere: nobody here can set an event
            await asyncio.sleep(RETRY_S)
        log.info("lease acquired", extra={"lease": f"{self.namespace}/{self.name}", "holder": self.holder})

    async def hold(self) -> None:
        """Renew until that fails for RENEW_DEADLINE_S or another process holds the lease; then the caller must end at once.

        The time counts from the last request that took or renewed it, however long its answer and the caller needed since.
        """
        try:
            async with asyncio.timeout_at(self._held_since + RENEW_DEADLINE_S) as limit:
                while True:
                    if await self._try("renew"):
                        limit.reschedule(self._held_since + RENEW_DEADLINE_S)
                    elif self._is_foreign:
                        return
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            return

    async def release(self) -> None:
        """Release the lease, so that a successor need not wait for its expiry."""
        try:
            async with asyncio.timeout(RETRY_S):
                lease = await self.api.read_lease(self.namespace, self.name)
                if lease["spec"].get("holderIdentity") == self.holder:
                    lease["spec"]["holderIdentity"] = ""
                    await self.api.replace_lease(self.namespace, self.name, lease)
        except CALL_ERRORS as error:
            log.warning("cannot release the lease: %s %s", type(error).__name__, error)

    async def _try(self, what: str) -> bool:
        self._is_foreign = False
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(RENEW_DEADLINE_S / 2):
                held = await self._take()
        except CALL_ERRORS as error:
            problem = f"cannot {what} the lease: {type(error).__name__} {error}"
            if problem != self._last_error:
                log.warning(problem)
            self._last_error = problem
            return False
        self._last_error = ""
        if held:
            self._held_since = began
        return held

    async def _take(self) -> bool:
        try:
            lease = await self.api.read_lease(self.namespace, self.name)
        except ApiError as error:
            if error.status != 404:
                raise
            await self.api.create_lease(self.namespace, self._body(None))
            return True
        self._is_foreign = not self._is_free(lease)
        if self._is_foreign:
            self._check_release(lease)
            return False
        await self.api.replace_lease(self.namespace, self.name, self._body(lease))
        return True

    def _check_release(self, lease: dict[str, Any]) -> None:
        """Raise Refusal unless the lease is held for this release. Operators without a name of their release are of any."""
        other = scope_of(lease)[0].release
        if self.scope.release and other not in ("", self.scope.release):
            raise Refusal(
                f"release {other} has its operator in namespace {self.namespace} already. Uninstall one of the two, or install "
                f"release {self.scope.release} in a namespace of its own, for other jobs"
            )

    def _is_free(self, lease: dict[str, Any]) -> bool:
        holder = (lease.get("spec") or {}).get("holderIdentity")
        if not holder or holder == self.holder:
            return True
        version = str(lease["metadata"]["resourceVersion"])
        if version != self._seen:
            self._seen, self._seen_at = version, clock.steady()
        return clock.steady() - self._seen_at > LEASE_S

    def _body(self, lease: dict[str, Any] | None) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        spec = dict((lease or {}).get("spec") or {})
        if spec.get("holderIdentity") != self.holder:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + (1 if lease else 0)
        spec.update(holderIdentity=self.holder, leaseDurationSeconds=int(LEASE_S), renewTime=now)
        metadata: dict[str, Any] = {"name": self.name, "namespace": self.namespace}
        metadata["annotations"] = self.scope.annotations(leads=self.leads)
        if lease is not None:
            metadata["resourceVersion"] = lease["metadata"]["resourceVersion"]
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
