"""Logs calls as --server-log-level says: refused calls at info, all calls at debug, at a limited rate.

Text that a client sent is cut and made printable. Headers, queries and bodies are not logged.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus

from elastipod_agent.log import EventLog
from elastipod_agent.metrics import Metrics
from elastipod_agent.server.http import Request
from elastipod_agent.server.http_messages import Response

BURST = 10  # refusals that are logged per PERIOD_S; the others are only counted
PERIOD_S = 60.0
_MAX_TEXT = 200


class CallLog:
    """Logs and counts calls. clock: monotonic seconds."""

    def __init__(
        self, log: EventLog, level: str, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._metrics = metrics
        self._clock = clock
        self._has_refusals = level not in ("warning", "error", "critical")
        self._has_all = level in ("debug", "trace")
        self._period_began = float("-inf")
        self._shown = 0
        self._hidden = 0

    def answered(self, request: Request, response: Response) -> None:
        """Record a call that was answered."""
        self._metrics.count("calls_total", code=str(int(response.status)))
        is_refusal = response.status >= HTTPStatus.BAD_REQUEST and response.status != HTTPStatus.CONFLICT
        if not self._has_all and not (self._has_refusals and is_refusal and self._may_show()):
            return
        detail = response.body.get("detail") if isinstance(response.body, dict) else None
        self._log.info(
            "call",
            method=_plain(request.method),
            path=_plain(request.path),
            status=int(response.status),
            detail=None if detail is None else _plain(str(detail)),
        )

    def refused(self, status: int, why: str) -> None:
        """Record a call that was refused before it was handled."""
        self._metrics.count("refused_calls_total", code=str(int(status)))
        if self._has_all or (self._has_refusals and self._may_show()):
            self._log.info("call refused", status=int(status), why=_plain(why))

    def _may_show(self) -> bool:
        now = self._clock()
        if now - self._period_began >= PERIOD_S:
            if self._hidden:
                self._log.info("more calls were refused than are shown", hidden=self._hidden)
            self._period_began, self._shown, self._hidden = now, 0, 0
        if self._shown < BURST:
            self._shown += 1
            return True
        self._hidden += 1
        return False


def _plain(text: str) -> str:
    """Make a client's text safe for the terminal that shows the log."""
    return "".join(c if c.isprintable() else "?" for c in text[:_MAX_TEXT])
