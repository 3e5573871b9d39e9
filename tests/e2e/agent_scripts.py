"""Small training scripts for real agent processes."""

from __future__ import annotations

import re
from collections.abc import Callable

import psutil
from tests.e2e.agent_process import AgentProcess

SAY_RANK = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\n"

# Reports its pid, then waits for the level in the worker file as the library does, and drains or ignores it.
POLL = """
import os, sys, time
from elastipod.worker_file import WorkerFile
rank = int(os.environ["LOCAL_RANK"])
page = WorkerFile.open(os.environ["ELASTIPOD_WORKER_FILE"])
page.report(rank, step=7, samples=70, loss=0.5, total_steps=100, world_size=int(os.environ["WORLD_SIZE"]))
print("pid", os.getpid(), "gen", os.environ["ELASTIPOD_GENERATION"], "nnodes", os.environ["NNODES"], flush=True)
while "ignore" in sys.argv or page.event().level == 0:
    time.sleep(0.01)
page.acknowledge(rank)
print("draining", flush=True)
"""

# A child in its process group, a child in a session of its own, and an orphan that has forgotten its parent.
FAMILY = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
near = subprocess.Popen(sleep)
far = subprocess.Popen(sleep, start_new_session=True)
middle = os.fork()
if middle == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, sleep)
    os._exit(0)
os.waitpid(middle, 0)
print("family", near.pid, far.pid, flush=True)
time.sleep(600)
"""
RunAgent = Callable[..., AgentProcess]


def worker_pids(agent: AgentProcess) -> list[int]:
    """Give the pids that POLL's workers have printed."""
    return [int(pid) for pid in re.findall(r"pid (\d+)", agent.printed())]


def _below(agent: AgentProcess) -> list[psutil.Process]:
    return psutil.Process(agent.process.pid).children(recursive=True)
