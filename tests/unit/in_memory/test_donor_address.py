"""Where a newcomer finds a rank to follow: in the store of those who train, whether one of them or an agent has it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from tests.free_ports import free_port
from tests.patience import PATIENCE_S
from tests.unit.served_stores import KEY, served_store

from elastipod.agent_store import AgentStore, open_store
from elastipod.in_memory import follower
from elastipod.in_memory.follow_wire import FollowingEnded
from elastipod.in_memory.follower import donor_address
from elastipod.ipc.protocol import SERVED_BY_AGENT
from elastipod.store_wire import Greeting
from elastipod.stores import TorchStore


@pytest.fixture(params=["hosted by a worker", "served by an agent"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give the name of a store as agents say it, and what connects to its keys of a generation."""
    monkeypatch.setattr(follower, "HANDSHAKE_S", PATIENCE_S)  # a busy machine may pause
    if request.param == "hosted by a worker":
        port = free_port()
        kept = TorchStore("127.0.0.1", port, "", PATIENCE_S, keep_server=True)
        yield f"127.0.0.1:{port}", lambda world: TorchStore("127.0.0.1", port, f"elastipod/world/{world}", PATIENCE_S)
        del kept
        return
    with served_store(generation=4) as served:
        connection = open_store(served.address, Greeting(4, 0), KEY, PATIENCE_S)
        yield SERVED_BY_AGENT + served.address, lambda world: AgentStore(connection, f"elastipod/world/{world}")
        connection.close()


def test_newcomers_are_dealt_out_to_the_donors_of_their_generation(store: Any) -> None:
    name, keys_of = store
    keys_of(3).set("donors", b"1")
    world = keys_of(4)
    world.set("donor/0", b"10.0.0.1:4001")
    world.set("donor/1", b"fd00::2:4002")  # the port follows the last colon
    world.set("donor/2", b"10.0.0.3:4003")
    world.set("donors", b"3")
    found = [donor_address(name, 4, KEY) for _ in range(4)]
    assert found == [("10.0.0.1", 4001), ("fd00::2", 4002), ("10.0.0.3", 4003), ("10.0.0.1", 4001)]
    assert int(world.get("followers")) == 4


def test_a_world_that_cannot_be_followed_says_so_at_once(store: Any) -> None:
    with pytest.raises(FollowingEnded, match=r"^no rank can be followed$"):
        donor_address(store[0], 4, KEY)


def test_a_store_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "HANDSHAKE_S", 0.0)
    with pytest.raises(FollowingEnded, match=r"^nobody listens at 127\.0\.0\.1:1$"):
        donor_address("127.0.0.1:1", 4, KEY)
    with pytest.raises(TimeoutError, match=r"^the agent at 127\.0\.0\.1:1, which serves the store, cannot be reached"):
        donor_address(f"{SERVED_BY_AGENT}127.0.0.1:1", 4, KEY)


def test_a_newcomer_is_a_client_of_the_store_that_waits_no_longer_than_for_a_handshake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listening, made = mock.Mock(return_value=True), mock.Mock()
    made.return_value.has.return_value = False
    monkeypatch.setattr(follower, "wait_until_listening", listening)
    monkeypatch.setattr(follower, "TorchStore", made)
    with pytest.raises(FollowingEnded):
        donor_address("fd00::1:29500", 4, KEY)
    assert listening.mock_calls == [mock.call("fd00::1", 29500, 5.0, 1)]
    assert made.mock_calls[0] == mock.call("fd00::1", 29500, "elastipod/world/4", 5.0)
