"""The control API of one agent, of whatever make, as the operator of the benchmark calls it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from bench.common.processes import Failed

CALL_TIMEOUT_S = 10.0
LONG_POLL_S = 5.0
POLL_S = 0.05  # where the agent knows no long polling


class Client:
    """Calls one agent on the loopback interface; `speaks_ours` and `features` are known after the first answer to /status."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.speaks_ours = False
        self.features: frozenset[str] = frozenset()

    def status(self) -> dict[str, Any]:
        """GET /status. Raises OSError while nobody listens."""
        body = self._call("GET", "/status", None, CALL_TIMEOUT_S)
        self.speaks_ours = "version" in body
        self.features = frozenset(body.get("features") or ())
        return body

    def start(self, generation: int, rank: int, nnodes: int, meets_at: Mapping[str, Any]) -> None:
        """POST /start; with the generation only where the agent knows it. Raises OSError and Failed."""
        body = {
            **{"rank": rank, "nnodes": nnodes, "faultCount": generation - 1},
            **meets_at,
            **{"log_monitoring_configuration": None, "ipVersion": None, "rankIps": None, "worker_data": None},
            "progress": {},
        }
        self._call("POST", "/start", body | self._fence(generation), CALL_TIMEOUT_S)

    def prepare(self, generation: int, nnodes: int, meets_at: Mapping[str, Any], within_s: float) -> None:
        """POST /prepare, and wait until the workers are at the barrier. Raises OSError and Failed.

        meets_at: where those meet who train, whom the workers follow; empty where all get new processes.
        """
        self._call("POST", "/prepare", {"nnodes": nnodes, "generation": generation, **meets_at}, CALL_TIMEOUT_S)
        deadline = time.monotonic() + within_s
        while (seen := self.status())["preparation"] != "ready":
            if time.monotonic() >= deadline or seen["preparation"] == "failed":
                raise Failed(f"agent on port {self.port} has no prepared workers: {seen['preparation']}")
            time.sleep(POLL_S)

    def stop(
        self, generation: int, graceful_s: int | None, restart_mode: str = "", *, leaves: bool | None = None
    ) -> None:
        """POST /stop: a drain of so many seconds, or at once with None. Raises OSError and Failed."""
        how: dict[str, Any] = (
            {"is_graceful": False} if graceful_s is None else {"is_graceful": True, "timeout": graceful_s}
        )
        if restart_mode:
            how["restart_mode"] = restart_mode
        if leaves is not None:
            how["leaves"] = leaves
        self._call("POST", "/stop", how | self._fence(generation), CALL_TIMEOUT_S)

    def until(
        self,
        *states: str,
        within_s: float,
        poll_s: float = POLL_S,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> dict[str, Any]:
        """Follow the status until it is one of these, or nobody wants to know any more.

        Raises OSError when the agent is gone, Failed after the deadline.
        """
        deadline = time.monotonic() + within_s
        seen = self.status()
        while seen["status"] not in states and is_wanted():
            left = deadline - time.monotonic()
            if left <= 0:
                facts = {key: seen.get(key) for key in ("status", "reason", "message")}
                raise Failed(f"agent on port {self.port} is not {' or '.join(states)} within {within_s:g} s: {facts}")
            if self.speaks_ours:
                seen = self.changed(seen["version"], min(left, LONG_POLL_S))
            else:
                time.sleep(poll_s)
                seen = self.status()
        return seen

    def changed(self, version: int, wait_s: float) -> dict[str, Any]:
        """Give the status as soon as it is newer than this version, or after the time-out. Raises OSError."""
        path = f"/status?after={version}&wait={wait_s:.2f}"
        return self._call("GET", path, None, wait_s + CALL_TIMEOUT_S)

    def _fence(self, generation: int) -> dict[str, int]:
        return {"generation": generation} if self.speaks_ours else {}

    def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"} if data else {})
            answer = connection.getresponse()
            text = answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"the agent on port {self.port} broke off: {error!r}") from error
        finally:
            connection.close()
        if answer.status != 200:
            raise Failed(f"{method} {path} of port {self.port} was answered with {answer.status}: {text[:300]!r}")
        parsed = json.loads(text) if text else None
        return parsed if isinstance(parsed, dict) else {}
