"""Which processes are a worker's, read from a made-up /proc."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from elastipod_agent.workers.process_table import catches, descendants, snapshot
from elastipod_agent.workers.process_tree import members

COOKIE = "ELASTIPOD_WORKER_FILE=/x"


def add(proc: Path, pid: int, parent: int, session: int, *, state: str = "S", environ: str = "") -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} (a ) name) {state} {parent} {pid} {session} 0\n", "utf-8")
    (proc / str(pid) / "environ").write_bytes(b"\0".join(one.encode() for one in ("HOME=/", environ)))


def test_members_are_found_by_session_or_environment_below_the_agent(tmp_path: Path) -> None:
    me = os.getpid()
    add(tmp_path, me, 1, me)
    add(tmp_path, 900_001, me, 900_001)  # the worker
    add(tmp_path, 900_002, 900_001, 900_001)  # its child
    add(tmp_path, 900_003, me, 900_003, environ=COOKIE)  # an orphan in a session of its own
    add(tmp_path, 900_004, me, 900_004)  # left by a pre-train script
    add(tmp_path, 900_005, 1, 900_005, environ=COOKIE)  # not below this agent
    add(tmp_path, 900_006, me, 900_001, state="Z")  # dead already
    add(tmp_path, 900_007, 900_006, 900_001)  # its child, as read before that one died
    (tmp_path / "self").mkdir()
    assert sorted(members({900_001}, COOKIE, tmp_path)) == [900_001, 900_002, 900_003, 900_007]
    assert {one.pid for one in descendants(snapshot(tmp_path), 900_001)} == {900_002}


def test_a_worker_that_was_just_forked_is_found_before_it_has_a_session(tmp_path: Path) -> None:
    me = os.getpid()
    add(tmp_path, me, 1, me)
    add(tmp_path, 900_001, me, me)  # the fork server's
    add(tmp_path, 900_002, me, me)
    assert members({900_001}, COOKIE, tmp_path) == [900_001]


def test_who_has_a_handler_for_a_signal(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text("Name:\tx\nSigIgn:\t0000000000000200\nSigCgt:\t0000000000000802\n", "utf-8")
    assert [n for n in (signal.SIGINT, signal.SIGUSR2, signal.SIGTERM) if catches(7, n, tmp_path)] == [
        signal.SIGINT,
        signal.SIGUSR2,
    ]
    assert not catches(7, signal.SIGUSR1, tmp_path), "it ignores that"
    assert not catches(8, signal.SIGUSR1, tmp_path), "it is gone"


def test_the_kernel_tells_of_a_handler_of_python() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        assert not catches(os.getpid(), signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, lambda *_: None)
        assert catches(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
