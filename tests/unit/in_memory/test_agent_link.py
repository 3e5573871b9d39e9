"""What a rank asks of its agent: whether it is kept, where its next place is, and whether its generation is over."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.inmemory_agents import AgentSocket
from tests.patience import PATIENCE_S

from elastipod.in_memory.agent_link import AgentLink, WorldPlace
from elastipod.ipc.protocol import SOCKET_ENV

PLACE = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "12000", "ELASTIPOD_GENERATION": "7"}


class Agent:
    """Answers calls, and keeps them. keep: the answer to `keep`."""

    def __init__(self, keep: dict[str, Any]) -> None:
        self.calls: list[Mapping[str, Any]] = []
        self.is_over = threading.Event()
        self._keep = keep

    def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        self.calls.append(call)
        if call["call"] == "barrier":
            return {"run": 1, "start": {"worker_envs": PLACE, "aggregate_worker_data": {}}}
        if call["call"] == "fault":
            return {"run": 1, "restart_count": 0} if self.is_over.wait(min(0.05, call["wait_s"])) else {"is_late": True}
        return {"hello": {"run": 0, "now": 1}, "keep": self._keep}.get(call["call"], {})

    def names(self) -> list[str]:
        return [call["call"] for call in self.calls]


Connect = Callable[[dict[str, Any]], tuple[AgentLink, Agent]]


@pytest.fixture
def connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """Make an agent, and the link of a rank to it."""
    servers: list[tuple[AgentSocket, threading.Thread]] = []
    links: list[AgentLink] = []
    for name in (*PLACE, "ELASTIPOD_PROGRESS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.setenv(name, "")  # what the calls set is taken back at the end
        monkeypatch.delenv(name)

    def make(keep: dict[str, Any]) -> tuple[AgentLink, Agent]:
        agent = Agent(keep)
        server = AgentSocket(str(tmp_path / "socket"), agent.answer)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        monkeypatch.setenv(SOCKET_ENV, str(tmp_path / "socket"))
        link = AgentLink.connect()
        assert link is not None
        links.append(link)
        return link, agent

    yield make
    for link in links:
        link.close()
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def test_without_an_agent_there_is_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOCKET_ENV, raising=False)
    assert AgentLink.connect() is None


def test_an_agent_that_keeps_processes_says_what_to_set_for_that(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    link, agent = connect({"env": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}})
    link.announce("replicated")
    assert link.is_kept
    assert agent.calls[-1]["kind"] == "replicated"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}, ["TORCH_NCCL_ASYNC_ERROR_HANDLING=2"]),
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, ["NCCL_ASYNC_ERROR_HANDLING=1"]),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "NCCL_ASYNC_ERROR_HANDLING": "1"}, []),
        ({}, []),
    ],
)
def test_a_setting_of_the_user_that_keeps_no_state_over_the_loss_of_a_peer_is_named(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, environ: Any, named: list[str]
) -> None:
    link, _ = connect({"env": {}})
    monkeypatch.delenv("NCCL_ASYNC_ERROR_HANDLING", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        link.announce("sharded")
    assert [record.message.partition(":")[0] for record in caplog.records] == named


def test_an_agent_that_does_not_know_the_call_is_named_once(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "0")
    link, _ = connect({"error": "there is no call 'keep'"})
    with caplog.at_level(logging.WARNING):
        link.announce("replicated")
    assert not link.is_kept
    assert [record.message.partition(",")[0] for record in caplog.records] == [
        "this agent ends worker processes with their generation"
    ]


def test_with_in_process_restart_an_older_agent_keeps_processes_too(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "-1")
    link, _ = connect({"error": "there is no call 'keep'"})
    link.announce("replicated")
    assert link.is_kept


def test_the_barrier_gives_the_place_in_the_next_generation(connect: Connect) -> None:
    link, agent = connect({})
    assert link.park() == WorldPlace(7, 1, 3, "10.0.0.1", 12000)
    assert agent.names()[-1] == "past_barrier"


def test_news_of_a_generation_that_this_rank_has_left_frees_nobody_from_the_next_one(connect: Connect) -> None:
    """The watcher may get its answer, and be held up, while this rank is at the barrier or connects again."""
    link, agent = connect({"is_kept": True})
    link.announce("replicated")
    link.park()
    freed: list[str] = []
    link.watch(7, lambda: freed.append("former"))
    (watcher,) = (each for each in threading.enumerate() if each.name == "elastipod-generation-watcher")
    link.park()
    agent.is_over.set()
    watcher.join(PATIENCE_S)
    assert not watcher.is_alive()
    assert freed == []


def test_a_rank_that_is_being_freed_goes_to_the_barrier_afterwards(connect: Connect) -> None:
    link, agent = connect({"is_kept": True})
    link.announce("replicated")
    link.park()
    frees, may_free = threading.Event(), threading.Event()
    order: list[str] = []

    def free() -> None:
        frees.set()
        may_free.wait(PATIENCE_S)
        order.append("freed")

    link.watch(7, free)
    agent.is_over.set()
    assert frees.wait(PATIENCE_S)

    def park() -> None:
        link.park()
        order.append("parked")

    parks = threading.Thread(target=park)
    parks.start()
    parks.join(0.1)
    may_free.set()
    parks.join(PATIENCE_S)
    assert order == ["freed", "parked"]


def test_the_end_of_the_generation_is_seen_and_a_fault_is_reported_only_before_it(connect: Connect) -> None:
    link, agent = connect({})
    place = link.park()
    link.watch(place.generation)
    assert not link.wait_until_over(0.1)
    link.report_fault(1, "a collective failed")
    (fault,) = [call for call in agent.calls if call["call"] == "send_fault"]
    said = {
        "global_rank": 1,
        "reason": "CollectiveFailed",
        "message": "a collective failed",
        "restart_mode": "in_process_restart",
    }
    assert {name: fault.get(name) for name in said} == said, fault
    agent.is_over.set()
    assert link.wait_until_over(20)
    link.report_fault(1, "a collective failed")
    assert agent.names().count("send_fault") == 1
