"""The model of an agent that played nodes and benchmarks share: it answers as the agent's own core decides."""

from __future__ import annotations

from typing import Any

from tests.agent_model import AgentModel

from elastipod_agent.core.states import AgentState


class Slow(AgentModel):
    """Its workers end when the test says so."""

    def stops(self, body: dict[str, Any]) -> None:
        """Wait for the test."""


def running(generation: int = 3) -> Slow:
    agent = Slow()
    assert agent.start({"generation": generation, "rank": 0}) == 200
    return agent


def test_a_call_of_an_older_generation_is_refused_and_changes_nothing() -> None:
    agent = running()
    before = agent.status()
    assert agent.start({"generation": 2, "rank": 0}) == 409
    assert agent.stop({"generation": 2, "is_graceful": True}) == 409
    assert agent.status() == before


def test_a_hard_stop_ends_a_drain_and_nothing_has_drained() -> None:
    agent = running()
    assert agent.stop({"generation": 3, "is_graceful": True}) == 200
    assert (agent.state, agent.draining) == (AgentState.STOPPING, True)
    version = agent.version
    assert agent.stop({"generation": 3, "is_graceful": True}) == 200
    assert agent.version == version, "it drains already"
    assert agent.stop({"generation": 3, "is_graceful": False}) == 200
    assert not agent.draining
    agent.stopped(drained=False, reason=None)
    said = agent.status()
    assert (said["status"], said["drained"], said["reason"]) == ("ready", False, None)


def test_what_was_stopped_is_started_no_more() -> None:
    agent = AgentModel()
    assert agent.stop({"generation": 4, "is_graceful": False}) == 200
    for generation, state in ((4, AgentState.READY), (5, AgentState.RUNNING)):
        assert agent.start({"generation": generation, "rank": 0}) == 200
        assert agent.state is state


def test_a_spare_has_no_workers_that_could_fail() -> None:
    agent = AgentModel()
    assert agent.start({"generation": 3, "rank": 0, "spare": True}) == 200
    assert (agent.status()["spare"], agent.state) == ("True", AgentState.READY)
    assert not agent.crash("it broke")


def test_a_crash_is_told_until_the_next_start() -> None:
    agent = running()
    assert agent.crash("it broke")
    assert (agent.state, agent.status()["failure"]["message"]) == (AgentState.FAULTED, "it broke")
    agent.stop({"generation": 3, "is_graceful": False})
    agent.stopped(drained=False, reason=None)
    assert agent.start({"generation": 4, "rank": 0}) == 200
    assert agent.status()["failure"] is None


def test_it_is_shut_down_once() -> None:
    agent = running()
    assert agent.shut_down()
    assert not agent.shut_down()
    assert agent.state is AgentState.SHUTDOWN
