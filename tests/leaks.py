"""What a test has left running: threads and child processes. What is about to end is given the time to do so."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection

import psutil


def threads_that_stay(before: Collection[threading.Thread], within_s: float) -> list[str]:
    """Give the names of threads that are not among those before, would keep this process from ending, and have not ended in this time.

    Some end by themselves soon after the test: those that release process groups, for example.
    """
    new = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    until = time.monotonic() + within_s
    for thread in new:
        thread.join(max(0.0, until - time.monotonic()))
    return [thread.name for thread in new if thread.is_alive()]


def children() -> set[psutil.Process]:
    """Give all processes below this one. psutil alone looks at every process of the machine, twice for each test."""
    return set() if _has_no_child() else set(psutil.Process().children(recursive=True))


def _has_no_child() -> bool:
    """Whether none of this process's threads has one; False if that is unknown."""
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children", "rb", buffering=0) as listed:
                if listed.read(1):
                    return False
    except OSError:  # a thread has just ended, or another system
        return False
    return True
