"""What /proc says about processes, also about those that have ended meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.agent_client import until

from elastipod_agent.workers import process_table
from elastipod_agent.workers.process_table import Process


def write(proc: Path, pid: int, **files: bytes) -> None:
    (proc / str(pid)).mkdir()
    for name, content in files.items():
        (proc / str(pid) / name).write_bytes(content)


def stat(pid: int, state: bytes, *, num_threads: int = 1) -> bytes:
    """Give the begin of /proc/PID/stat, for a process with an awkward name."""
    return b"%d (T) T) %b 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 %d 0 22 23" % (pid, state, num_threads)


@pytest.mark.parametrize(
    ("state", "num_threads", "is_dead"),
    [
        (b"R", 1, False),
        (b"S", 9, False),
        (b"T", 1, False),
        pytest.param(b"Z", 1, True, id="waits for its parent"),
        pytest.param(b"X", 0, True, id="is being removed"),
        pytest.param(b"Z", 3, False, id="threads live on after the main one"),
    ],
)
def test_a_process_as_the_kernel_shows_it(tmp_path: Path, state: bytes, num_threads: int, is_dead: bool) -> None:
    write(tmp_path, 12, stat=stat(12, state, num_threads=num_threads))
    assert process_table.snapshot(tmp_path) == {12: Process(pid=12, parent=3, session=5, is_dead=is_dead)}


def test_a_process_that_ends_while_the_list_is_read_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "11").mkdir()
    (tmp_path / "meminfo").touch()
    write(tmp_path, 12, stat=stat(12, b"S"))
    assert list(process_table.snapshot(tmp_path)) == [12]


def test_a_command_line(tmp_path: Path) -> None:
    write(tmp_path, 12, cmdline=b"python\0-c\0pass\0")
    assert process_table.command_line(12, tmp_path) == b"python\0-c\0pass\0"
    assert process_table.command_line(13, tmp_path) == b""
    assert process_table.command_line(os.getpid()) == Path("/proc/self/cmdline").read_bytes()


def test_a_variable_counts_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path, 12, environ=b"A=1\0COOKIE=/x\0LAST=2\0")
    assert process_table.has_in_environment(12, "COOKIE=/x", tmp_path)
    assert process_table.has_in_environment(12, "LAST=2", tmp_path)
    assert not process_table.has_in_environment(12, "COOKIE=/", tmp_path)
    assert not process_table.has_in_environment(12, "OOKIE=/x", tmp_path)
    assert process_table.has_in_environment(13, "COOKIE=/x", tmp_path) is False


@pytest.mark.parametrize(
    ("state", "is_stopped"), [(b"T", True), (b"t", True), (b"S", False), (b"R", False), (b"Z", False)]
)
def test_stopped_processes(tmp_path: Path, state: bytes, is_stopped: bool) -> None:
    write(tmp_path, 12, stat=stat(12, state))
    assert process_table.is_stopped(12, tmp_path) is is_stopped
    assert process_table.is_stopped(13, tmp_path) is False


@pytest.mark.parametrize(
    ("has_program", "ends", "told"),
    [
        pytest.param(True, b"0 0", None, id="in the middle of an exec"),
        pytest.param(True, b"700 900", None, id="the exec has ended since it was read"),
        pytest.param(True, b"700 700", False, id="it has none"),
        pytest.param(False, b"0 0", False, id="its main thread has ended, or it is another user's"),
    ],
)
def test_an_empty_environment(tmp_path: Path, has_program: bool, ends: bytes, told: bool | None) -> None:
    fields = b"12 (sh) S " + b" ".join(b"%d" % number for number in range(4, 50))
    write(tmp_path, 12, environ=b"", stat=fields + b" " + ends + b" 0\n")
    if has_program:
        (tmp_path / "12" / "exe").symlink_to("/bin/sh")
    assert process_table.has_in_environment(12, "COOKIE=/x", tmp_path) is told


def test_a_real_process_without_an_environment() -> None:
    with subprocess.Popen(["sleep", "600"], env={}) as process:
        try:
            until(lambda: process_table.command_line(process.pid) == b"sleep\000600\0", "its program")
            assert process_table.has_in_environment(process.pid, "COOKIE=/x") is False
        finally:
            process.kill()


def test_a_process_that_executes_one_program_after_the_other_never_seems_to_be_without_its_variable() -> None:
    """One look in twenty fell in the middle of an exec."""
    command = 'exec /bin/sh -c "$0" "$0"'
    looks = []
    with subprocess.Popen(["/bin/sh", "-c", command, command], env={"COOKIE": "/x"}) as process:
        try:
            until(lambda: process_table.has_in_environment(process.pid, "COOKIE=/x"), "its first program")
            looks = [process_table.has_in_environment(process.pid, "COOKIE=/x") for _ in range(2_000)]
        finally:
            process.kill()
    assert looks.count(False) == 0
    assert looks.count(True) > 0


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, env={"COOKIE": "/x"})
    yield process
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def test_a_real_process_is_stopped_and_found(child: subprocess.Popen[bytes]) -> None:
    seen = process_table.snapshot()
    assert seen[child.pid] == Process(child.pid, os.getpid(), os.getsid(0), is_dead=False)
    assert seen[child.pid] in process_table.descendants(seen, os.getpid())
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert process_table.is_stopped(child.pid)
    os.kill(child.pid, signal.SIGCONT)
    assert process_table.has_in_environment(child.pid, "COOKIE=/x")


def test_descendants_of_descendants() -> None:
    chain = {pid: Process(pid, parent, 1, is_dead=False) for pid, parent in ((2, 1), (3, 2), (4, 3), (5, 1), (9, 8))}
    assert sorted(one.pid for one in process_table.descendants(chain, 1)) == [2, 3, 4, 5]
    assert sorted(one.pid for one in process_table.descendants(chain, 3)) == [4]
    assert process_table.descendants(chain, 7) == []
