"""A job whose workers keep their processes, with what each rank is to do."""

from __future__ import annotations

import re
from typing import Any

from tests.agent_client import until
from tests.unit.agent.agent_in_process import AgentInProcess

# Each rank does what the file order-<rank> in its home says, once.
# Arguments: "silent" announces nothing, "exit" ends after a drain, "deaf" hears of none, "quiet" leaves no data for others,
# "lost" returns from a drain without the others.
LOOP = """
import os, sys, time
from pathlib import Path
from hyperpod_elastic_agent.ipc import HyperPodIPCException, RestartMode, TrainingManager
from elastipod.ipc.connections import Connections
from elastipod.worker_file import WorkerFile

def order(rank):
    file = Path(os.environ["HOME"]) / f"order-{rank}"
    text = file.read_text() if file.exists() else ""
    if text:
        file.unlink()
    return text

page = WorkerFile.open(os.environ["ELASTIPOD_WORKER_FILE"])
local_rank = int(os.environ["LOCAL_RANK"])

def train(rank):
    step = 0
    while True:
        step += 1
        page.report(local_rank, step=step)
        try:
            agent.hyperpod_wait_fault(timeout=0.05)
            return "called back"
        except HyperPodIPCException:
            pass
        todo = order(rank)
        if page.event().level and "deaf" not in sys.argv:
            page.acknowledge(local_rank)
            print("told", page.leaves(), page.kept(), flush=True)
            if "exit" in sys.argv:
                sys.exit(0)
            return "lost" if "lost" in sys.argv else "drained"
        if todo == "crash":
            os.kill(os.getpid(), 9)
        if todo == "long":
            print("a long step", flush=True)
            be_held()
            continue
        if todo == "stuck":
            time.sleep(600)
        if todo == "end":
            sys.exit(0)
        if todo == "agree":
            page.acknowledge(local_rank)
            return "agreed"
        if todo:
            agent.hyperpod_send_fault(rank, RestartMode(todo), "LostItsMind", f"rank {rank} says so")

def be_held():
    while Path(os.environ["HOME"], "held").exists():
        time.sleep(0.01)

print("imports in", os.getpid(), flush=True)
be_held()
agent = TrainingManager().InProcessRestart
if "silent" not in sys.argv:
    print("env", Connections.from_env().call("keep", kind=sys.argv[1])["env"], flush=True)
how = ""
while True:
    start = agent.enter_next_run(has_left=how == "drained")[1]
    os.environ.update(start["worker_envs"])
    e = os.environ
    rank = int(e["RANK"])
    agent.hyperpod_past_rcb_barrier()
    if "quiet" not in sys.argv:
        agent.hyperpod_send_data(rank, f"data of {rank}")
    print("run", e["ELASTIPOD_GENERATION"], "restarts", e["JOB_RESTART_COUNT"], "rank", rank, "of", e["WORLD_SIZE"],
          "pid", os.getpid(), flush=True)
    how = train(rank)
    print(how, rank, flush=True)
"""
KEEP = "in_process_restart"


class Job:
    """One agent with two workers that run LOOP."""

    def __init__(self, agent: AgentInProcess) -> None:
        self.agent = agent

    def run(self, scenario: Any, *script_args: str, options: tuple[str, ...] = ()) -> int:
        return self.agent.run(
            LOOP, scenario, "--nproc-per-node=2", *options, script_args=script_args or ("replicated",)
        )

    def start(self, generation: int, **fields: Any) -> dict[int, int]:
        """Start a run and wait until both ranks are in it; gives their pids by rank."""
        group_rank, nnodes = fields.pop("rank", 0), fields.pop("nnodes", 1)
        assert self.agent.start(generation, rank=group_rank, nnodes=nnodes, **fields) == (200, None)
        until(lambda: len(self.pids(generation)) == 2, f"both ranks in run {generation}:\n{self.agent.printed()}")
        return self.pids(generation)

    def stop(self, generation: int, **fields: Any) -> dict[str, Any]:
        """Stop the run and wait for a ready agent; gives its status."""
        assert self.agent.stop(generation, **fields) == (200, None)
        return self.agent.until("ready")

    def drain(self, generation: int, **fields: Any) -> dict[str, Any]:
        assert self.agent.drain(generation, **fields) == (200, None)
        return self.agent.until("ready")

    def announced(self, kept: int | None = None, kind: str = "replicated") -> None:
        until(lambda: self.agent.status()["in_memory"] == {"kind": kind, "kept": kept}, "what the workers announced")

    def pids(self, generation: int) -> dict[int, int]:
        lines = re.findall(rf"run {generation} restarts .* rank (\d+) .* pid (\d+)", self.agent.printed())
        return {int(rank): int(pid) for rank, pid in lines}

    def order(self, rank: int, todo: str) -> None:
        draft = self.agent.folder / f"order-{rank}.new"
        draft.write_text(todo)
        draft.rename(self.agent.folder / f"order-{rank}")
