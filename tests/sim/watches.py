"""The watches of the model of the API server: they lag, lose events, and repeat them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.sim.kernel import Kernel
from tests.sim.objects import Body

if TYPE_CHECKING:
    pass


KEPT_EVENTS = 25

Watcher = Callable[[str, str, Body], None]


class Watch:
    """What one client was told and is to be told, in order for each kind of object."""

    def __init__(self, kernel: Kernel, watcher: Watcher) -> None:
        self._kernel = kernel
        self._watcher = watcher
        self._delivered_at: dict[str, float] = {}
        self._kept: deque[tuple[str, str, Body]] = deque(maxlen=KEPT_EVENTS)
        self.is_open = True

    def tell(self, kind: str, change: str, body: Body, lag_s: float) -> None:
        """Deliver an event after a while, behind those that are on their way."""
        self._kept.append((kind, change, body))
        at = max(self._delivered_at.get(kind, 0.0), self._kernel.now + lag_s)
        self._delivered_at[kind] = at
        self._kernel.at(at, lambda: self._deliver(kind, change, body))

    def repeat(self) -> int:
        """A stream that begins anew a little earlier tells the last events once more; gives how many."""
        for event in (kept := list(self._kept)):
            self.tell(*event, lag_s=0.01)
        return len(kept)

    def _deliver(self, kind: str, change: str, body: Body) -> None:
        if self.is_open:
            self._watcher(kind, change, body)
