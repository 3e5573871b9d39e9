"""Where a newcomer finds a rank to follow: in the store of those who train."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from tests.patience import PATIENCE_S

from elastipod.in_memory import follower
from elastipod.in_memory.follow_wire import FollowingEnded
from elastipod.in_memory.follower import donor_address


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(follower, "HANDSHAKE_S", PATIENCE_S)  # a busy machine may pause
    limit = timedelta(seconds=PATIENCE_S)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=limit, wait_for_workers=False)  # type: ignore[attr-defined]


def test_newcomers_are_dealt_out_to_the_donors_of_their_generation(store: Any) -> None:
    world = dist.PrefixStore("elastipod/world/4", store)  # type: ignore[attr-defined]
    dist.PrefixStore("elastipod/world/3", store).set("donors", "1")  # type: ignore[attr-defined]
    world.set("donor/0", "10.0.0.1:4001")
    world.set("donor/1", "fd00::2:4002")  # the port follows the last colon
    world.set("donor/2", "10.0.0.3:4003")
    world.set("donors", "3")
    found = [donor_address(f"127.0.0.1:{store.port}", 4) for _ in range(4)]
    assert found == [("10.0.0.1", 4001), ("fd00::2", 4002), ("10.0.0.3", 4003), ("10.0.0.1", 4001)]
    assert int(world.get("followers")) == 4


def test_a_world_that_cannot_be_followed_says_so_at_once(store: Any) -> None:
    with pytest.raises(FollowingEnded, match=r"^no rank can be followed$"):
        donor_address(f"127.0.0.1:{store.port}", 4)


def test_a_store_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "HANDSHAKE_S", 0.0)
    with pytest.raises(FollowingEnded, match=r"^nobody listens at 127\.0\.0\.1:1$"):
        donor_address("127.0.0.1:1", 4)


def test_a_newcomer_is_a_client_of_the_store_that_waits_no_longer_than_for_a_handshake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listening, made = mock.Mock(return_value=True), mock.Mock()
    monkeypatch.setattr(follower, "wait_until_listening", listening)
    monkeypatch.setattr(dist, "TCPStore", made)
    keys = mock.Mock(check=lambda _: False)
    monkeypatch.setattr(dist, "PrefixStore", mock.Mock(return_value=keys))
    with pytest.raises(FollowingEnded):
        donor_address("fd00::1:29500", 4)
    assert listening.mock_calls == [mock.call("fd00::1", 29500, 5.0, 1)]
    limit = timedelta(seconds=5)
    assert made.mock_calls == [mock.call("fd00::1", 29500, is_master=False, timeout=limit, wait_for_workers=False)]
