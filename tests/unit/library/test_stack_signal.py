"""Stacks on demand, and the signal that asks for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastipod import local_worker, stack_signal
from elastipod.progress import report
from elastipod.worker_file import WorkerFile


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerFile]:
    """The worker file of a pod in which this process is local rank 1."""
    with WorkerFile.create(tmp_path / "workers", 2) as file:
        monkeypatch.setenv("ELASTIPOD_WORKER_FILE", file.path)
        monkeypatch.setenv("ELASTIPOD_LOCAL_RANK", "1")
        monkeypatch.setenv("LOCAL_RANK", "0")
        yield file
    stack_signal.disable_stack_signal()
    local_worker._opened.cache_clear()


def test_the_first_report_offers_stacks_and_a_signal_gets_them(page: WorkerFile) -> None:
    report(1, 8)
    report(2, 16)
    assert page.num_reports(1) == 2
    assert page.num_reports(0) == 0, "with --virtual-local-rank LOCAL_RANK is 0 for all"
    number = page.stacks_signal(1)
    file = Path(page.stacks_path(1))
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_text("utf-8") == f"pid {os.getpid()}\n"
    signal.raise_signal(number)
    assert "in test_the_first_report_offers_stacks_and_a_signal_gets_them" in file.read_text("utf-8")
    assert page.stacks_signal(0) == 0


def test_a_signal_that_somebody_uses_is_left_to_him(page: WorkerFile) -> None:
    before = signal.signal(signal.SIGRTMAX, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMAX - 1})
    try:
        report(1, 8)
        assert page.stacks_signal(1) == signal.SIGRTMAX - 2
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGRTMAX - 1})
        signal.signal(signal.SIGRTMAX, before)


def test_where_no_stacks_can_be_offered_reports_work_all_the_same(page: WorkerFile) -> None:
    Path(page.stacks_path(1)).mkdir()
    report(1, 8)
    assert page.num_reports(1) == 1
    assert page.stacks_signal(1) == 0


def test_no_free_signal_is_an_error_that_names_none() -> None:
    with pytest.raises(ValueError, match="empty"):
        stack_signal.free_signal(range(65))


def test_a_second_offer_replaces_the_first(page: WorkerFile) -> None:
    report(1, 8)
    first = page.stacks_signal(1)
    descriptors = len(os.listdir("/proc/self/fd"))
    stack_signal.enable_stack_signal(page, 0)
    assert page.stacks_signal(0) == first
    assert len(os.listdir("/proc/self/fd")) == descriptors
