"""`elastic_event_detected()` in one process: levels, signals, acknowledgement."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from tests.patience import PATIENCE_S

from elastipod import elastic_event, elastic_event_detected, local_worker
from elastipod.progress import report
from elastipod.worker_file import EventLevel, WorkerFile


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library as a process finds it that has not asked yet, with SIGUSR1 ignored as the agent starts workers."""
    for name in ("ELASTIPOD_WORKER_FILE", "LOCAL_RANK", "WORLD_SIZE", elastic_event.COORDINATION_ENV):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(elastic_event, "_detector", None)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGUSR1, before)
    local_worker._opened.cache_clear()


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerFile]:
    """The worker file of a pod in which this process is local rank 1."""
    with WorkerFile.create(tmp_path / "worker-file", 2) as file:
        monkeypatch.setenv("ELASTIPOD_WORKER_FILE", file.path)
        monkeypatch.setenv("LOCAL_RANK", "1")
        yield file


def test_in_a_pod_the_level_is_the_event_and_is_acknowledged_once_seen(pod: WorkerFile) -> None:
    assert not elastic_event_detected()
    pod.set_event(EventLevel.DRAIN)
    assert not pod.acknowledged(1)
    assert elastic_event_detected()
    assert pod.acknowledged(1)
    assert not pod.acknowledged(0)


def test_the_answer_stays(pod: WorkerFile) -> None:
    pod.set_event(EventLevel.DRAIN)
    assert elastic_event_detected()
    pod.set_event(EventLevel.NONE)
    assert elastic_event_detected()


def test_in_a_pod_a_signal_alone_is_no_event(pod: WorkerFile) -> None:
    assert not elastic_event_detected()
    signal.raise_signal(signal.SIGUSR1)
    assert not elastic_event_detected()


def test_a_level_raised_before_the_first_call_counts(pod: WorkerFile) -> None:
    pod.set_event(EventLevel.DRAIN)
    assert elastic_event_detected()


def test_outside_a_pod_the_signal_is_the_event() -> None:
    assert not elastic_event_detected()
    signal.raise_signal(signal.SIGUSR1)
    assert elastic_event_detected()
    assert elastic_event_detected()


def test_a_handler_of_the_users_is_called_too() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    assert not elastic_event_detected()
    signal.raise_signal(signal.SIGUSR1)
    assert elastic_event_detected()
    assert seen == [signal.SIGUSR1]


def test_a_handler_of_the_users_is_called_once_by_the_second_run_of_a_process_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    assert not elastic_event_detected()
    for _ in range(2):  # as in workers that keep their process over generations
        monkeypatch.setattr(elastic_event, "_detector", None)
        assert not elastic_event_detected()
    signal.raise_signal(signal.SIGUSR1)
    assert elastic_event_detected()
    assert seen == [signal.SIGUSR1]


def test_outside_the_main_thread_no_handler_is_installed(pod: WorkerFile) -> None:
    answers: list[bool] = []
    asker = threading.Thread(target=lambda: answers.append(elastic_event_detected()))
    asker.start()
    asker.join()
    assert answers == [False]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    pod.set_event(EventLevel.DRAIN)
    assert elastic_event_detected()


def test_a_forked_child_starts_anew() -> None:
    assert not elastic_event_detected()
    child = os.fork()
    if child == 0:
        os._exit(0 if elastic_event._detector is None else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert elastic_event._detector is not None


@pytest.mark.parametrize("value", ["disabled", "Disabled "])
def test_coordination_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(elastic_event.COORDINATION_ENV, value)
    assert not elastic_event._coordinated()


@pytest.mark.parametrize("value", [None, "", "distributed"])
def test_coordination_is_on_otherwise(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is not None:
        monkeypatch.setenv(elastic_event.COORDINATION_ENV, value)
    assert elastic_event._coordinated()


def test_progress_goes_into_this_workers_slot(pod: WorkerFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    report(12, 192, loss=2.5, samples_per_s=40.0)
    found = pod.progress(1)
    assert found is not None
    assert (found.step, found.samples, found.loss, found.samples_per_s, found.world_size) == (12, 192, 2.5, 40.0, 4)
    assert pod.progress(0) is None


def test_progress_outside_a_pod_does_nothing() -> None:
    report(1, 16)


LEAVES = """
import os, signal
from elastipod import elastic_event_detected

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGUSR1):
        kill(pid, number)  # when Python has given its handlers up

elastic_event_detected()
last = Last()
"""


def test_an_event_does_not_kill_a_process_that_is_leaving() -> None:
    assert subprocess.run([sys.executable, "-c", LEAVES], timeout=PATIENCE_S).returncode == 0


@pytest.mark.parametrize("failure", [None, RuntimeError("boom")])
def test_after_an_exception_the_end_of_a_process_is_not_that_of_the_training(
    monkeypatch: pytest.MonkeyPatch, failure: Exception | None
) -> None:
    """A regular end tells ranks that wait for a stop step that there is none, so that they train on."""
    detector = mock.Mock()
    monkeypatch.setattr(elastic_event, "_detector", detector)
    monkeypatch.setattr(sys, "last_value", failure, raising=False)
    elastic_event._close_at_exit()
    assert detector.close.mock_calls == [mock.call(is_abandoned=failure is not None)]
