"""The store that an agent serves, over a life of the agent: which generations it serves, and which calls of the operator end that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.patience import PATIENCE_S
from tests.unit.agent.agent_in_process import AgentInProcess
from tests.unit.agent.worker_scripts import DRAINS, WAITS

from elastipod.agent_store import ConnectionRefused, StoreConnection, open_store
from elastipod.store_wire import Greeting
from elastipod_agent.authentication import Credentials, worker_key

KEY = worker_key(Credentials())  # without authentication


def meet(agent: AgentInProcess, generation: int) -> StoreConnection:
    return open_store(f"127.0.0.1:{agent.port}", Greeting(generation, 0), KEY, PATIENCE_S)


def until_ended(connection: StoreConnection) -> None:
    with pytest.raises(ConnectionError, match="is gone"):
        connection.call(b"wait", b"60", b"never", wait_s=60.0)
    connection.close()


def test_the_agent_of_group_rank_zero_serves_its_generation_through_a_drain_to_the_next_start(
    agent: AgentInProcess,
) -> None:
    def scenario() -> None:
        assert "store" in agent.status()["features"]
        agent.start(1, store_port=agent.port)
        first = meet(agent, 1)
        assert first.call(b"add", b"n", b"1") == [b"1"]
        agent.until_printed("pid")
        agent.drain(1)
        agent.until("ready")
        assert first.call(b"add", b"n", b"1") == [b"2"], "ranks of other pods may still agree on their last step"
        early = meet(agent, 2)
        agent.start(2, store_port=agent.port)
        assert early.call(b"count") == [b"0"]
        until_ended(first)
        with pytest.raises(ConnectionRefused, match="generation 1 is over"):
            meet(agent, 1)
        early.close()

    agent.run(DRAINS, scenario)


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda agent: agent.stop(1), id="a hard stop"),
        pytest.param(lambda agent: agent.call("POST", "/shutdown"), id="a shutdown"),
    ],
)
def test_what_ends_the_generation_ends_its_store(agent: AgentInProcess, end: Callable[[AgentInProcess], None]) -> None:
    def scenario() -> None:
        agent.start(1, store_port=agent.port)
        connection = meet(agent, 1)
        connection.call(b"count")
        end(agent)
        until_ended(connection)

    agent.run(WAITS, scenario)


def test_the_store_outlives_a_worker_that_fails(agent: AgentInProcess) -> None:
    def scenario() -> None:
        agent.start(1, nnodes=2, store_port=agent.port)
        connection = meet(agent, 1)
        agent.until("faulted")
        assert connection.call(b"count") == [b"0"]
        connection.close()

    agent.run("raise SystemExit(3)", scenario)


@pytest.mark.parametrize(
    ("rank", "is_named"),
    [pytest.param(0, False, id="a worker hosts it"), pytest.param(1, True, id="another agent does")],
)
def test_an_agent_that_was_not_asked_to_serves_no_store(agent: AgentInProcess, rank: int, is_named: bool) -> None:
    def scenario() -> None:
        agent.start(1, rank=rank, nnodes=2, **({"store_port": agent.port} if is_named else {}))
        with pytest.raises(ConnectionRefused, match="the store of generation 1 is not served here"):
            meet(agent, 1)

    agent.run(WAITS, scenario)


def test_workers_are_told_where_their_store_is(agent: AgentInProcess) -> None:
    says = "import os\nprint('store', os.environ.get('ELASTIPOD_STORE'), flush=True)\n" + WAITS

    def scenario() -> None:
        agent.start(1, store_port=agent.port)
        agent.until_printed(f"store 127.0.0.1:{agent.port}\n")
        agent.stop(1)
        agent.until("ready")
        agent.start(2)
        agent.until_printed("store None\n")

    agent.run(says, scenario)


def test_an_agent_with_only_a_token_offers_no_store(agent: AgentInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pod was made by an operator of the previous version, and its workers get no key."""
    monkeypatch.setenv("ELASTIPOD_TOKEN", "t")
    agent.credentials = Credentials(token="t")
    agent.run(WAITS, lambda: features_are(agent, ["reach", "prepare", "next"]))


def features_are(agent: AgentInProcess, expected: list[str]) -> None:
    assert agent.status()["features"] == expected
