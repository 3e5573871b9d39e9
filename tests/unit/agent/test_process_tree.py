"""Which processes are a worker's, read from a made-up /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S

from elastipod_agent.workers import process_tree
from elastipod_agent.workers.process_table import Process, catches, descendants, has_in_environment, snapshot
from elastipod_agent.workers.process_tree import family, frees_resources, may_free_resources, members
from elastipod_agent.workers.reaper import Reaper

COOKIE = "ELASTIPOD_WORKER_FILE=/x"
# A process that starts a worker, waits for a line of it, and ends all of its processes as the agent does.
ENDS_A_WORKER = """
import asyncio, os, sys, time
from elastipod_agent.workers import process_tree
from elastipod_agent.workers.reaper import Reaper

async def main():
    reaper = Reaper()
    reaper.start()
    source, sink = os.pipe()
    command = [sys.executable, "-c", sys.argv[1]]
    worker = await reaper.spawn(command, {**os.environ, "ELASTIPOD_WORKER_FILE": "/x"}, stdout=sink, stderr=2)
    said = os.read(source, 1000).decode().strip()
    process_tree._FREEING_S = float(sys.argv[2])
    asked, command_line = [], process_tree.command_line
    process_tree.command_line = lambda pid: asked.append(pid) or command_line(pid)
    stuck = await process_tree.end_all(reaper, {worker.pid}, "ELASTIPOD_WORKER_FILE=/x", float(sys.argv[3]))
    reaper.collect()
    print(said, worker.status, stuck, worker.pid in asked)

asyncio.run(main())
"""
HAS_SHARED_MEMORY = """
import time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
memory = SharedMemory(create=True, size=4096)
while b"resource_tracker" not in Path("/proc", str(resource_tracker._resource_tracker._pid), "cmdline").read_bytes():
    time.sleep(0.01)  # until then it looks like this script
print(memory.name, flush=True)
time.sleep(600)
"""
LEAVES_A_HANGING_TRACKER = """
import subprocess, sys, time
tracker = "import time; time.sleep(600)  # from multiprocessing.resource_tracker import main"
print(subprocess.Popen([sys.executable, "-S", "-c", tracker], start_new_session=True).pid, flush=True)
time.sleep(600)
"""


LOSES_ITS_MAIN_THREAD = """
import ctypes, os, platform, threading, time

def live_on():
    while ") Z " not in open(f"/proc/{os.getpid()}/stat").read():
        time.sleep(0.001)
    print(os.getpid(), flush=True)
    time.sleep(600)

threading.Thread(target=live_on).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit of this thread alone
"""
LEAVES_THE_SESSION = """
import subprocess, sys, time
script = "print(0, flush=True); import time; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-S", "-c", script], start_new_session=True, env={}, stdout=subprocess.PIPE)
child.stdout.readline()  # it has its session and its environment
print(child.pid, flush=True)
time.sleep(600)
"""


def add(proc: Path, pid: int, parent: int, session: int, *, state: str = "S", environ: str = "") -> None:
    (proc / str(pid)).mkdir()
    rest = " ".join(["0"] * 13)  # up to the number of threads
    (proc / str(pid) / "stat").write_text(f"{pid} (a ) name) {state} {parent} {pid} {session} {rest} 1 0\n", "utf-8")
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


def end_worker(script: str, freeing_s: float) -> list[str]:
    """Start this script as a worker and end it; gives what it printed, its status, the pids that did not end, and whether its command
    line was read.

    freeing_s: what those that free its resources may take.
    """
    done = subprocess.run(
        [sys.executable, "-c", ENDS_A_WORKER, script, str(freeing_s), str(PATIENCE_S)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return done.stdout.split()


def test_the_shared_memory_of_workers_that_are_killed_is_freed() -> None:
    name, *end = end_worker(HAS_SHARED_MEMORY, PATIENCE_S)
    assert end == ["-9", "[]", "False"]
    assert not Path("/dev/shm", name).exists()


def test_what_frees_resources_and_does_not_end_is_killed() -> None:
    tracker, *end = end_worker(LEAVES_A_HANGING_TRACKER, 0.1)
    assert end == ["-9", "[]", "False"]
    assert not Path("/proc", tracker).exists()


def test_a_process_is_ended_whose_main_thread_has_ended_before_the_others() -> None:
    """It is a zombie to see, but nobody can reap it, and it holds its device until its last thread ends."""
    pid, *end = end_worker(LOSES_ITS_MAIN_THREAD, PATIENCE_S)
    assert end == ["-9", "[]", "False"]
    assert not Path("/proc", pid).exists()


def test_a_descendant_with_a_session_and_an_environment_of_its_own_is_ended_with_its_worker() -> None:
    child, *end = end_worker(LEAVES_THE_SESSION, PATIENCE_S)
    assert end == ["-9", "[]", "False"]
    assert not Path("/proc", child).exists()


def test_the_family_of_workers_leaves_out_the_sessions_of_others(tmp_path: Path) -> None:
    add(tmp_path, 900_000, 1, 900_000)  # the leader of a session, not a worker's
    add(tmp_path, 900_001, 900_000, 900_000)  # a worker, just forked
    add(tmp_path, 900_002, 900_001, 900_000)
    add(tmp_path, 900_003, 900_002, 900_003)
    add(tmp_path, 900_005, 900_003, 900_004)  # the leader of its session has ended
    assert family({900_001}, tmp_path) == {900_001, 900_002, 900_003, 900_004, 900_005}
    assert os.getsid(0) not in family({os.getppid()})


def test_the_command_line_is_read_only_of_what_may_free_resources(tmp_path: Path) -> None:
    """Reading it may wait for a process that is stuck in the kernel; its name can be read at any time."""
    for pid, name in ((1, "python3.11"), (2, "torch_shm_manag"), (3, "pt_data_worker"), (4, "sh")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "comm").write_text(name + "\n", "utf-8")
    assert [may_free_resources(pid, tmp_path) for pid in (1, 2, 3, 4, 5)] == [True, True, False, False, False]


def test_a_worker_is_killed_whatever_its_command_line_is() -> None:
    """It is not read: a process that is stuck in the kernel may keep who reads it waiting."""
    _, *end = end_worker(
        "import time; print('x', flush=True); time.sleep(600)  # from x.resource_tracker import main", 600
    )
    assert end == ["-9", "[]", "False"]


@pytest.mark.parametrize(
    ("command", "frees"),
    [
        pytest.param(
            ["python", "-c", "from multiprocessing.resource_tracker import main;main(5)"], True, id="Python's"
        ),
        pytest.param(["python", "-c", "from multiprocess.resource_tracker import main;main(5)"], True, id="of a fork"),
        pytest.param(["/x/torch/bin/torch_shm_manager"], True, id="torch's"),
        pytest.param(["python", "-c", "from multiprocessing.spawn import spawn_main"], False, id="a data worker"),
        pytest.param(["python", "train.py", "torch_shm_manager"], False, id="a worker"),
        pytest.param([], False, id="a process that is gone"),
    ],
)
def test_what_frees_resources_is_known_by_its_command(command: list[str], frees: bool) -> None:
    assert frees_resources(b"".join(argument.encode() + b"\0" for argument in command)) is frees


async def test_the_end_of_workers_that_have_ended_takes_two_looks_at_all_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restart waits for them. One is not enough: a process whose parent ended during it is missing there."""
    seen: list[int] = []

    def counted() -> dict[int, Process]:
        seen.append(1)
        return snapshot()

    monkeypatch.setattr(process_tree, "snapshot", lambda *_: counted())
    assert await process_tree.end_all(Reaper(), {900_001}, COOKIE, PATIENCE_S) == []
    assert len(seen) == 2


@pytest.fixture
def orphan() -> Iterator[subprocess.Popen[bytes]]:
    """A process with a session of its own, that only its environment shows to have come from a worker."""
    name, _, path = COOKIE.partition("=")
    with subprocess.Popen(["sleep", "600"], env={name: path}, start_new_session=True) as process:
        yield process
        process.kill()


async def test_who_is_in_the_middle_of_an_exec_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch, orphan: subprocess.Popen[bytes]
) -> None:
    looks = []

    def look(pid: int, entry: str, proc: Path) -> bool | None:
        looks.append(pid)
        return None if pid == orphan.pid and looks.count(pid) <= 3 else has_in_environment(pid, entry, proc)

    monkeypatch.setattr(process_tree, "has_in_environment", look)
    assert await process_tree.end_all(Reaper(), {900_001}, COOKIE, PATIENCE_S) == []
    assert orphan.wait(PATIENCE_S) == -signal.SIGKILL


async def test_without_any_time_all_are_killed_all_the_same(orphan: subprocess.Popen[bytes]) -> None:
    """With --shutdown-timeout=0: or else a script would live on beside its successor."""
    await process_tree.end_all(Reaper(), {900_001}, COOKIE, 0.0)
    assert orphan.wait(PATIENCE_S) == -signal.SIGKILL


async def test_without_any_time_one_in_the_middle_of_an_exec_is_killed_as_well(
    monkeypatch: pytest.MonkeyPatch, orphan: subprocess.Popen[bytes]
) -> None:
    """At the first look nothing can be told of it, so nothing has been killed yet."""
    looks = iter([None, None])
    monkeypatch.setattr(process_tree, "has_in_environment", lambda *given: next(looks, has_in_environment(*given)))
    await process_tree.end_all(Reaper(), {900_001}, COOKIE, 0.0)
    assert orphan.wait(PATIENCE_S) == -signal.SIGKILL


async def test_an_exec_that_does_not_end_is_waited_for_until_the_deadline(
    monkeypatch: pytest.MonkeyPatch, orphan: subprocess.Popen[bytes]
) -> None:
    monkeypatch.setattr(process_tree, "has_in_environment", lambda *_: None)
    assert await process_tree.end_all(Reaper(), {900_001}, COOKIE, 0.2) == []
    assert orphan.poll() is None, "nobody knows whose it is"
