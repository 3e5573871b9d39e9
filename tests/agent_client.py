"""Plays the operator towards one agent: calls its control API over HTTP, follows its status and reads what it printed."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from email.message import Message
from pathlib import Path
from typing import Any

from tests.free_ports import free_port
from tests.patience import PATIENCE_S

from elastipod_agent.authentication import Credentials, bearer, challenge_in, signed


def until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Wait for a condition and give its first true value; fails with a sentence when it does not come."""
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {patience_s:g} s in vain for {what}"
        time.sleep(0.01)
    return value


def ask_agent(
    address: str,
    credentials: Credentials,
    method: str = "GET",
    path: str = "/status",
    data: bytes | None = None,
    *,
    timeout_s: float = PATIENCE_S,
) -> tuple[int, bytes]:
    """Make one request with whatever proves the caller; gives status and body."""
    status, headers, text = _request(address, method, path, data, bearer(credentials.token), timeout_s)
    challenge = challenge_in(headers.get("WWW-Authenticate", ""))
    if status == 401 and challenge and credentials.key:
        proof = signed(credentials, challenge, method, path, data or b"")
        status, _, text = _request(address, method, path, data, proof, timeout_s)
    return status, text


def _request(
    address: str, method: str, path: str, data: bytes | None, headers: Mapping[str, str], timeout_s: float
) -> tuple[int, Message, bytes]:
    request = urllib.request.Request(address + path, data=data, method=method, headers=dict(headers))
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


class AgentClient:
    """The calls of an operator to the agent at a port of this host, which prints into the file `log`."""

    def __init__(self, port: int, log: Path, credentials: Credentials) -> None:
        self.port = port
        self.log = log
        self.credentials = credentials

    def call(self, method: str, path: str, body: object = None, *, raw: bytes | None = None) -> tuple[int, Any]:
        """Make one request; gives the status code and the parsed body (None when empty)."""
        data = raw if raw is not None else (None if body is None else json.dumps(body).encode())
        status, text = ask_agent(f"http://127.0.0.1:{self.port}", self.credentials, method, path, data)
        return status, json.loads(text) if text else None

    def start(self, generation: int | None = 1, *, rank: int = 0, nnodes: int = 1, **fields: Any) -> tuple[int, Any]:
        """POST /start with a master on a free port, unless fields say otherwise."""
        body: dict[str, Any] = {"rank": rank, "nnodes": nnodes, "faultCount": 0}
        body |= {"master_addr": "127.0.0.1", "master_port": free_port()}
        if generation is not None:
            body |= {"faultCount": generation - 1, "generation": generation}
        return self.call("POST", "/start", body | fields)

    def stop(self, generation: int | None = None, **fields: Any) -> tuple[int, Any]:
        """POST /stop."""
        return self.call("POST", "/stop", fields if generation is None else {**fields, "generation": generation})

    def drain(self, generation: int | None = None, timeout: float = PATIENCE_S, **fields: Any) -> tuple[int, Any]:
        """POST a graceful /stop."""
        return self.stop(generation, is_graceful=True, timeout=timeout, **fields)

    def status(self) -> dict[str, Any]:
        """GET /status."""
        code, body = self.call("GET", "/status")
        assert code == 200
        assert isinstance(body, dict)
        return body

    def until(self, state: str, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """Follow /status by long polling until the agent is in this state."""
        deadline = time.monotonic() + patience_s
        seen = self.status()
        while seen["status"] != state:
            left = deadline - time.monotonic()
            assert left > 0, f"the agent is {seen['status']} and not {state}: {seen}\n{self.printed()}"
            _, seen = self.call("GET", f"/status?after={seen['version']}&wait={min(left, 30):.2f}")
        return seen

    def printed(self) -> str:
        """Give all that the agent and its workers have printed so far."""
        return self.log.read_text("utf-8", "replace")

    def until_printed(self, text: str, times: int = 1) -> None:
        """Wait until a text has been printed so often."""
        until(lambda: self.printed().count(text) >= times, f"{times} x {text!r} in:\n{self.printed()}")
