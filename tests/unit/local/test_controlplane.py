"""A control plane that does not come up: the process that ended is named, with the end of its own log."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from elastipod_local.addressing import Addressing
from elastipod_local.controlplane import ControlPlane
from elastipod_local.errors import LocalClusterError
from elastipod_local.processes import ProcessId
from elastipod_local.roles import Roles
from elastipod_local.state import ClusterState, NodeOptions, Phase, StateFile

ROLES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")


@dataclass
class Server:
    """An API server that says yes to some paths."""

    answers: tuple[str, ...] = ()

    def answers_ok(self, path: str) -> bool:
        return path.startswith(self.answers)


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
def plane(tmp_path: Path) -> ControlPlane:
    (tmp_path / "logs").mkdir()
    for role in ROLES:
        (tmp_path / "logs" / f"{role}.log").write_text(f"bind of {role}: address already in use\n")
    return ControlPlane(tmp_path, "one", Addressing.on_loopback(Random(1)), {})


def serve(monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
    monkeypatch.setattr(ControlPlane, "api_server", Server(answers))


@pytest.mark.parametrize("role", ["etcd", "kube-apiserver"])
def test_what_the_api_server_needs_is_named_when_it_ends(
    role: str, plane: ControlPlane, alive: ProcessId, ended: ProcessId, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch)
    running = {"etcd": alive, "kube-apiserver": alive, role: ended}
    with pytest.raises(LocalClusterError, match=f"^{role} ended at its start: bind of {role}: address already in use$"):
        plane.wait_serving(running)


@pytest.mark.parametrize("role", ROLES)
def test_every_process_is_watched_until_pods_can_be_created(
    role: str, plane: ControlPlane, alive: ProcessId, ended: ProcessId, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, "/readyz")
    with pytest.raises(LocalClusterError, match=f"^{role} ended at its start: bind of {role}"):
        plane.wait_ready({**dict.fromkeys(ROLES, alive), role: ended})


def test_a_role_that_was_killed_on_purpose_keeps_no_other_from_its_start(
    plane: ControlPlane, alive: ProcessId, ended: ProcessId, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, "/")
    plane.wait_ready({**dict.fromkeys(ROLES, alive), "kube-scheduler": ended})


def test_a_role_is_started_while_others_that_were_killed_stay_dead(
    plane: ControlPlane, alive: ProcessId, ended: ProcessId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An API server that has just come up may not know the account at once."""
    answers = iter([False, True])
    server = Server(("/readyz",))
    monkeypatch.setattr(server, "answers_ok", lambda path: path == "/readyz" or next(answers))
    monkeypatch.setattr(ControlPlane, "api_server", server)
    monkeypatch.setattr(ControlPlane, "start", lambda self, role: alive)
    files = StateFile(plane.folder)
    running = {**dict.fromkeys(ROLES, alive), "kube-apiserver": ended, "kube-scheduler": ended}
    files.save(ClusterState("one", Phase.UP, plane.addressing, NodeOptions(), control_plane=running))
    Roles(files, plane).start("kube-apiserver")
    assert files.read().control_plane == {**running, "kube-apiserver": alive}


@pytest.mark.parametrize("dead", ["etcd", "kube-apiserver"])
def test_a_role_is_started_while_nothing_serves(
    dead: str, plane: ControlPlane, alive: ProcessId, ended: ProcessId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both may have been killed; then one of them comes first, and nobody can wait for the API server yet."""
    serve(monkeypatch, "/")
    monkeypatch.setattr(ControlPlane, "start", lambda self, role: alive)
    files = StateFile(plane.folder)
    running = {**dict.fromkeys(ROLES, alive), dead: ended, "kube-scheduler": ended}
    files.save(ClusterState("one", Phase.UP, plane.addressing, NodeOptions(), control_plane=running))
    Roles(files, plane).start("kube-scheduler")
    assert files.read().control_plane["kube-scheduler"] == alive
    Roles(files, plane).start(dead)
    assert files.read().control_plane == dict.fromkeys(ROLES, alive)
