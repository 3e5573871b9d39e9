"""The bytes that ranks exchange for a checkpoint, and what rank 0 makes of them."""

from __future__ import annotations

import json
import struct
from typing import Any
from unittest import mock

import pytest

from elastipod.checkpoint import heartbeat
from elastipod.checkpoint.heartbeat import HeartbeatThread
from elastipod.checkpoint.hierarchy import HierarchicalCollectives, Hierarchy, _join, _split
from elastipod.checkpoint.rank_connections import RankConnections
from elastipod.checkpoint.reductions import (
    broadcast_result,
    encode_answer,
    first_message,
    messages_by_receiver,
    reduced,
    scatter_result,
)
from elastipod.message_slots import parse_slot, slot_of

FLAT = Hierarchy(3, 3)


@pytest.mark.parametrize(
    ("world_size", "size"), [(1, 1), (16, 16), (17, 8), (64, 8), (65, 16), (256, 16), (257, 24), (1024, 32)]
)
def test_subgroups_are_of_whole_nodes(world_size: int, size: int) -> None:
    assert Hierarchy.of(world_size) == Hierarchy(world_size, size)


def test_members_follow_their_leader() -> None:
    found = Hierarchy(20, 8)
    assert (list(found.leaders), found.members(9), found.members(16)) == ([0, 8, 16], range(8, 16), range(16, 20))


def test_words_are_joined_with_their_lengths() -> None:
    words = [b"one", b"", b"three"]
    assert _join(words) == struct.pack("<4Q", 3, 3, 0, 5) + b"onethree"
    assert (_split(_join(words)), _split(_join([]))) == (words, [])


def test_a_leader_passes_on_what_its_subgroup_says() -> None:
    subgroup, leaders = mock.Mock(), mock.Mock()
    subgroup.gather.return_value = [b"a", b"b"]
    leaders.gather.return_value = [_join([b"a", b"b"]), _join([b"c"])]
    leaders.broadcast.return_value = b"of rank 0"
    leaders.scatter.return_value = _join([b"x", b"y"])
    found = HierarchicalCollectives(subgroup, leaders)
    assert found.gather(b"a") == [b"a", b"b", b"c"]
    assert found.broadcast(b"mine") is subgroup.broadcast.return_value
    assert found.scatter([b"p", b"q", b"r"], Hierarchy(3, 2)) is subgroup.scatter.return_value
    assert leaders.mock_calls == [
        mock.call.gather(_join([b"a", b"b"])), mock.call.broadcast(b"mine"),
        mock.call.scatter([_join([b"p", b"q"]), _join([b"r"])]),
    ]  # fmt: skip
    assert subgroup.mock_calls == [
        mock.call.gather(b"a"),
        mock.call.broadcast(b"of rank 0"),
        mock.call.scatter([b"x", b"y"]),
    ]
    found.scatter([], Hierarchy(3, 2))
    assert leaders.scatter.call_args == mock.call([])
    alone = HierarchicalCollectives(subgroup, None)
    assert alone.gather(b"a") == [b"a", b"b"]
    alone.broadcast(b"mine")
    alone.scatter([b"p"], Hierarchy(1, 1))
    assert subgroup.mock_calls[-2:] == [mock.call.broadcast(b"mine"), mock.call.scatter([b"p"])]


def test_a_slot_begins_with_the_length_of_the_message() -> None:
    for length in (0, 1, 1015, 1016, 1017, 3000):
        data = bytes(at % 251 for at in range(length))
        slot = slot_of(data)
        assert len(slot) == 1024
        assert slot[:8] == struct.pack("<Q", length)
        assert parse_slot(slot) == (data[:1016], length - 1016)


def test_the_first_failure_counts_and_values_are_combined_by_rank() -> None:
    def answer(**fields: Any) -> bytes:
        return encode_answer(fields)

    assert answer(value=[1, None]) == b'{"value":[1,null]}'
    assert reduced([answer(value=1), answer(value=2)], lambda values: values) == {"value": [1, 2]}
    failed = [answer(value=1), answer(failed="full"), answer(failed="too")]
    assert reduced(failed, lambda values: values) == {"failed": "rank 1: full"}
    assert reduced([answer(fenced="replaced")], lambda values: values) == {"fenced": "replaced"}

    def refuse(values: list[Any]) -> None:
        raise OSError(f"no room for {values}")

    assert reduced([answer(value=1)], refuse) == {"failed": "no room for [1]"}
    assert (first_message([None, "a", "b"]), first_message([None]), first_message([])) == ("a", None, None)


def test_messages_go_to_their_receivers_and_a_failure_to_all() -> None:
    messages = messages_by_receiver([[[1, "a"], [2, "b"]], [], [[1, "c"]]])
    assert messages == {1: [(0, "a"), (2, "c")], 2: [(0, "b")]}
    line = mock.Mock()
    scatter_result(line, {"value": messages}, FLAT)
    failure = {"failed": "rank 1: full"}
    scatter_result(line, failure, FLAT)
    scatter_result(line, None, FLAT)
    assert line.mock_calls == [
        mock.call.scatter([b'{"value":[]}', b'{"value":[[0,"a"],[2,"c"]]}', b'{"value":[[0,"b"]]}'], FLAT),
        mock.call.scatter([json.dumps(failure, separators=(",", ":")).encode()] * 3, FLAT),
        mock.call.scatter([], FLAT),
    ]
    assert scatter_result(None, {"value": {0: ["x"]}}, Hierarchy(1, 1)) == b'{"value":["x"]}'
    broadcast_result(line, {"value": 1}, FLAT)
    broadcast_result(line, None, FLAT)
    assert line.mock_calls[3:] == [mock.call.broadcast(b'{"value":1}'), mock.call.broadcast(b"")]
    assert broadcast_result(None, {"value": 1}, FLAT) == b'{"value":1}'


def test_a_rank_at_work_says_so_until_all_have_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.0)
    sent: list[bytes] = []

    def send(answer: bytes) -> bytes:
        sent.append(answer)
        if len(sent) == 2:
            thread.set_answer(b"done")
        return b"result" if len(sent) == 4 else b""

    thread = object.__new__(HeartbeatThread)
    with mock.patch.object(HeartbeatThread, "start"):
        HeartbeatThread.__init__(thread, send)
    assert (thread.name, thread.daemon, thread.result, thread.failure) == ("elastipod-checkpoint-talk", True, b"", None)
    thread.run()
    assert sent == [b"", b"", b"done", b"done"]
    assert (thread.result, thread.failure) == (b"result", None)


@pytest.mark.parametrize("at", [7200.0, 7200.5])
def test_work_has_a_limit(monkeypatch: pytest.MonkeyPatch, at: float) -> None:
    now = [0.0]

    def send(_: bytes) -> bytes:
        if now[0]:
            raise ConnectionError("gone")
        now[0] = at
        return b""

    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.0)
    monkeypatch.setattr("elastipod.checkpoint.heartbeat.time.monotonic", lambda: now[0])
    with mock.patch.object(HeartbeatThread, "start"):
        thread = HeartbeatThread(send)
    thread.run()
    assert str(thread.failure) == ("gone" if at == 7200.0 else "its part was not done within 7200 s")


def test_connections_are_named_by_who_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def connect(store: Any, rank: int, size: int, timeout_s: float) -> Any:
        asked.append((store, rank, size, timeout_s))
        return mock.Mock(group=f"group of {store}")

    monkeypatch.setattr("elastipod.checkpoint.rank_connections.GlooCollectives.connect", connect)
    monkeypatch.setattr(
        "elastipod.checkpoint.rank_connections.dist.distributed_c10d.PrefixStore", lambda name, store: f"{store}/{name}"
    )
    found = RankConnections("job", 2, Hierarchy(6, 2))
    assert asked == [("job/subgroup 2", 0, 2, 60.0), ("job/leaders", 1, 3, 60.0)]
    assert [found.to(3), found.to(5), found.to(5), found.to(0)] == [
        ("group of job/subgroup 2", 1), ("group of job/pair [2, 5]", 1), ("group of job/pair [2, 5]", 1),
        ("group of job/pair [0, 2]", 0),
    ]  # fmt: skip
    assert asked[2:] == [("job/pair [2, 5]", 0, 2, 60.0), ("job/pair [0, 2]", 1, 2, 60.0)]
    RankConnections("job", 3, Hierarchy(6, 2))
    assert asked[4:] == [("job/subgroup 2", 1, 2, 60.0)]
    RankConnections("job", 0, Hierarchy(2, 2))
    assert asked[5:] == [("job/subgroup 0", 0, 2, 60.0)]
