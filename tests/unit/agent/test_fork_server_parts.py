"""Parts of the fork server that can be tried without one: messages, what has changed since an import, what may be shared."""

from __future__ import annotations

import errno
import importlib
import multiprocessing.process
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastipod_agent.fork_server import channel, forking, preload, program
from elastipod_agent.fork_server.import_snapshot import ImportSnapshot
from elastipod_agent.fork_server.process_title import ProcessTitle

MESSAGES = st.lists(st.dictionaries(st.text(), st.text() | st.integers()), max_size=5)


@pytest.mark.slow
@given(messages=MESSAGES, cuts=st.lists(st.integers(1, 40), min_size=1))
def test_messages_arrive_whole_however_they_are_cut(messages: list[dict[str, object]], cuts: list[int]) -> None:
    wire = b"".join(channel.pack(message) for message in messages)
    lines, found = channel.MessageReader(), list[dict[str, object]]()
    while wire:
        size = cuts[len(wire) % len(cuts)]
        found += lines.feed(wire[:size])
        wire = wire[size:]
    assert found == messages


def test_environments_that_are_no_text_pass_unharmed() -> None:
    value = os.fsdecode(b"\xff\xfe caf\xc3\xa9")
    assert channel.MessageReader().feed(channel.pack({"environ": {"X": value}})) == [{"environ": {"X": value}}]


@pytest.mark.parametrize("wire", [b"{\n", b"[1]\n", b"\xff\n"])
def test_what_is_no_message_is_refused(wire: bytes) -> None:
    with pytest.raises(channel.BadMessage):
        channel.MessageReader().feed(wire)


def test_a_message_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_MESSAGE", 100)
    with pytest.raises(channel.BadMessage):
        channel.MessageReader().feed(b"x" * 101)
    with pytest.raises(channel.BadMessage):
        channel.pack({"x": "x" * 100})


def test_descriptors_come_with_their_message_and_the_end_is_told() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull, "rb") as file:
        socket.send_fds(ours, [channel.pack({"fork": 1})], [file.fileno()])
        received = channel.receive(theirs)
        assert received is not None
        message, descriptors = received
        assert message == {"fork": 1}
        assert [os.readlink(f"/proc/self/fd/{one}") for one in descriptors] == [os.devnull]
        channel.close_all(descriptors)
        ours.close()
        assert channel.receive(theirs) is None


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImportSnapshot:
    """A package with one part, a module, and a folder of installed packages, noted as imported."""
    (tmp_path / "user" / "pack").mkdir(parents=True)
    for name in ("pack/__init__.py", "pack/part.py", "single.py"):
        (tmp_path / "user" / name).write_text("", "utf-8")
    (tmp_path / "site-packages").mkdir()
    for name, file in (("pack", "pack/__init__.py"), ("pack.part", "pack/part.py"), ("single", "single.py")):
        module = ModuleType(name)
        module.__file__ = str(tmp_path / "user" / file)
        if name == "pack":
            module.__path__ = [str(tmp_path / "user" / "pack")]
        monkeypatch.setitem(sys.modules, name, module)
    return ImportSnapshot.now([str(tmp_path / "user"), str(tmp_path / "site-packages")], {"pack", "tried_in_vain"})


@pytest.mark.parametrize(
    ("path", "is_change"),
    [
        pytest.param("user/pack/part.py", True, id="a part of a package of which all counts"),
        pytest.param("user/single.py", True, id="a module"),
        pytest.param("user/tried_in_vain.py", True, id="a module that was missing"),
        pytest.param("user/json.py", True, id="a module that stands before an imported one"),
        pytest.param("site-packages/other-1.0.dist-info", True, id="an installed package"),
        pytest.param("user/checkpoint.pt", False, id="a file of the run"),
        pytest.param("user/json.log", False, id="a file named like a module"),
        pytest.param("user/new.py", False, id="a module that nobody asked for"),
    ],
)
def test_only_what_an_import_would_notice_counts_as_a_change(
    path: str, is_change: bool, imported: ImportSnapshot, tmp_path: Path
) -> None:
    assert imported.changed() is None
    (tmp_path / path).write_text("changed", "utf-8")
    why = imported.changed()
    assert (why is not None) == is_change
    assert why is None or str(tmp_path / path) in why


def test_files_may_be_shared_and_connections_may_not(tmp_path: Path) -> None:
    source, sink = os.pipe()
    ours, theirs = socket.socketpair()
    with open(tmp_path / "file", "w") as file, open(os.devnull) as null, ours, theirs:
        assert preload.describe_unshareable(file.fileno()) is None
        assert preload.describe_unshareable(null.fileno()) is None
        assert str(preload.describe_unshareable(source)).startswith("pipe:")
        assert str(preload.describe_unshareable(ours.fileno())).startswith("socket:")
    os.close(source)
    os.close(sink)
    assert preload.describe_unshareable(source) is None, "closed meanwhile"


@pytest.fixture
def kept_random_state() -> Iterator[None]:
    """Give back the generators and the key of this process after the test."""
    numbers, torch_numbers = np.random.get_state(), torch.get_rng_state()
    process = multiprocessing.process.current_process()
    key = process.authkey
    yield
    process.authkey = key
    np.random.set_state(numbers)
    torch.set_rng_state(torch_numbers)


@pytest.mark.usefixtures("kept_random_state")
def test_workers_that_inherit_the_same_random_state_draw_different_numbers() -> None:
    draws = []
    for _ in range(3):
        np.random.seed(7)
        torch.default_generator.manual_seed(7)
        forking.reseed()
        draws.append((np.random.rand(), torch.rand(1).item(), bytes(multiprocessing.process.current_process().authkey)))
    assert [len(set(kind)) for kind in zip(*draws, strict=True)] == [3, 3, 3]


def test_a_fork_that_fails_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that stays open in the server is a connection that its workers would share, and would keep it from forking ever again."""
    monkeypatch.setattr(os, "fork", mock.Mock(side_effect=OSError(errno.EAGAIN, "Resource temporarily unavailable")))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(forking.ForkFailed, match=r"^fork: Resource temporarily unavailable$"):
        forking.fork_workers([])
    assert os.listdir("/proc/self/fd") == before


def test_a_fork_does_all_that_needs_no_order_before_it_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been forked long before its start, which then waits for the rest."""
    seen: list[str] = []

    def closed(_: socket.socket) -> None:
        seen.append("agent's modules" if "elastipod_agent.agent" in sys.modules else "waits")

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(sys, "modules", {**sys.modules, "elastipod_agent.agent": ModuleType("agent")})
    monkeypatch.setattr(os, "setsid", lambda: None)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(forking, "reseed", lambda: seen.append("seeds"))
    monkeypatch.setattr(importlib, "invalidate_caches", lambda: seen.append("forgets files"))
    monkeypatch.setattr(channel, "receive", closed)
    ours, theirs = socket.socketpair()
    title = ProcessTitle((0, 0), (0, 0))
    with ours, theirs, pytest.raises(SystemExit):
        forking.become_worker(theirs, forking.InheritedState(os.getpid(), {}, {}, title))
    assert seen == ["seeds", "forgets files", "waits"]


def test_where_a_script_finds_its_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "train.py").touch()
    (tmp_path / "link.py").symlink_to("real/train.py")
    monkeypatch.chdir(tmp_path)
    assert program.first_path(program.FILE, "link.py") == str(tmp_path / "real")
    assert program.first_path(program.FILE, "real") == str(tmp_path / "real")
    assert program.first_path(program.MODULE, "train") == str(tmp_path)
    assert program.first_path(program.CODE, "pass") == ""
