"""The agent asks the kernel to be woken soon, and its workers do not inherit that."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
from tests.patience import PATIENCE_S

ASK = """
import ctypes, os, struct
from elastipod_agent.workers.linux import request_short_time_slices

def slice_ns():
    buffer = ctypes.create_string_buffer(48)
    ctypes.CDLL(None).syscall({"x86_64": 315, "aarch64": 275}[os.uname().machine], 0, buffer, 48, 0)
    return struct.unpack("=IIQiIQQQ", buffer)[5]

usual = slice_ns()
os.nice(3)
request_short_time_slices()
print(slice_ns(), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK, flush=True)
if os.fork() == 0:
    print(slice_ns() == usual, flush=True)
"""


def knows_slices() -> bool:
    major, minor = (int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    return (major, minor) >= (6, 12) and platform.machine() in ("x86_64", "aarch64")


@pytest.mark.skipif(not knows_slices(), reason="this kernel gives every process the same slices")
def test_slices_are_short_and_only_the_agents_own() -> None:
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + 3, 19)
    assert done.stdout.split() == ["100000", str(niceness), str(os.SCHED_OTHER), "True"]
