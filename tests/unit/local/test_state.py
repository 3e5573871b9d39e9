"""What is written down about a cluster: it survives the round trip, and one process at a time works on it."""

from __future__ import annotations

import json
import os
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastipod_local import state as state_module
from elastipod_local.addressing import Addressing
from elastipod_local.errors import LocalClusterError
from elastipod_local.kueue_config import KueueOptions
from elastipod_local.processes import ProcessId
from elastipod_local.state import (
    ClusterState,
    NodeOptions,
    NodePhase,
    NodeRecord,
    Phase,
    StateFile,
    decode,
    encode,
    exclusive,
)

processes = st.builds(ProcessId, st.integers(1, 2**22), st.integers(0, 2**40))
nodes = st.builds(
    NodeRecord, st.integers(1, 30), st.sampled_from(NodePhase), st.none() | processes, st.none() | processes
)
states = st.builds(
    ClusterState,
    name=st.just("x"),
    phase=st.sampled_from(Phase),
    addressing=st.one_of(
        st.builds(Addressing.for_block, st.integers(0, 15)), st.just(Addressing(None, IPv4Address("127.18.128.9")))
    ),
    options=st.builds(NodeOptions, st.none() | st.just(1.5), st.none() | st.integers(1, 9999), st.integers(0, 8)),
    images=st.sampled_from(["", "0123abcd"]),
    control_plane=st.dictionaries(st.sampled_from(["etcd", "kube-apiserver"]), processes),
    nodes=st.dictionaries(st.sampled_from(["node-1", "node-2"]), nodes),
    kueue=st.none()
    | st.builds(
        KueueOptions,
        st.lists(st.sampled_from(["batch/job", "pod"])).map(tuple),
        st.just(()) | st.just(("Job.v1.example.com",)),
        st.just({}) | st.just({"waitForPodsReady": {"timeout": "5s"}}),
    ),
)
STATE = ClusterState("x", Phase.STARTING, Addressing.for_block(0))


@given(states)
def test_a_state_reads_back_as_it_was_written(state: ClusterState) -> None:
    assert decode(encode(state)) == state


def test_a_state_from_before_there_was_kueue_reads_as_without() -> None:
    record = json.loads(encode(STATE))
    del record["kueue"]
    assert decode(json.dumps(record)) == STATE


def test_no_file_is_no_cluster(tmp_path: Path) -> None:
    assert StateFile(tmp_path).load() is None


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", json.dumps({**json.loads(encode(STATE)), "format": 99}), '{"format": 1}']
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    files = StateFile(tmp_path)
    files.path.write_text(text)
    with pytest.raises(LocalClusterError, match=r"state\.json cannot be read"):
        files.load()


def test_an_update_sees_what_was_written_last(tmp_path: Path) -> None:
    files = StateFile(tmp_path)
    files.save(STATE)
    files.update(lambda state: state.with_node("node-1", NodeRecord(1, NodePhase.UP)))
    files.update(lambda state: state.with_process("etcd", ProcessId(7, 8)))
    assert files.load() == STATE.with_node("node-1", NodeRecord(1, NodePhase.UP)).with_process("etcd", ProcessId(7, 8))


def test_an_update_of_a_cluster_that_is_gone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalClusterError, match="is gone"):
        StateFile(tmp_path).update(lambda state: state)


def test_a_second_holder_of_the_lock_is_told_who_has_it(tmp_path: Path) -> None:
    files = StateFile(tmp_path)
    with (
        files.locked(),
        pytest.raises(LocalClusterError, match=r"another elastipod process \(pid \d+\)"),
        files.locked(),
    ):
        pass
    with exclusive(tmp_path / "lock", wait_s=0):
        pass


def test_a_long_wait_for_a_lock_tells_for_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "TELL_AFTER_S", 0.1)
    monkeypatch.setattr(state_module, "TELL_EVERY_S", 60.0)
    told: list[str] = []
    with (
        exclusive(tmp_path / "lock", wait_s=0),
        pytest.raises(LocalClusterError),
        exclusive(tmp_path / "lock", wait_s=0.3, progress=told.append),
    ):
        pass
    assert told == [f"  waiting for another elastipod process (pid {os.getpid()}) that works on {tmp_path}, 0 s"]


def test_a_lock_that_is_free_is_taken_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "TELL_AFTER_S", 0.0)
    told: list[str] = []
    with exclusive(tmp_path / "lock", wait_s=9, progress=told.append):
        pass
    assert told == []


def test_a_lock_file_follows_no_link_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    """Who could read it could hold the lock, and a link of his would have us empty another file."""
    (tmp_path / "precious").write_text("content")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"), exclusive(tmp_path / "lock", wait_s=0):
        pass
    assert (tmp_path / "precious").read_text() == "content"
    with exclusive(tmp_path / "other", wait_s=0):
        assert (tmp_path / "other").stat().st_mode & 0o777 == 0o600


def test_a_lock_of_a_shorter_pid_reads_whole(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("12345678901\n")
    with exclusive(tmp_path / "lock", wait_s=0):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
