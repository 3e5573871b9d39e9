"""The check for what a test leaves running: it fails for what stays, and not for what is about to end."""

from __future__ import annotations

import subprocess
import threading
import time

import psutil
from tests.agent_client import until
from tests.leaks import children, threads_that_stay
from tests.patience import PATIENCE_S


def test_a_thread_that_is_about_to_end_has_not_been_left() -> None:
    before = threading.enumerate()
    threading.Thread(target=time.sleep, args=(0.2,), name="ending").start()
    assert threads_that_stay(before, PATIENCE_S) == []


def test_threads_that_stay_are_named() -> None:
    before, is_over = threading.enumerate(), threading.Event()
    threads = [
        threading.Thread(target=is_over.wait, name=name, daemon=name == "daemon")
        for name in ("first", "second", "daemon")
    ]
    for thread in threads:
        thread.start()
    assert threads_that_stay(before, 0.1) == ["first", "second"]
    assert threads_that_stay(threading.enumerate(), 0.1) == [], "those of before"
    is_over.set()
    for thread in threads:
        thread.join()


def test_processes_of_processes_count() -> None:
    before = children()
    with subprocess.Popen(["sh", "-c", "sleep 1000 & wait"], start_new_session=True) as shell:
        until(lambda: len(children() - before) == 2, "the shell and its child")
        found = children() - before
        assert psutil.Process(shell.pid) in found
        for process in found:
            process.kill()
    psutil.wait_procs(found, timeout=PATIENCE_S)
    assert children() == before
