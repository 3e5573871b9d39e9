"""Children that others have made, and signals to those that have no process group yet."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S

from elastipod.worker_file import WorkerFile
from elastipod_agent.workers import process_tree
from elastipod_agent.workers.group import WorkerGroup
from elastipod_agent.workers.reaper import ChildProcess, Reaper
from elastipod_agent.workers.spawner import Spawner
from elastipod_agent.workers.worker_process import WorkerProcess


def test_the_end_of_an_unknown_child_is_kept_only_while_one_is_expected() -> None:
    reaper = Reaper()
    with reaper.expecting():
        pid = _ended_child(reaper)
        assert reaper.adopt(pid).status == 7
    with reaper.expecting():
        stranger = _ended_child(reaper)
    with reaper.expecting():
        assert reaper.adopt(stranger).status is None, "a later child with the same pid lives"


def _ended_child(reaper: Reaper) -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(7)"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    reaper.collect()
    process.returncode = 7
    return process.pid


def test_a_signal_to_its_group_reaches_a_child_that_has_not_made_one() -> None:
    process = _child_that_stays()
    ChildProcess(process.pid).send_group(signal.SIGKILL)
    assert process.wait(PATIENCE_S) == -signal.SIGKILL


def test_the_end_of_a_worker_group_reaches_what_its_workers_have_started() -> None:
    """A shell script that runs the training, or a launcher of its own: the shutdown signal is for all of them."""
    script = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', 'print(0, flush=True); input()'])"
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"0\n", "the grandchild runs"
    ChildProcess(process.pid).send_group(signal.SIGTERM)
    assert process.stdout.read() == b"", "all that had it open have ended"
    assert process.wait(PATIENCE_S) == -signal.SIGTERM
    process.stdin.close()
    process.stdout.close()


@pytest.mark.parametrize(
    ("number", "told"),
    [
        pytest.param(signal.SIGTERM, [("its group", signal.SIGTERM)], id="with its group"),
        pytest.param(signal.SIGKILL, [], id="without what frees its resources, which may be in its group"),
    ],
)
async def test_a_worker_is_ended(
    number: int, told: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none_left(*_: object) -> list[int]:
        asyncio.get_running_loop().call_later(0.01, child.end, -signal.SIGKILL)
        return []

    class Signalled(ChildProcess):
        def __init__(self) -> None:
            super().__init__(os.getpid())
            self.told: list[tuple[str, int]] = []

        def send(self, number: int) -> None:
            self.told.append(("the process", number))

        def send_group(self, number: int) -> None:
            self.told.append(("its group", number))

    child = Signalled()
    monkeypatch.setattr(process_tree, "end_all", none_left)
    group = object.__new__(WorkerGroup)  # of which only the end is looked at
    group.workers = [WorkerProcess(0, child, Path("/nowhere"), [], None, None)]
    group._file, group._reaper = WorkerFile.create(tmp_path / "worker-file", 1), Reaper()
    await group.end(number, 0)
    group.close()
    assert child.told == told
    assert child.status is not None, "its end is known before the next workers may start"


async def test_a_child_that_is_stopped_before_its_exec_does_not_hold_up_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop_oneself(spawner: Spawner) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    monkeypatch.setattr(Spawner, "_before_exec", stop_oneself)
    monkeypatch.setattr("elastipod_agent.workers.reaper.adopt_orphans", lambda: None)
    reaper = Reaper()
    reaper.start()
    try:
        child = await asyncio.wait_for(reaper.spawn(["/bin/true"], {}, stdout=1, stderr=2), PATIENCE_S)
        await asyncio.wait_for(child.ended.wait(), PATIENCE_S)
        assert child.status == -signal.SIGKILL
    finally:
        reaper.stop()


def test_children_of_a_failed_fork_that_are_stopped_are_killed() -> None:
    command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    stray, running = (subprocess.Popen([*command, "the server's"]) for _ in range(2))
    other = subprocess.Popen([*command, "another"])
    for one in (stray, other):
        one.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, one.pid, os.WSTOPPED)
    try:
        Reaper().kill_stopped_strays("the server's")
        assert stray.wait(PATIENCE_S) == -signal.SIGKILL
        assert (running.poll(), other.poll()) == (None, None)
    finally:
        for one in (running, other):
            one.kill()
            one.wait()


async def test_a_process_whose_start_was_cancelled_is_killed() -> None:
    """Nobody would end it: neither its number nor its pipes are known to whoever asked for it."""
    spawner = Spawner()
    spawner.start()
    read, write = os.pipe()
    started = asyncio.ensure_future(
        spawner.spawn([sys.executable, "-S", "-c", "import time; time.sleep(600)"], {}, stdout=write, stderr=write)
    )
    await asyncio.sleep(0)
    started.cancel()
    later = await spawner.spawn([sys.executable, "-S", "-c", ""], {}, stdout=write, stderr=write)
    os.close(write)
    assert await asyncio.to_thread(os.read, read, 1) == b"", "all that had it open have ended"
    os.close(read)
    assert later.wait(PATIENCE_S) == 0
    spawner.stop()


async def test_a_start_that_is_refused_ends_no_child_that_runs() -> None:
    """The kernel would kill all children with the thread that forked them."""
    spawner = Spawner()
    spawner.start()
    with pytest.raises(OSError, match="embedded null byte"):
        await spawner.spawn(["x"], {"NAME": "a\0b"}, stdout=1, stderr=2)
    later = await spawner.spawn([sys.executable, "-S", "-c", ""], {}, stdout=1, stderr=2)
    assert later.wait(PATIENCE_S) == 0
    spawner.stop()


async def test_a_child_that_outlives_the_reaper_is_nobodys_concern() -> None:
    """Popen would warn of it; the kernel kills it when the spawner's thread ends."""
    process = _child_that_stays()
    reaper = Reaper()
    child = reaper._claim(ChildProcess(process.pid, process))
    reaper.stop()
    assert (process.returncode, child.status) == (-signal.SIGKILL, None)
    _end(process.pid)


def _child_that_stays() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
