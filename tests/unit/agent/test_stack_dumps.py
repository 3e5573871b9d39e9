"""Stacks of workers on request, from real processes; of those that give none, what the kernel shows."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from tests.agent_client import until

from elastipod.worker_file import WorkerFile
from elastipod_agent.workers import stack_dumps
from elastipod_agent.workers.stack_dumps import StackDump, kernel_facts, request_stacks

OFFERS = """
import sys, time
from elastipod.stack_signal import enable_stack_signal
from elastipod.worker_file import WorkerFile
enable_stack_signal(WorkerFile.open(sys.argv[1]), int(sys.argv[2]))
def lost_in_thought():
    print("ready", flush=True)
    time.sleep(600)
lost_in_thought()
"""
TAKES_THE_SIGNAL_ONLY = OFFERS.replace(
    "def lost",
    "import faulthandler, signal\n"
    "number = WorkerFile.open(sys.argv[1]).stacks_signal(int(sys.argv[2]))\n"
    "faulthandler.unregister(number)\n"
    "signal.signal(number, lambda *_: None)\n"
    "def lost",
)
OFFERS_NOTHING = "import time\nprint('ready', flush=True)\ntime.sleep(600)"


class Workers:
    """Real processes beside one worker file."""

    def __init__(self, folder: Path) -> None:
        self.page = WorkerFile.create(folder / "workers", 3)
        self.pids: dict[int, int] = {}
        self._children: list[subprocess.Popen[str]] = []

    def start(self, local_rank: int, script: str = OFFERS) -> int:
        command = [sys.executable, "-c", script, self.page.path, str(local_rank)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        self._children.append(child)
        self.pids[local_rank] = child.pid
        return child.pid

    def stop(self, local_rank: int) -> None:
        process = psutil.Process(self.pids[local_rank])
        process.suspend()
        until(lambda: process.status() == psutil.STATUS_STOPPED, "the stop")

    def end(self, local_rank: int) -> None:
        (child,) = (child for child in self._children if child.pid == self.pids[local_rank])
        child.kill()
        child.wait()

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.communicate()
        self.page.close()


def stacks_of(page: WorkerFile, pids: Mapping[int, int], patience_s: float) -> dict[int, StackDump]:
    return asyncio.run(request_stacks(page, pids, patience_s))


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    made = Workers(tmp_path)
    yield made
    made.close()


def test_workers_that_offer_stacks_are_asked_and_others_are_described(workers: Workers) -> None:
    for local_rank in (0, 2):
        workers.start(local_rank)
    silent = workers.start(1, OFFERS_NOTHING)
    answers = stacks_of(workers.page, workers.pids, 60.0)
    for local_rank in (0, 2):
        assert "in lost_in_thought" in answers[local_rank].stacks
        assert "pid" not in answers[local_rank].stacks, "the first line is for the agent"
        assert (answers[local_rank].facts, answers[local_rank].is_unresponsive) == ("", False)
    assert answers[1].stacks == ""
    assert answers[1].facts.startswith(f"offers no stacks; process {silent} is in state S (sleeping) with 1 threads")
    assert answers[1].is_unresponsive is False
    again = stacks_of(workers.page, {0: workers.pids[0]}, 60.0)
    assert again[0].stacks.count("lost_in_thought") == 1, "those of the first request are not repeated"


def test_a_worker_that_is_stopped_is_not_asked_and_is_unresponsive(workers: Workers) -> None:
    for local_rank, script in ((0, OFFERS), (1, OFFERS_NOTHING)):
        workers.start(local_rank, script)
    workers.stop(0)
    workers.stop(1)
    answers = stacks_of(workers.page, workers.pids, float("inf"))
    state = "is in state T (stopped) with 1 threads"
    for rank in range(2):
        assert answers[rank].facts.startswith(f"is stopped; process {workers.pids[rank]} {state}")
        assert answers[rank].is_unresponsive


def test_a_worker_that_does_not_answer_is_waited_for_no_longer_than_allowed(workers: Workers) -> None:
    workers.start(0, TAKES_THE_SIGNAL_ONLY)
    answers = stacks_of(workers.page, workers.pids, 0.5)
    assert answers[0].facts.startswith(
        f"did not write its stacks within 0.5 s; process {workers.pids[0]} is in state S"
    )
    assert answers[0].is_unresponsive


def test_nobody_is_signalled_who_does_not_expect_it(workers: Workers) -> None:
    """The file is the worker's, and what it says of itself may be wrong."""
    quiet = workers.start(0, OFFERS_NOTHING)
    Path(workers.page.stacks_path(0)).mkdir()
    workers.page.set_stacks_signal(0, signal.SIGRTMAX)
    assert stacks_of(workers.page, workers.pids, 60.0)[0].facts.startswith("offers no stacks; ")
    Path(workers.page.stacks_path(0)).rmdir()
    for named in (f"pid {quiet}", "pid x", "pid", f"pid {os.getppid()}", ""):
        Path(workers.page.stacks_path(0)).write_text(f"{named}\n")
        answers = stacks_of(workers.page, workers.pids, 60.0)
        assert answers[0].facts.startswith("offers no stacks; "), named
    assert psutil.pid_exists(quiet)
    assert psutil.Process(quiet).status() == psutil.STATUS_SLEEPING


def test_a_worker_that_is_gone_is_told_so(workers: Workers) -> None:
    pid = workers.start(0)
    workers.end(0)
    answers = stacks_of(workers.page, {0: pid}, 60.0)
    assert answers == {0: StackDump(facts=f"offers no stacks; process {pid} is gone")}


def proc(folder: Path, **files: str) -> Path:
    (folder / "7").mkdir()
    for name, text in files.items():
        (folder / "7" / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "facts"),
    [
        pytest.param(
            {"status": "State:\tD (disk sleep)\nThreads:\t3\nodd\n", "wchan": "nfs_wait", "stack": ""},
            "process 7 is in state D (disk sleep) with 3 threads, waiting in nfs_wait",
            id="where it waits",
        ),
        pytest.param(
            {"status": "State:\tR (running)\nThreads:\t1\n", "wchan": "0"},
            "process 7 is in state R (running) with 1 threads",
            id="it waits for nothing",
        ),
        pytest.param({"status": "Odd:\t1\n"}, "process 7 is in state ? with ? threads", id="an unknown kernel"),
        pytest.param(
            {"status": "State:\tS\nThreads:\t1\n", "stack": "".join(f"[<0>] f{n}+0x1/0x2\n" for n in range(10)) + "\n"},
            "process 7 is in state S with 1 threads (kernel stack: f0, f1, f2, f3, f4, f5, f6, f7)",
            id="its frames",
        ),
        pytest.param({}, "process 7 is gone", id="gone"),
    ],
)
def test_what_the_kernel_shows(tmp_path: Path, files: dict[str, str], facts: str) -> None:
    assert kernel_facts(7, proc(tmp_path, **files)) == facts


def test_only_a_bounded_part_of_a_regular_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_dumps, "MAX_STACKS_BYTES", 4)
    (tmp_path / "file").write_bytes(b"ab\xffcdefg")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    descriptors = len(os.listdir("/proc/self/fd"))
    read = {name: stack_dumps._read(str(tmp_path / name), 1) for name in ("file", "link", "pipe", "folder", "none")}
    assert read == {"file": "b\ufffdcd", "link": "", "pipe": "", "folder": "", "none": ""}
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert [stack_dumps._size(str(tmp_path / name)) for name in ("file", "none")] == [8, 0]
