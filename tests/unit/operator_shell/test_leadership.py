"""From the start of an operator's process to its end: standby, leader, and what both serve."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from tests.free_ports import free_port
from tests.unit.agents.fake_agent import until
from tests.unit.core.builders import job
from tests.unit.operator_shell.api_server import ApiServer

from elastipod_operator import app, job_writes, leadership
from elastipod_operator.kube.api import Api, ApiError
from elastipod_operator.logs import set_up_logging
from elastipod_operator.options import Options

OPTIONS = Options(namespaces=("a", "b"), metrics_port=0, log_level="info", pod_name="me", pod_namespace="team")


class Client:
    """A connection to the API server that is only to be closed."""

    def __init__(self, *, is_unlimited: bool) -> None:
        self.is_closed, self.is_unlimited = False, is_unlimited

    async def close(self) -> None:
        self.is_closed = True


class Process:
    """An operator's process over one API server, whose watches only note that they run."""

    def __init__(self, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clients: list[Client] = []
        self.watched: list[tuple[Options, Api]] = []
        self.labels: list[bool] = []
        self.stop = asyncio.Event()
        self.watches_end = asyncio.Event()
        monkeypatch.setattr(app, "connect", self._connect)
        monkeypatch.setattr(app, "Api", lambda client, watch_client=None: api)
        monkeypatch.setattr(app, "watch", self._watch)
        monkeypatch.setattr(app, "mark_leader", self._mark_leader)

    async def _connect(self, *, is_unlimited: bool = False) -> Client:
        self.clients.append(Client(is_unlimited=is_unlimited))
        return self.clients[-1]

    async def _watch(self, options: Options, api: Api, stop: asyncio.Event) -> None:
        assert stop is self.stop
        self.watched.append((options, api))
        await self.watches_end.wait()

    async def _mark_leader(self, api: Api, options: Options, *, leads: bool) -> None:
        self.labels.append(leads)


async def get(port: int, path: str) -> tuple[int, str, str]:
    """Give status, content type and text of a page that this process serves."""
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
        return answer.status, answer.content_type, await answer.text()


async def test_an_operator_leads_until_it_is_told_to_end(
    api: Api, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, options = Process(api, monkeypatch), replace(OPTIONS, metrics_port=free_port())
    leading = asyncio.create_task(app.lead(options, process.stop))
    await until(lambda: bool(process.watched))
    assert process.watched == [(options, api)]
    assert process.labels == [False, True], "first the label of an earlier container is removed"
    assert server.leases["elastipod-operator"]["spec"]["holderIdentity"] == "me"
    assert await get(options.metrics_port, "/healthz") == (200, "text/plain", "ok\n")
    assert await get(options.metrics_port, "/readyz") == (200, "text/plain", "leading\n")
    status, kind, page = await get(options.metrics_port, "/metrics")
    assert (status, kind, "# TYPE elastipod" in page) == (200, "text/plain", True)
    unlimited = [client.is_unlimited for client in process.clients]
    assert unlimited == [False, False, True], "the lease has a connection of its own, and so have watches"
    process.stop.set()
    assert await leading == 0
    assert [client.is_closed for client in process.clients] == [True, True, True]
    assert server.leases["elastipod-operator"]["spec"]["holderIdentity"] == "", "released"
    with pytest.raises(aiohttp.ClientConnectorError):
        await get(options.metrics_port, "/healthz")


async def test_an_operator_on_standby_serves_and_does_nothing_else(
    api: Api, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, options = Process(api, monkeypatch), replace(OPTIONS, metrics_port=free_port())
    held = {"metadata": {"name": "elastipod-operator"}, "spec": {"holderIdentity": "other"}}
    server.put(server.leases, held)
    waiting = asyncio.create_task(app.lead(options, process.stop))
    await until(lambda: bool(process.labels))
    assert await get(options.metrics_port, "/readyz") == (200, "text/plain", "standing by\n")
    assert (process.watched, process.labels) == ([], [False])
    process.stop.set()
    assert await waiting == 0
    assert server.leases["elastipod-operator"]["spec"]["holderIdentity"] == "other"
    assert [client.is_closed for client in process.clients] == [True, True, True]


async def test_watches_that_end_by_themselves_are_an_error(
    api: Api, server: ApiServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process = Process(api, monkeypatch)
    process.watches_end.set()
    assert await app.lead(OPTIONS, process.stop) == 1
    assert "the watches ended unexpectedly" in caplog.text
    assert server.leases["elastipod-operator"]["spec"]["holderIdentity"] == ""


async def test_without_a_port_nothing_is_served() -> None:
    assert await leadership.serve_health(0, leadership.Leadership()) is None


async def test_a_write_that_works_forgets_only_the_refusal_of_its_own_kind() -> None:
    told: list[Any] = []

    class Noted:
        def record(self, fact: object, events: list[Any]) -> None:
            told.extend(events)

    async def refused() -> None:
        raise ApiError(422, "Invalid value")

    async def worked() -> str:
        return "the answer"

    events: Any = Noted()
    writes, fact = job_writes.JobWrites(events), job()
    with pytest.raises(ApiError):
        await writes.write("status", fact, refused())
    assert await writes.write("record", fact, worked()) == "the answer"
    with pytest.raises(ApiError):
        await writes.write("status", fact, refused())
    (event,) = told
    assert event.is_warning
    assert "refuses to write the job's status; the operator tries again: " in event.message
    assert "Invalid value" in event.message


def test_log_lines_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    root, own = logging.getLogger(), logging.getLogger("elastipod_operator")
    kept = root.handlers[:], root.level, own.level
    try:
        set_up_logging("warning")
        logging.getLogger("elastipod_operator.x").info("not shown")
        logging.getLogger("elastipod_operator.x").warning("shown %s", 7)
    finally:
        root.handlers[:], level, own_level = kept
        root.setLevel(level)
        own.setLevel(own_level)  # later tests in this process read what it logs
    said = capsys.readouterr()
    (line,) = (said.out + said.err).splitlines()
    assert "shown 7" in json.loads(line).values()
