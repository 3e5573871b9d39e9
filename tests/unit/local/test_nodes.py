"""Nodes that do not start: the reason is told, however much else fails, and what was made of them goes away."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastipod_local import network, nodes
from elastipod_local.addressing import Addressing
from elastipod_local.controlplane import ControlPlane
from elastipod_local.errors import CommandError, LocalClusterError
from elastipod_local.node import Disk
from elastipod_local.nodes import Nodes
from elastipod_local.processes import ProcessId
from elastipod_local.state import ClusterState, NodeOptions, NodePhase, NodeRecord, Phase, StateFile

DISK = Disk(Path("seed"), Path("site-packages"))
ADDRESSING = Addressing.for_block(3)


class Server:
    """An API server that lists these nodes."""

    def __init__(self, *ready: str) -> None:
        self._ready = ready

    def get(self, path: str) -> dict[str, Any]:
        condition = {"type": "Ready", "status": "True"}
        return {"items": [{"metadata": {"name": name}, "status": {"conditions": [condition]}} for name in self._ready]}


@pytest.fixture
def alive() -> ProcessId:
    found = ProcessId.of(os.getpid())
    assert found is not None
    return found


@pytest.fixture
def ended() -> ProcessId:
    with subprocess.Popen(["true"]) as child:
        return ProcessId(child.pid, 0)


@pytest.fixture
def files(tmp_path: Path, alive: ProcessId) -> StateFile:
    found = StateFile(tmp_path)
    running = {"etcd": alive, "kube-apiserver": alive}
    found.save(ClusterState("one", Phase.STARTING, ADDRESSING, NodeOptions(slots=0), control_plane=running))
    return found


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def changed(files: StateFile, told: list[str]) -> Nodes:
    return Nodes(files, ControlPlane(files.folder, "one", ADDRESSING, {}), told.append)


@pytest.fixture
def erased(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The nodes whose processes and disk were removed; nothing of them exists."""
    names: list[str] = []
    monkeypatch.setattr(
        Nodes, "_end", lambda self, name: SimpleNamespace(delete=lambda: names.append(name)), raising=True
    )
    return names


def refuse(said: str) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise CommandError(said, 1, said)

    return fail


def test_an_api_server_that_is_gone_hides_no_first_error_and_keeps_no_node(
    changed: Nodes, files: StateFile, told: list[str], erased: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Nodes, "_start_all", refuse("node-1 ended at its start"))
    monkeypatch.setattr(Nodes, "_kubectl", refuse("connection refused"))
    with pytest.raises(LocalClusterError, match="node-1 ended at its start"):
        changed.add(3, DISK)
    assert erased == ["node-1", "node-2", "node-3"]
    assert files.read().nodes == {}
    assert told == ["the Node objects of node-1, node-2, node-3 could not be deleted: connection refused"]


def test_a_node_that_cannot_be_removed_keeps_no_other_one(
    changed: Nodes, files: StateFile, told: list[str], erased: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(self: Nodes, name: str) -> Any:
        if name == "node-1":
            raise LocalClusterError("waited 30 s for the processes of node-1 to be gone")
        return SimpleNamespace(delete=lambda: erased.append(name))

    monkeypatch.setattr(Nodes, "_start_all", refuse("no room"))
    monkeypatch.setattr(Nodes, "_kubectl", lambda *_, **__: "")
    monkeypatch.setattr(Nodes, "_end", end)
    with pytest.raises(LocalClusterError, match="no room"):
        changed.add(2, DISK)
    assert (erased, list(files.read().nodes)) == (["node-2"], ["node-1"])
    assert told == ["node-1 could not be removed: waited 30 s for the processes of node-1 to be gone"]


def starting(files: StateFile, alive: ProcessId, *names: str) -> list[str]:
    for index, name in enumerate(names, start=1):
        record = NodeRecord(index, NodePhase.UP, alive, alive)
        files.update(lambda state, name=name, record=record: state.with_node(name, record))  # type: ignore[misc]
    return list(names)


@pytest.mark.parametrize("role", ["etcd", "kube-apiserver"])
def test_nodes_wait_for_no_control_plane_that_has_ended(
    role: str, changed: Nodes, files: StateFile, alive: ProcessId, ended: ProcessId, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = starting(files, alive, "node-1")
    files.update(lambda state: state.with_process(role, ended))
    (files.folder / "logs").mkdir()
    (files.folder / "logs" / f"{role}.log").write_text("killed: out of memory\n")
    monkeypatch.setattr(ControlPlane, "api_server", Server())
    with pytest.raises(LocalClusterError, match=f"{role} ended: killed: out of memory"):
        changed._wait_ready(names, None)


def test_a_long_wait_tells_which_nodes_are_not_ready(
    changed: Nodes, files: StateFile, told: list[str], alive: ProcessId, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = starting(files, alive, "node-1", "node-2", "node-3")
    monkeypatch.setattr(ControlPlane, "api_server", Server("node-2"))
    monkeypatch.setattr(nodes, "READY_DEADLINE_S", 0.3)
    monkeypatch.setattr(nodes, "REPORT_EVERY_S", 0.05)
    monkeypatch.setattr(network, "refusal", lambda *_: "")
    with pytest.raises(LocalClusterError, match=r"waited 0\.3 s for node-1, node-3 to be Ready; logs: .*/logs$"):
        changed._wait_ready(names, None)
    assert told[1].startswith("  node-1, node-3 not Ready yet, ")


def test_a_firewall_that_drops_what_nodes_send_is_named(
    changed: Nodes, files: StateFile, alive: ProcessId, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = starting(files, alive, "node-1")
    monkeypatch.setattr(ControlPlane, "api_server", Server())
    monkeypatch.setattr(nodes, "READY_DEADLINE_S", 0.0)
    monkeypatch.setattr(network, "refusal", lambda pid, address, port: "Timed out" if port == 6443 else "")
    with pytest.raises(LocalClusterError) as late:
        changed._wait_ready(names, None)
    assert "node-1 cannot reach the API server (198.18.96.1:6443 timed out)" in str(late.value)
    assert "let this machine's firewall accept what comes in on elastipod3" in str(late.value)
