"""The order in which the benchmark's operator calls agents, and what it does when they hang."""

from __future__ import annotations

import json
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from bench.common.processes import Failed
from bench.launchers.client import Client
from bench.launchers.small_operator import KEEPS, SmallOperator
from tests.nonempty import every

Call = tuple[int, str, dict[str, Any]]


class StandIn:
    """An agent that only keeps its state. A stop takes until the status has been asked for once."""

    def __init__(self, number: int, calls: list[Call], is_ours: bool) -> None:
        self.number, self.calls, self.is_ours = number, calls, is_ours
        self.state, self.version = "ready", 1
        self.stays_stopping = self.is_prepared = False
        self.features = ["store"] if is_ours else []
        agent = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
                self.reply(agent.status(long_polls="after" in asked))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                agent.calls.append((agent.number, self.path, body))
                agent.state = {"/start": "running", "/stop": "stopping", "/prepare": agent.state}[self.path]
                agent.is_prepared |= self.path == "/prepare"
                agent.version += 1
                self.reply(None)

            def reply(self, body: object) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"" if body is None else json.dumps(body).encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.client = Client(self._server.server_port)

    def status(self, long_polls: bool) -> dict[str, object]:
        assert self.is_ours or not long_polls, "only agents that show a version are asked that way"
        told: dict[str, object] = {"status": self.state} | (
            {"version": self.version, "features": self.features, "preparation": "ready" if self.is_prepared else None}
            if self.is_ours
            else {}
        )
        if self.state == "stopping" and not self.stays_stopping:
            self.calls.append((self.number, "became ready", {}))
            self.state = "ready"
        return told

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture(params=[True, False], ids=["ours", "plain protocol"])
def agents(request: pytest.FixtureRequest) -> Iterator[list[StandIn]]:
    calls: list[Call] = []
    made = [StandIn(number, calls, request.param) for number in range(4)]
    for agent in made:
        agent.client.status()
    yield made
    for agent in made:
        agent.close()


@pytest.fixture
def operator() -> Iterator[SmallOperator]:
    made = SmallOperator()
    yield made
    made.close()


def test_a_resize_starts_nobody_before_all_are_ready(agents: list[StandIn], operator: SmallOperator) -> None:
    operator.start([agent.client for agent in agents[:2]])
    calls = agents[0].calls
    calls.clear()
    operator.resize([agent.client for agent in agents])
    for agent in range(2):
        assert [path for number, path, _ in calls[:4] if number == agent] == ["/stop", "became ready"]
    assert sorted((number, path) for number, path, _ in calls[4:]) == [(n, "/start") for n in range(4)]
    assert every(body["is_graceful"] is True and body["timeout"] > 0 for _, path, body in calls if path == "/stop")


def test_a_start_names_rank_size_and_generation(agents: list[StandIn], operator: SmallOperator) -> None:
    for _ in range(3):
        operator.start([agent.client for agent in agents[:3]])
    bodies = {number: body for number, _, body in agents[0].calls[-3:]}
    assert {number: (body["rank"], body["nnodes"]) for number, body in bodies.items()} == {n: (n, 3) for n in range(3)}
    assert {body["faultCount"] for body in bodies.values()} == {2}
    assert len({body["master_port"] for body in bodies.values()}) == 1
    assert {body.get("generation") for body in bodies.values()} == {3 if agents[0].is_ours else None}


@pytest.mark.parametrize("is_older", [False, True], ids=["all serve a store", "one is older"])
def test_a_start_names_a_store_where_all_agents_can_use_it(
    agents: list[StandIn], operator: SmallOperator, is_older: bool
) -> None:
    agents[1].features = [] if is_older else agents[1].features
    agents[1].client.status()
    operator.start([agent.client for agent in agents[:2]])
    port = agents[0].client.port if agents[0].is_ours and not is_older else None
    assert [body.get("store_port") for _, path, body in agents[0].calls if path == "/start"] == [port, port]


@pytest.mark.parametrize("can_prepare", [False, True])
def test_newcomers_are_prepared_where_their_agents_know_how(agents: list[StandIn], can_prepare: bool) -> None:
    operator = SmallOperator(KEEPS)
    try:
        operator.start([agent.client for agent in agents[:2]])
        for agent in agents:
            agent.features = ["prepare"] if can_prepare and agent.is_ours else []
            agent.client.status()
        operator.prepare([agent.client for agent in agents[:3]])
    finally:
        operator.close()
    asked = [number for number, path, _ in agents[0].calls if path == "/prepare"]
    assert asked == ([2] if can_prepare and agents[0].is_ours else [])


def test_the_generation_that_is_stopped_is_the_old_one(agents: list[StandIn], operator: SmallOperator) -> None:
    operator.start([agents[0].client])
    operator.recover([agents[0].client])
    ((_, _, stop),) = [call for call in agents[0].calls if call[1] == "/stop"]
    assert stop == {"is_graceful": False} | ({"generation": 1} if agents[0].is_ours else {})


def test_the_first_fault_is_told_and_a_closed_agent_is_gone(agents: list[StandIn], operator: SmallOperator) -> None:
    operator.start([agent.client for agent in agents[:2]])
    first = operator.watch(closely=agents[1].client)
    agents[1].state = "faulted"
    assert first().what == "FAULTED"
    agents[1].state = "running"
    agents[1].close()
    assert operator.watch(closely=agents[1].client)().what == "gone"


def test_an_agent_that_hangs_is_a_failure_with_its_state(agents: list[StandIn]) -> None:
    agents[0].state, agents[0].stays_stopping = "stopping", True
    with pytest.raises(Failed, match=r"not ready within 0\.2 s.*stopping"):
        agents[0].client.until("ready", within_s=0.2)
