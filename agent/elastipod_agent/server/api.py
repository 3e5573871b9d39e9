"""The routes of the control API: parse the body, call the agent, build the answer (docs/design/contracts.md, 3)."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from elastipod.json_values import parse_finite_json
from elastipod_agent.agent import Agent
from elastipod_agent.core.fences import CallDecision, CallVerdict
from elastipod_agent.core.requests import BadBody, parse_prepare, parse_start, parse_stop, parse_update
from elastipod_agent.server.http import Request
from elastipod_agent.server.http_messages import Response
from elastipod_agent.server.peer_probe import PeerProber, parse_probe_target

MAX_BODY_BYTES = 1024 * 1024
MAX_START_BYTES = 8 * 1024 * 1024  # holds the addresses of all pods
MAX_WAIT_S = 120.0
MAX_WAITING = 64  # pending long polls: half of all connections, so that other calls always get one
_LARGE_PATHS = frozenset({"/start", "/update"})


def body_limit(path: str) -> int:
    """Give the size limit for the body of a request to this path."""
    return MAX_START_BYTES if path in _LARGE_PATHS else MAX_BODY_BYTES


class ControlApi:
    """Answers requests; the server calls `handle`. details: gives what /status?details=1 adds."""

    def __init__(
        self,
        agent: Agent,
        log_call: Callable[[Request, Response], None],
        details: Callable[[], dict[str, object]] = dict,
    ) -> None:
        self._agent = agent
        self._log_call = log_call
        self._details = details
        self._nnodes: int | None = None
        self._waiting = 0
        self._prober = PeerProber()
        self._routes: dict[str, dict[str, Callable[[Request], Awaitable[Response]]]] = {
            "/start": {"POST": self._start},
            "/prepare": {"POST": self._prepare},
            "/stop": {"POST": self._stop},
            "/update": {"POST": self._update},
            "/shutdown": {"POST": self._shutdown},
            "/status": {"GET": self._status},
        }

    async def handle(self, request: Request) -> Response:
        """Answer one request."""
        response = await self._route(request)
        self._log_call(request, response)
        return response

    async def _route(self, request: Request) -> Response:
        methods = self._routes.get(request.path)
        if methods is None:
            known = ", ".join(self._routes)
            return Response(HTTPStatus.NOT_FOUND, {"detail": f"there is no {request.path}; the paths are {known}"})
        call = methods.get(request.method)
        if call is None:
            allowed = ", ".join(methods)
            detail = f"{request.path} allows {allowed}, not {request.method}"
            return Response(HTTPStatus.METHOD_NOT_ALLOWED, {"detail": detail}, {"Allow": allowed})
        try:
            return await call(request)
        except BadBody as error:
            location = ["body", error.field] if error.field else ["body"]
            problem = {"loc": location, "msg": error.problem, "type": "value_error"}
            return Response(HTTPStatus.UNPROCESSABLE_ENTITY, {"detail": [problem]})

    async def _start(self, request: Request) -> Response:
        start = parse_start(_json(request.body))
        answer = self._agent.start(start)
        if answer.verdict is CallVerdict.ACT:
            self._nnodes = start.nnodes
        return self._answered(answer)

    async def _prepare(self, request: Request) -> Response:
        return self._answered(self._agent.prepare(parse_prepare(_json(request.body))))

    async def _stop(self, request: Request) -> Response:
        body = _json(request.body) if request.body.strip() else None
        return self._answered(self._agent.stop(parse_stop(body)))

    async def _update(self, request: Request) -> Response:
        answer = self._agent.update(parse_update(_json(request.body)))
        return self._answered(answer, body=self._agent.status_json())

    async def _shutdown(self, request: Request) -> Response:
        self._agent.shut_down()
        return Response(HTTPStatus.OK)

    async def _status(self, request: Request) -> Response:
        after = _query_number(request, "after")
        if after is not None and self._waiting < MAX_WAITING:
            wait_s = min(MAX_WAIT_S, max(0.0, _query_number(request, "wait") or 0.0))
            self._waiting += 1
            try:
                await self._agent.status.wait_beyond(int(after), wait_s)
            finally:
                self._waiting -= 1
        status = self._agent.status_json()
        if (text := request.query.get("reach")) is not None:
            status["reach"] = {"address": text, "is_reached": await self._prober.is_reachable(parse_probe_target(text))}
        if request.query.get("details"):
            status["details"] = self._details() | {"nnodes": self._nnodes}
        return Response(HTTPStatus.OK, status)

    def _answered(self, answer: CallDecision, body: object = None) -> Response:
        if answer.verdict is CallVerdict.REFUSE:
            return Response(HTTPStatus.CONFLICT, self._agent.status_json())
        return Response(HTTPStatus.OK, body)


def _json(body: bytes) -> object:
    try:
        parsed: object = parse_finite_json(body)
    except (ValueError, RecursionError) as error:
        raise BadBody("", f"the body is not JSON: {error}") from error
    return parsed


def _query_number(request: Request, name: str) -> float | None:
    text = request.query.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadBody(name, f"is {text!r}; it must be a number")
    return value
