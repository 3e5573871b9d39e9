"""Children that others have made, and signals to those that have no process group yet."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from elastipod_agent.workers.reaper import Child, Reaper
from elastipod_agent.workers.spawner import Spawner


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
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    Child(process.pid).send_group(signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL


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
        child = await asyncio.wait_for(reaper.spawn(["/bin/true"], {}, stdout=1, stderr=2), 20)
        await asyncio.wait_for(child.ended.wait(), 20)
        assert child.status == -signal.SIGKILL
    finally:
        reaper.stop()


def test_of_a_failed_birth_those_are_killed_that_cannot_end_by_themselves() -> None:
    command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    stray, running = (subprocess.Popen([*command, "the server's"]) for _ in range(2))
    other = subprocess.Popen([*command, "another"])
    for one in (stray, other):
        one.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, one.pid, os.WSTOPPED)
    try:
        Reaper().kill_strays("the server's")
        assert stray.wait(20) == -signal.SIGKILL
        assert (running.poll(), other.poll()) == (None, None)
    finally:
        for one in (running, other):
            one.kill()
            one.wait()
