"""What both tests of the agent do: those with the agent in the process of the test, and those with an agent as a process of its own.

Each takes an `AgentClient`, whose agent runs a script that prints its generation and drains when it is told to.
"""

from __future__ import annotations

from tests.agent_client import AgentClient

# What the loop below asks after each step: the library's own event, or the worker file alone, which needs no torch.
ASK_THE_LIBRARY = "from hyperpod_elastic_agent.elastic_event_handler import elastic_event_detected as must_drain"
ASK_THE_WORKER_FILE = """
from elastipod.worker_file import WorkerFile

page = WorkerFile.open(os.environ["ELASTIPOD_WORKER_FILE"])

def must_drain():
    if page.event().level:
        page.acknowledge(int(os.environ["LOCAL_RANK"]))
        return True
    return False
"""
_LOOP = """
def order(rank):
    file = Path(os.environ["HOME"]) / f"order-{rank}"
    text = file.read_text() if file.exists() else ""
    if text:
        file.unlink()
    return text

def train(rank):
    while True:
        try:
            agent.hyperpod_wait_fault(timeout=0.05)
            return "called back"
        except HyperPodIPCException:
            pass
        todo = order(rank)
        if "deaf" not in sys.argv and must_drain():
            if "exit" in sys.argv:
                sys.exit(0)
            return "drained"
        if todo == "crash":
            os.kill(os.getpid(), 9)
        if todo == "stuck":
            time.sleep(600)
        if todo == "end":
            sys.exit(0)
        if todo:
            agent.hyperpod_send_fault(rank, RestartMode(todo), "LostItsMind", f"rank {rank} says so")

agent = TrainingManager().InProcessRestart
print("up", os.environ["LOCAL_RANK"], os.getpid(), flush=True)
while True:
    kind, start = agent.hyperpod_barrier()
    os.environ.update(start["worker_envs"])
    e = os.environ
    rank = int(e["RANK"])
    agent.hyperpod_past_rcb_barrier()
    agent.hyperpod_send_data(rank, f"data of {rank}")
    print("run", e["ELASTIPOD_GENERATION"], "restarts", e["JOB_RESTART_COUNT"], "rank", rank, "of", e["WORLD_SIZE"],
          "group", e["GROUP_RANK"], "of", e["GROUP_WORLD_SIZE"], "pid", os.getpid(),
          "others", len(start["aggregate_worker_data"]["aggregate_worker_data"] or ()), flush=True)
    print(train(rank), rank, flush=True)
"""


def restart_loop(must_drain: str) -> str:
    """Give a script whose loop an in-process restart runs again. Each rank does what the file order-<rank> in its home says, once."""
    return f"""
import os, sys, time
from pathlib import Path
from hyperpod_elastic_agent.ipc import HyperPodIPCException, RestartMode, TrainingManager
{must_drain}
{_LOOP}"""


def check_fences(agent: AgentClient) -> None:
    """Call with generations that are late, repeated or not stopped yet: none of these changes anything."""
    assert agent.stop(2) == (200, None), "a stop that overtook its start"
    assert agent.start(2) == (200, None)
    assert agent.status()["status"] == "ready", "its start does nothing then"
    assert agent.start(3) == (200, None)
    agent.until_printed("pid")
    version = agent.status()["version"]
    code, body = agent.start(2)
    assert (code, body["generation"], body["status"]) == (409, 3, "running")
    assert agent.stop(2)[0] == 409
    assert agent.start(3) == (200, None)
    assert agent.start(4)[0] == 409, "stopped first"
    assert agent.status()["version"] == version, "none of these changed anything"
    assert agent.stop(3) == (200, None)
    agent.until("ready")
    assert agent.stop(3) == (200, None)
    assert agent.start(3) == (200, None)
    assert agent.status()["status"] == "ready", "a generation runs once"


def check_plain_protocol(agent: AgentClient) -> None:
    """Call as an operator that knows no generation."""
    progress = {"ckpt": {"progressData": "/c/9", "progressCount": 9}}
    assert agent.start(None, faultCount=4, progress=progress, ipVersion="ipv4")[0] == 200
    agent.until_printed("gen 5")
    assert agent.start(None) == (200, None), "taken for a repetition; nothing happens"
    assert agent.call("POST", "/stop", raw=b"")[0] == 200
    seen = agent.until("ready")
    assert (seen["assigned_rank"], seen["ipversion"]) == ("0", "ipv4")
    assert seen["progress"]["ckpt"]["progressCount"] == 9
