"""Everybody's way to the objects of Kueue: watches that lag and end, and the calls of an operator, which may hang."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from tests.sim.kernel import Script, Signal
from tests.sim.process import Wait

from elastipod_operator.kube.api import ApiError

if TYPE_CHECKING:
    from tests.sim.kueue_server import Tenant


Body = dict[str, Any]
Call = Callable[..., Script]

AWAY = (
    "conversion webhook for kueue.x-k8s.io/v1beta1, TransitionKind=Workload failed: Post "
    '"https://kueue-webhook-service.kueue-system.svc:443/convert": connection refused'
)


class Stream:
    """A watch of Workloads."""

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant
        self._events: deque[Body] = deque()
        self._signal = Signal()
        self._delivered_at = 0.0
        self.is_open = True

    def tell(self, event: Body) -> None:
        """Deliver an event after a while."""
        cluster, kernel = self._tenant.cluster, self._tenant.server.kernel
        assert cluster is not None
        if cluster.goes_on("broken_watch"):
            return
        self._delivered_at = max(self._delivered_at, kernel.now + cluster.lag_s())
        kernel.at(self._delivered_at, lambda: self._deliver(event))

    def _deliver(self, event: Body) -> None:
        if self.is_open:
            self._events.append(event)
            self._signal.fire()

    def end(self) -> None:
        """The API server ends it."""
        self.is_open = False
        self._signal.fire()

    def next(self, until: float) -> Script:
        """Wait for the next event; None when it ended, or the time is over."""
        kernel = self._tenant.server.kernel
        kernel.at(until, self._signal.fire)
        while self.is_open and not self._events and kernel.now < until:
            yield self._signal
        return self._events.popleft() if self._events and self.is_open else None


class KueueApi:
    """What the operator's QueueApi speaks to. call: makes a call of one operator, which may fail or be its last one."""

    def __init__(self, tenant: Tenant, call: Call) -> None:
        self._tenant = tenant
        self._call = call
        self._streams: list[Stream] = []

    def close(self) -> None:
        """End all watches of this operator."""
        for stream in self._streams:
            self._tenant.close(stream)

    async def call(self, method: str, path: str, body: Any = None, **_: Any) -> Body:
        """Make one call; it hangs, or fails at once, while Kueue is away. Lists may hang alone."""
        return await Wait(self._make(method, path, json.loads(body) if isinstance(body, str) else body))  # type: ignore[no-any-return]

    def _make(self, method: str, path: str, body: Any) -> Script:
        server = self._tenant.server
        is_list = method == "GET" and path.endswith("/workloads")

        def hangs() -> bool:
            is_unanswered = is_list and server.kernel.now < server.lists_hang_until
            return is_unanswered or (server.is_away and server.hangs and "/kueue.x-k8s.io/" in path)

        if hangs():
            yield 10.0
            if hangs():
                raise TimeoutError
        effect = lambda: self._tenant.serve(method, path, body)  # noqa: E731
        return (yield from self._call(effect, writes=method != "GET"))

    async def watch(self, path: str, query: list[tuple[str, str]], limit_s: float) -> AsyncIterator[Body]:
        """Give the events of the Workloads for so long."""
        kernel = self._tenant.server.kernel
        if self._tenant.server.is_away:
            raise ApiError(500, AWAY)
        stream, until = self._tenant.open(), kernel.now + float(dict(query)["timeoutSeconds"])
        self._streams.append(stream)
        try:
            while (event := await Wait(stream.next(until), is_watch=True)) is not None:
                yield event
        finally:
            self._streams.remove(stream)
            self._tenant.close(stream)
