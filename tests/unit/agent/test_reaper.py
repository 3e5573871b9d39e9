"""Children that others have made, and signals to those that have no process group yet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from elastipod_agent.workers.reaper import Child, Reaper


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
