"""The routes of the control API: what an agent is asked for each call, and what each of its decisions looks like on the wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, cast

import pytest
from tests.patience import PATIENCE_S

from elastipod_agent.agent import Agent
from elastipod_agent.core.fences import CallDecision, CallVerdict
from elastipod_agent.core.requests import StartRequest, StopRequest, UpdateRequest
from elastipod_agent.core.states import AgentState as S
from elastipod_agent.server import api as api_module
from elastipod_agent.server.api import MAX_BODY_BYTES, MAX_START_BYTES, ControlApi, body_limit
from elastipod_agent.server.http import Request
from elastipod_agent.server.http_messages import Response
from elastipod_agent.status import StatusStore

START = {"rank": 1, "nnodes": 3, "faultCount": 2, "master_addr": "10.0.0.1", "master_port": 29500, "generation": 3}


class Played:
    """An agent that decides as the test says and notes what it was asked."""

    def __init__(self, verdict: CallVerdict = CallVerdict.ACT) -> None:
        self.verdict = verdict
        self.status = StatusStore(lambda: "now")
        self.asked: list[object] = []

    def _decide(self, request: object) -> CallDecision:
        self.asked.append(request)
        return CallDecision(self.verdict, "why")

    start = stop = update = _decide

    def shut_down(self) -> None:
        self.asked.append("shutdown")

    def status_json(self) -> dict[str, Any]:
        return self.status.as_json(None)


class Api:
    """The API in front of such an agent, and the calls that it logged."""

    def __init__(self, verdict: CallVerdict = CallVerdict.ACT) -> None:
        self.agent = Played(verdict)
        self.logged: list[tuple[Request, Response]] = []
        self.control = ControlApi(
            cast("Agent", self.agent),
            lambda request, response: self.logged.append((request, response)),
            lambda: {"pid": 7},
        )

    async def call(
        self, method: str, path: str, body: object = None, query: Mapping[str, str] | None = None, *, raw: bytes = b""
    ) -> Response:
        data = raw if body is None else json.dumps(body).encode()
        return await self.control.handle(Request(method, path, query or {}, data))


async def test_a_start_is_read_and_answered_without_a_body() -> None:
    api = Api()
    answer = await api.call("POST", "/start", START)
    assert (answer.status, answer.body) == (200, None)
    (request,) = api.agent.asked
    assert isinstance(request, StartRequest)
    assert (request.rank, request.nnodes, request.run_generation, request.master_port) == (1, 3, 3, 29500)


async def test_a_stop_without_a_body_is_the_plain_hard_one() -> None:
    api = Api()
    for raw in (b"", b" \n"):
        assert (await api.call("POST", "/stop", raw=raw)).status == 200
    answer = await api.call("POST", "/stop", {"is_graceful": True, "timeout": 9, "generation": 3})
    assert (answer.status, answer.body) == (200, None)
    assert api.agent.asked == [
        StopRequest(),
        StopRequest(),
        StopRequest(is_graceful=True, timeout_s=9.0, generation=3),
    ]


async def test_an_update_is_answered_with_the_status() -> None:
    api = Api()
    answer = await api.call("POST", "/update", START)
    assert (answer.status, answer.body) == (200, api.agent.status_json())
    (request,) = api.agent.asked
    assert type(request) is UpdateRequest
    assert (request.rank, request.generation) == (1, 3)


async def test_a_shutdown_needs_no_body() -> None:
    api = Api()
    answer = await api.call("POST", "/shutdown")
    assert (answer.status, answer.body, api.agent.asked) == (200, None, ["shutdown"])


@pytest.mark.parametrize("path", ["/start", "/stop", "/update"])
async def test_a_refusal_shows_the_status_and_a_repetition_looks_like_the_first_time(path: str) -> None:
    refusing = Api(CallVerdict.REFUSE)
    answer = await refusing.call("POST", path, START)
    assert (answer.status, answer.body) == (409, refusing.agent.status_json())
    repeated = await Api(CallVerdict.NOTHING).call("POST", path, START)
    assert repeated.status == 200


async def test_every_call_is_logged_with_its_answer() -> None:
    api = Api()
    answers = [
        await api.call("GET", "/status"),
        await api.call("GET", "/none"),
        await api.call("POST", "/start", raw=b"{"),
    ]
    assert [response for _, response in api.logged] == answers
    assert [request.path for request, _ in api.logged] == ["/status", "/none", "/start"]


async def test_a_path_that_does_not_exist_is_answered_with_those_that_do() -> None:
    answer = await Api().call("GET", "/metrics")
    assert answer.status == 404
    assert answer.body == {
        "detail": "there is no /metrics; the paths are /start, /prepare, /stop, /update, /shutdown, /status"
    }


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/start", "POST"),
        ("GET", "/stop", "POST"),
        ("GET", "/update", "POST"),
        ("GET", "/shutdown", "POST"),
        ("POST", "/status", "GET"),
    ],
)
async def test_a_method_that_is_not_allowed(method: str, path: str, allowed: str) -> None:
    answer = await Api().call(method, path)
    assert (answer.status, answer.headers) == (405, {"Allow": allowed})
    assert answer.body == {"detail": f"{path} allows {allowed}, not {method}"}


@pytest.mark.parametrize(
    ("raw", "location", "problem"),
    [
        (b"{", ["body"], "the body is not JSON: "),
        (b"", ["body"], "the body is not JSON: "),
        (b'{"rank": NaN}', ["body"], "the body is not JSON: NaN is not a JSON value"),
        (b'{"worker_data": [1e999]}', ["body"], "the body is not JSON: 1e999 is too large for a number"),
        (b"[" * 100_000, ["body"], "the body is not JSON: "),
        (b"[]", ["body"], "the body must be a JSON object, not a list"),
        (b'{"rank": 0}', ["body", "nnodes"], "is required"),
    ],
)
async def test_a_body_that_cannot_be_used_is_named_as_the_original_agent_does(
    raw: bytes, location: list[str], problem: str
) -> None:
    api = Api()
    answer = await api.call("POST", "/start", raw=raw)
    assert (answer.status, api.agent.asked) == (422, [])
    (detail,) = answer.body["detail"]
    assert (detail["loc"], detail["type"]) == (location, "value_error")
    assert detail["msg"].startswith(problem)
    assert set(answer.body) == {"detail"}


async def test_the_status_has_details_for_those_who_ask() -> None:
    api = Api()
    plain = await api.call("GET", "/status")
    assert (plain.status, plain.body) == (200, api.agent.status_json())
    details = (await api.call("GET", "/status", query={"details": "1"})).body["details"]
    assert details == {"pid": 7, "nnodes": None}, "no start yet"
    await api.call("POST", "/start", START)
    api.agent.verdict = CallVerdict.NOTHING
    await api.call("POST", "/start", {**START, "nnodes": 9})
    details = (await api.call("GET", "/status", query={"details": "1"})).body["details"]
    assert details == {"pid": 7, "nnodes": 3}, "of the start that was carried out"


async def test_a_long_poll_ends_with_the_next_change() -> None:
    api = Api()
    waiting = asyncio.ensure_future(api.call("GET", "/status", query={"after": "1", "wait": "30"}))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    api.agent.status.enter(S.READY)
    seen = await asyncio.wait_for(waiting, PATIENCE_S)
    assert (seen.body["status"], seen.body["version"]) == ("ready", 2)


@pytest.mark.parametrize(
    ("query", "wait_s"),
    [
        ({"after": "1", "wait": "0.5"}, 0.5),
        ({"after": "1", "wait": "1e9"}, api_module.MAX_WAIT_S),
        ({"after": "1", "wait": "-1"}, 0.0),
        ({"after": "1"}, 0.0),
        ({"after": "7.0", "wait": "3"}, 3.0),
    ],
)
async def test_how_long_a_poll_waits_at_most(query: dict[str, str], wait_s: float) -> None:
    api, waits = Api(), list[tuple[int, float]]()

    async def wait_beyond(version: int, timeout_s: float) -> None:
        waits.append((version, timeout_s))

    api.agent.status.wait_beyond = wait_beyond  # type: ignore[method-assign]
    assert (await api.call("GET", "/status", query=query)).status == 200
    assert waits == [(int(float(query["after"])), wait_s)]


async def test_more_polls_than_may_wait_are_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_module, "MAX_WAITING", 2)
    api, query = Api(), {"after": "1", "wait": "60"}
    for _ in range(2):
        waiting = [asyncio.ensure_future(api.call("GET", "/status", query=query)) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert (await asyncio.wait_for(api.call("GET", "/status", query=query), PATIENCE_S)).status == 200
        assert not any(one.done() for one in waiting)
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)  # their places are free again


@pytest.mark.parametrize("query", [{"after": "x"}, {"after": "nan"}, {"after": "inf"}, {"after": "1", "wait": "soon"}])
async def test_numbers_of_a_query_that_are_none(query: dict[str, str]) -> None:
    answer = await Api().call("GET", "/status", query=query)
    (name, text), (problem,) = list(query.items())[-1], answer.body["detail"]
    assert answer.status == 422
    assert (problem["loc"], problem["msg"]) == (["body", name], f"is {text!r}; it must be a number")


async def test_another_agent_is_probed_for_an_operator_that_cannot_reach_it() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 Unauthorized\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    asked = f"127.0.0.1:{port}"
    seen = await Api().call("GET", "/status", query={"reach": asked})
    assert seen.body["reach"] == {"address": asked, "is_reached": True}
    server.close()
    await server.wait_closed()
    seen = await Api().call("GET", "/status", query={"reach": asked})
    assert seen.body["reach"] == {"address": asked, "is_reached": False}
    assert (await Api().call("GET", "/status", query={"reach": "host:80"})).status == 422


def test_how_large_a_body_may_be() -> None:
    assert [body_limit(path) for path in ("/start", "/update")] == [MAX_START_BYTES] * 2
    assert [body_limit(path) for path in ("/stop", "/status", "/shutdown", "/x")] == [MAX_BODY_BYTES] * 4
