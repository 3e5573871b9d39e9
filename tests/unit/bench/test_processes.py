"""Nothing that a benchmark starts outlives it, and no wait is endless."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from bench.common.exits import ExitWatch
from bench.common.machine import cpu_s, descendants, memory
from bench.common.processes import Failed, until
from tests.patience import PATIENCE_S

REPOSITORY = Path(__file__).resolve().parents[3]
# A child, a grandchild in a session of its own, and one whose parent has been killed before the end.
START_AND_LEAVE = """
import os, sys, time
from pathlib import Path
from bench.common.processes import Processes, until
folder = Path(sys.argv[1])
with Processes() as processes:
    kept = processes.start("kept", ["sh", "-c", "setsid sleep 99 & sleep 99"], os.environ, folder / "kept.txt")
    lost = processes.start("lost", ["sh", "-c", "setsid sleep 99 & sleep 99"], os.environ, folder / "lost.txt")
    from bench.common.machine import descendants
    until(lambda: len(descendants(os.getpid())) == 7, "all to be there", 10)
    print(*descendants(os.getpid())[1:], flush=True)
    os.kill(lost.pid, 9)
print("ended", flush=True)
"""


def test_the_end_takes_everything_along(tmp_path: Path) -> None:
    command = [sys.executable, "-c", START_AND_LEAVE, str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    started, ended = done.stdout.splitlines()
    assert ended == "ended"
    pids = [int(pid) for pid in started.split()]
    assert len(pids) == 6
    until(lambda: not any(map(psutil.pid_exists, pids)), "the killed ones' parents to collect them", PATIENCE_S)


STARTS_AND_WAITS = """
import os, signal, sys, time
from pathlib import Path
from bench.common.processes import Processes
signal.signal(signal.SIGINT, signal.default_int_handler)  # a command in the background inherits that it is ignored
with Processes() as processes:
    print(processes.start("one", ["sleep", "99"], os.environ, Path(sys.argv[1]) / "one.txt").pid, flush=True)
    time.sleep(99)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_that_ends_a_benchmark_ends_what_it_started(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", STARTS_AND_WAITS, str(tmp_path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        started = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(PATIENCE_S) in (128 + number, -number)
    assert not psutil.pid_exists(started)


def test_a_wait_ends_at_its_deadline_and_says_what_was_seen() -> None:
    with pytest.raises(Failed, match=r"waited 0\.05 s in vain for the moon; clouds"):
        until(lambda: None, "the moon", 0.05, seen=lambda: "clouds")


def test_a_process_is_measured_and_its_end_is_noticed() -> None:
    loop = "import time\nend = time.process_time() + 0.1\nwhile time.process_time() < end: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", loop], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert cpu_s(process.pid) >= 0.1
        used = memory([process.pid])
        assert 0 < used.private_mib <= used.proportional_mib
        assert process.pid in descendants(process.pid)
        with ExitWatch(process.pid) as watch:
            before = time.monotonic()
            process.kill()
            assert before <= watch.exited_at(within_s=PATIENCE_S) <= time.monotonic()


def test_a_process_that_stays_is_no_end() -> None:
    with subprocess.Popen(["sleep", "99"]) as process:
        with ExitWatch(process.pid) as watch, pytest.raises(Failed, match="did not end within"):
            watch.exited_at(within_s=0.05)
        process.kill()
