"""Whether one agent reaches another: what counts as an answer, how long it takes, and what it costs."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from tests import web_servers
from tests.patience import PATIENCE_S

from elastipod_agent.agent import Agent
from elastipod_agent.core.requests import BadBody
from elastipod_agent.server import peer_probe
from elastipod_agent.server.api import ControlApi
from elastipod_agent.server.http import Request
from elastipod_agent.server.http_messages import Response
from elastipod_agent.server.peer_probe import MAX_PROBES, PeerProber, ProbeTarget, parse_probe_target

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[ProbeTarget]:
    async def serve_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:  # also when the test ends first: a connection that is left open fails a later test, whichever it is
            writer.close()

    server = await asyncio.start_server(serve_and_close, "127.0.0.1", 0)
    try:
        yield ProbeTarget("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        await web_servers.accept_no_more(server)
        server.close()


def answering(head: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)

    return serve


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


@pytest.mark.parametrize(
    ("head", "reached"),
    [
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\n", True, id="an answer"),
        pytest.param(b"HTTP/1.1 401 Unauthorized\r\n\r\n", True, id="a refusal is an answer"),
        pytest.param(b"SSH-2.0-x\r\n", False, id="somebody else"),
        pytest.param(b"", False, id="a connection that is closed"),
    ],
)
async def test_any_http_answer_shows_that_an_agent_lives(head: bytes, reached: bool) -> None:
    async with serving(answering(head)) as target:
        assert await PeerProber().is_reachable(target) is reached


async def test_a_process_that_stands_still_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_probe, "PROBE_TIMEOUT_S", 0.2)
    async with serving(silent) as target:
        assert await PeerProber().is_reachable(target) is False


async def test_a_port_that_is_refused_is_not_reached() -> None:
    async with serving(silent) as target:
        pass
    assert await PeerProber().is_reachable(target) is False


@pytest.mark.parametrize(
    ("code", "reached"), [(errno.EMFILE, None), (errno.ENETUNREACH, None), (errno.EHOSTUNREACH, False)]
)
async def test_trouble_of_this_machine_says_nothing_about_the_other(
    monkeypatch: pytest.MonkeyPatch, code: int, reached: bool | None
) -> None:
    async def connect(*_: Any, **__: Any) -> Any:
        raise OSError(code, "no")

    monkeypatch.setattr(asyncio, "open_connection", connect)
    assert await PeerProber().is_reachable(ProbeTarget("127.0.0.1", 1)) is reached


async def test_only_a_few_are_tried_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_probe, "PROBE_TIMEOUT_S", 0.5)
    prober = PeerProber()
    async with serving(silent) as target:
        found = await asyncio.gather(*(prober.is_reachable(target) for _ in range(MAX_PROBES + 2)))
    monkeypatch.setattr(peer_probe, "PROBE_TIMEOUT_S", PATIENCE_S)
    assert (found.count(False), found.count(None)) == (MAX_PROBES, 2)
    async with serving(answering(b"HTTP/1.1 200 OK\r\n\r\n")) as target:
        assert await prober.is_reachable(target) is True, "places are given back"


@pytest.mark.parametrize(
    ("text", "target"),
    [("10.0.0.7:8080", ProbeTarget("10.0.0.7", 8080)), ("[fd00::7]:80", ProbeTarget("fd00::7", 80))],
)
def test_an_address_is_read(text: str, target: ProbeTarget) -> None:
    assert parse_probe_target(text) == target


@pytest.mark.parametrize(
    "text", ["", "10.0.0.7", "10.0.0.7:", "example.org:80", "10.0.0.7:0", "10.0.0.7:65536", "10.0.0.7:١", ":80"]
)
def test_what_is_no_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadBody, match="IP address and a port"):
        parse_probe_target(text)


class StandIn:
    """An agent with nothing but a status."""

    def status_json(self) -> dict[str, Any]:
        return {"status": "running"}


async def asked(query: dict[str, str]) -> Response:
    api = ControlApi(cast(Agent, StandIn()), lambda request, response: None)
    return await api.handle(Request("GET", "/status", query))


async def test_the_status_tells_what_was_asked_and_found() -> None:
    async with serving(answering(b"HTTP/1.1 200 OK\r\n\r\n")) as target:
        text = f"{target.host}:{target.port}"
        response = await asked({"reach": text})
    assert response.body["reach"] == {"address": text, "is_reached": True}
    assert "reach" not in (await asked({})).body
    refused = await asked({"reach": "nonsense"})
    assert refused.status == 422


async def test_other_calls_do_not_wait_for_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_probe, "PROBE_TIMEOUT_S", 1000.0)
    api = ControlApi(cast(Agent, StandIn()), lambda request, response: None)
    async with serving(silent) as target:
        probe = asyncio.create_task(api.handle(Request("GET", "/status", {"reach": f"{target.host}:{target.port}"})))
        await asyncio.sleep(0)
        assert (await api.handle(Request("GET", "/status", {}))).status == 200
        assert not probe.done()
        probe.cancel()
