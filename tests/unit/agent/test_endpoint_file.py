"""The file by which a command in the pod finds its agent, and what is left of agents that were killed."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from elastipod_agent import endpoint_file
from elastipod_agent.endpoint_file import AgentEndpoint, fast_directory, find_agents, publish_endpoint

HERE = AgentEndpoint(pid=7, host="::", port=7000, job="team/a")


def test_the_file_is_in_memory_where_it_may_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_file, "_SHARED_MEMORY", tmp_path)
    assert fast_directory() == str(tmp_path)
    monkeypatch.setattr(endpoint_file, "_SHARED_MEMORY", tmp_path / "none")
    assert fast_directory() is None


@pytest.mark.parametrize(("granted", "is_used"), [(os.W_OK | os.X_OK, True), (os.W_OK, False), (os.X_OK, False)])
def test_a_memory_folder_must_take_new_folders(granted: int, is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: mode & granted == mode)
    assert (fast_directory() is not None) is is_used


def test_the_file_is_complete_as_soon_as_it_can_be_seen(tmp_path: Path) -> None:
    folder = tmp_path / "elastipod-a"
    folder.mkdir()
    with publish_endpoint(folder, HERE):
        assert json.loads((folder / "agent.json").read_text("utf-8")) == asdict(HERE)
        assert os.listdir(folder) == ["agent.json"]
        assert find_agents([tmp_path]) == [HERE]
    assert find_agents([tmp_path]) == [], "nobody holds the lock any more"


def test_both_usual_places_are_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_file, "_SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    for place in ("shm", "tmp"):
        (tmp_path / place / "elastipod-a").mkdir(parents=True)
    with publish_endpoint(tmp_path / "shm/elastipod-a", HERE), publish_endpoint(tmp_path / "tmp/elastipod-a", HERE):
        assert find_agents() == [HERE, HERE]
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "shm"))
        assert find_agents() == [HERE]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", "7", '{"pid": 1, "host": "h", "port": 2}', '{"pid": "x", "host": "h", "port": 2, "job": "j"}',
     '{"pid": null, "host": "h", "port": 2, "job": "j"}', "\udcff"],
)  # fmt: skip
def test_a_file_that_is_no_agents_is_passed_over(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "elastipod-a"
    folder.mkdir()
    with publish_endpoint(folder, HERE) as held:
        held.seek(0)
        held.truncate()
        os.write(held.fileno(), text.encode("utf-8", "surrogateescape"))
        assert find_agents([tmp_path]) == []


def test_a_folder_that_vanishes_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elastipod-a").mkdir()
    (tmp_path / "elastipod-a" / "agent.json").symlink_to("gone")
    for name in ("elastipod-b", "elastipod-c"):
        (tmp_path / name).mkdir()
        publish_endpoint(tmp_path / name, HERE).close()
    assert find_agents([tmp_path]) == []
    monkeypatch.setattr(Path, "glob", lambda path, pattern: sorted(path.iterdir()) and [
        path / "elastipod-a/agent.json", path / "elastipod-b/agent.json", path / "elastipod-none/agent.json",
        path / "elastipod-c/agent.json",
    ])  # fmt: skip
    endpoint_file.remove_stale_folders(tmp_path)
    assert os.listdir(tmp_path) == ["elastipod-a"], "the others are removed although one is gone"


@pytest.mark.parametrize(
    ("host", "address"),
    [("", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.0.0.7", "10.0.0.7"), ("fd00::7", "fd00::7")],
)
def test_where_this_host_reaches_an_agent(host: str, address: str) -> None:
    assert AgentEndpoint(pid=1, host=host, port=1, job="").address == address
