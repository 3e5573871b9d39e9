"""Nodes that were deleted while the watch was broken are found by the list that follows, and by nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.unit.agents.fake_agent import until
from tests.unit.kube.bodies import JOB_UID, job_body, node_body, pod_body

from elastipod_operator import missed_node_deletions
from elastipod_operator.kube.api import ApiError
from elastipod_operator.kube.store import Store
from elastipod_operator.missed_node_deletions import MissedNodeDeletions


class Nodes:
    """A store with three nodes and a job on the first, and an API server that has some of them."""

    def __init__(self) -> None:
        self.store = Store()
        self.there = {"node-1", "node-2", "node-3"}
        self.reads: list[str] = []
        self.woken: list[str] = []
        self.errors: list[Exception] = []
        self.missed = MissedNodeDeletions(self.store, self.read, self.woken.append, quiet_s=0.02)
        for name in self.there:
            self.store.put_node(node_body(name))
        self.store.put_job(job_body())
        self.store.put_pod(pod_body())

    async def read(self, name: str) -> object:
        self.reads.append(name)
        if self.errors:
            raise self.errors.pop(0)
        if name not in self.there:
            raise ApiError(404, "not found")
        return {}


@pytest.fixture
async def nodes() -> AsyncIterator[Nodes]:
    """The nodes, looked after."""
    nodes = Nodes()
    task = asyncio.create_task(nodes.missed.run())
    yield nodes
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_node_that_a_new_list_does_not_show_is_forgotten_and_its_jobs_are_woken(nodes: Nodes) -> None:
    nodes.there = {"node-2", "node-3"}
    nodes.missed.observe("node-2", is_listed=True)
    nodes.missed.observe("node-3", is_listed=True)
    await until(lambda: set(nodes.store.nodes) == {"node-2", "node-3"})
    assert nodes.reads == ["node-1"]
    assert nodes.woken == [JOB_UID]


async def test_events_alone_ask_for_nothing(nodes: Nodes) -> None:
    nodes.missed.observe("node-2", is_listed=False)
    await asyncio.sleep(0.1)
    assert nodes.reads == []


async def test_a_node_that_an_event_showed_or_that_is_there_stays(nodes: Nodes) -> None:
    nodes.missed.observe("node-2", is_listed=True)
    nodes.missed.observe("node-3", is_listed=False)
    await until(lambda: nodes.reads == ["node-1"])
    await asyncio.sleep(0)
    assert len(nodes.store.nodes) == 3


async def test_every_list_is_looked_at_for_itself(nodes: Nodes) -> None:
    for name in sorted(nodes.there):
        nodes.missed.observe(name, is_listed=True)
    await until(lambda: not nodes.missed._is_listing.is_set())
    assert nodes.reads == []
    nodes.there = {"node-1", "node-3"}
    nodes.missed.observe("node-1", is_listed=True)
    nodes.missed.observe("node-3", is_listed=True)
    await until(lambda: set(nodes.store.nodes) == nodes.there)


async def test_an_api_server_that_does_not_answer_is_asked_again(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missed_node_deletions, "RETRY_S", 0.01)
    nodes.errors = [ApiError(500, "out of order"), TimeoutError()]
    nodes.there = {"node-2", "node-3"}
    nodes.missed.observe("node-2", is_listed=True)
    nodes.missed.observe("node-3", is_listed=True)
    await until(lambda: set(nodes.store.nodes) == nodes.there)
    assert nodes.reads == ["node-1"] * 3
