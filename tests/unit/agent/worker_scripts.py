"""Small training scripts for whole runs of the agent."""

from __future__ import annotations

import re

from tests.unit.agent.agent_in_process import AgentInProcess

# Reports a step, then waits for the event in the worker file as the library does, and acknowledges it.
DRAINS = """
import os, sys, time
from elastipod.worker_file import WorkerFile
rank = int(os.environ["LOCAL_RANK"])
page = WorkerFile.open(os.environ["ELASTIPOD_WORKER_FILE"])
page.report(rank, step=7, samples=70, loss=0.5, world_size=int(os.environ["WORLD_SIZE"]))
print("pid", os.getpid(), "gen", os.environ["ELASTIPOD_GENERATION"], "rank", os.environ["RANK"], flush=True)
while page.event().level == 0:
    time.sleep(0.01)
page.acknowledge(rank)
print("draining", flush=True)
"""
WAITS = "import time\nprint('awake', flush=True)\ntime.sleep(600)\n"
SAYS = (
    "import os, sys\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\nprint('oh', file=sys.stderr)\n"
)


def pids(agent: AgentInProcess) -> list[int]:
    """Give the pids that the workers have printed."""
    return [int(pid) for pid in re.findall(r"pid (\d+)", agent.printed())]
