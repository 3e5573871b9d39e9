"""Workers that announce that they can live on, with real agents and torch over gloo; the tests play the operator."""

from __future__ import annotations

import re
from typing import Any

import psutil
import pytest
from tests.agent_client import until
from tests.e2e.agent_process import AgentProcess, until_gone
from tests.e2e.agent_scripts import RunAgent
from tests.free_ports import free_port
from tests.nonempty import every
from tests.patience import PATIENCE_S

KEEP = "in_process_restart"

# Counts steps in memory: a new world goes on from the highest count of its ranks. Reports each step.
SCRIPT = """
import os, time
from datetime import timedelta
import torch, torch.distributed as dist
from elastipod import report
from elastipod.ipc.connections import Connections
from hyperpod_elastic_agent.elastic_event_handler import elastic_event_detected
from hyperpod_elastic_agent.ipc import InProcessRestartSocketClient
agent = InProcessRestartSocketClient()
Connections.from_env().call("keep", kind="replicated")
step = 0
while True:
    os.environ.update(agent.hyperpod_barrier()[1]["worker_envs"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=240))
    held = step
    newest = torch.tensor([step])
    dist.all_reduce(newest, op=dist.ReduceOp.MAX)
    step = int(newest)
    rank, size = dist.get_rank(), dist.get_world_size()
    print("run", os.environ["ELASTIPOD_GENERATION"], "rank", rank, "of", size, "held", held, "from", step,
          "pid", os.getpid(), flush=True)
    try:
        while not elastic_event_detected():
            dist.all_reduce(torch.ones(1))
            step += 1
            report(step, step)
            time.sleep(0.01)
        print("drained at", step, flush=True)
    except RuntimeError as error:
        print("broken at", step, flush=True)
    dist.destroy_process_group()
"""
RUN = re.compile(
    r"run (?P<run>\d+) rank (?P<rank>\d+) of (?P<of>\d+) held (?P<held>\d+) from (?P<first>\d+) pid (?P<pid>\d+)"
)


class Pods:
    """The agents of one job. agents: all that were started."""

    def __init__(self, run_one: RunAgent, nproc: int) -> None:
        self._run_one = run_one
        self._nproc = nproc
        self.agents: list[AgentProcess] = []

    def add(self, number: int = 1, *options: str) -> list[AgentProcess]:
        added = [self._run_one(SCRIPT, f"--nproc-per-node={self._nproc}", *options) for _ in range(number)]
        self.agents += added
        return added

    def start(self, generation: int | None, members: list[AgentProcess]) -> dict[int, dict[str, int]]:
        """Start a generation, wait until it makes steps, and give what each rank said at its beginning."""
        port, known = free_port(), len(RUN.findall(self._printed()))
        for rank, agent in enumerate(members):
            assert agent.start(generation, rank=rank, nnodes=len(members), master_port=port) == (200, None)
        size = len(members) * self._nproc
        until(lambda: len(RUN.findall(self._printed())) == known + size, f"{size} ranks:\n{self._printed()}")
        until(lambda: all((agent.status()["worker"]["step"] or 0) > 0 for agent in members), "a step of each pod")
        found = [match for match in RUN.finditer(self._printed()) if generation in (None, int(match["run"]))][-size:]
        assert every(int(match["of"]) == size for match in found)
        return {int(m["rank"]): {key: int(m[key]) for key in ("held", "first", "pid")} for m in found}

    def _printed(self) -> str:
        return "".join(agent.printed() for agent in self.agents)


@pytest.fixture
def pods(run_agent: RunAgent) -> Any:
    return lambda nproc=1: Pods(run_agent, nproc)


def announced(agents: list[AgentProcess]) -> None:
    until(lambda: all(agent.status()["in_memory"] for agent in agents), "what the workers announce")


def stop(agents: list[AgentProcess], generation: int, **fields: Any) -> list[dict[str, Any]]:
    for agent in agents:
        assert agent.stop(generation, **fields) == (200, None)
    return [agent.until("ready") for agent in agents]


def test_workers_live_through_a_growth_and_a_shrink_and_go_on_at_their_step(pods: Any) -> None:
    job = pods()
    first, second = job.add(2)
    before = job.start(1, [first])
    announced([first])
    (seen,) = stop([first], 1, is_graceful=True, timeout=PATIENCE_S, restart_mode=KEEP, leaves=False)
    assert (seen["drained"], seen["in_memory"]["kept"]) == (True, 1)
    grown = job.start(2, [first, second])
    assert (grown[0]["pid"], grown[1]["held"]) == (before[0]["pid"], 0)
    assert grown[0]["held"] == grown[0]["first"] == grown[1]["first"] > 0, "no step is lost, and the newcomer has them"
    announced([first, second])
    both = stop([first, second], 2, is_graceful=True, timeout=PATIENCE_S, restart_mode=KEEP)
    assert every((one["drained"], one["in_memory"]["kept"]) == (True, 1) for one in both)
    shrunk = job.start(3, [second])
    assert shrunk[0]["pid"] == grown[1]["pid"]
    assert shrunk[0]["held"] == shrunk[0]["first"] > grown[0]["first"]
    leaver = psutil.Process(grown[0]["pid"])
    assert leaver.is_running(), "it could still give its state"
    assert first.end() == 0
    until_gone([leaver])


@pytest.mark.slow
def test_a_local_rank_that_dies_is_replaced_and_the_other_keeps_its_process(pods: Any) -> None:
    job = pods(2)
    (agent,) = job.add()
    before = job.start(1, [agent])
    announced([agent])
    psutil.Process(before[1]["pid"]).kill()
    seen = agent.until("faulted")
    assert (seen["reason"], seen["restartMode"]) == ("WorkerCrash", KEEP)
    agent.until_printed("broken at")
    (seen,) = stop([agent], 1, restart_mode=KEEP)
    assert seen["in_memory"] == {"kind": "replicated", "kept": 1}
    after = job.start(2, [agent])
    assert (after[0]["pid"] == before[0]["pid"], after[1]["pid"] == before[1]["pid"]) == (True, False)
    assert (after[1]["held"], after[1]["first"]) == (0, after[0]["held"])
    assert after[0]["held"] > 0


def test_a_rank_that_hangs_is_killed_though_another_pod_has_seen_the_hang_first(pods: Any) -> None:
    """The stop that follows reaches its agent before that has found it: its peer waits in a collective that nothing else ends."""
    job = pods()
    (hangs,) = job.add(1, "--hang-timeout=5")
    (waits,) = job.add(1, "--hang-timeout=4.5")
    before = job.start(1, [hangs, waits])
    announced([hangs, waits])
    stopped = psutil.Process(before[0]["pid"])
    stopped.suspend()
    seen = waits.until("faulted")
    assert seen["reason"] == "WorkerUnhealthy"
    seen = stop([hangs, waits], 1, restart_mode=KEEP)
    hangs.until_printed("workers that hang are killed")
    until_gone([stopped])
    assert seen[1]["in_memory"]["kept"] == 1
    assert "did not reach the barrier" not in hangs.printed() + waits.printed(), "nobody was awaited in vain"
    after = job.start(2, [hangs, waits])
    assert after[1]["pid"] == before[1]["pid"]
    assert (after[0]["held"], after[0]["first"]) == (0, after[1]["held"])


@pytest.mark.slow
def test_a_pod_that_is_lost_leaves_the_others_their_processes(pods: Any) -> None:
    job = pods()
    first, second = job.add(2)
    before = job.start(1, [first, second])
    announced([first, second])
    lost = psutil.Process(before[1]["pid"])
    second.process.kill()
    second.process.wait()
    until_gone([lost])
    first.until_printed("broken at")
    assert first.status()["status"] == "running", "its worker is back at the barrier, and waits for the operator"
    (seen,) = stop([first], 1, restart_mode=KEEP)
    assert seen["in_memory"]["kept"] == 1
    after = job.start(2, [first])
    assert after[0]["pid"] == before[0]["pid"]
    assert after[0]["first"] == after[0]["held"] > 0


@pytest.mark.long("variants")
@pytest.mark.parametrize("mode", ["process_level_restart", "job_level_restart", None])
def test_a_deeper_restart_ends_all_processes(pods: Any, mode: str | None) -> None:
    """None: the call of an operator that knows of no kept workers."""
    job = pods(2)
    (agent,) = job.add()
    before = job.start(1, [agent])
    announced([agent])
    workers = [psutil.Process(one["pid"]) for one in before.values()]
    (seen,) = stop([agent], 1, **({} if mode is None else {"restart_mode": mode}))
    assert seen["in_memory"] is None
    until_gone(workers)
    after = job.start(2, [agent])
    assert every(one["held"] == one["first"] == 0 for one in after.values())


@pytest.mark.slow
def test_an_operator_of_the_plain_protocol_drains_and_starts_as_ever(pods: Any) -> None:
    job = pods()
    (agent,) = job.add()
    before = job.start(None, [agent])
    announced([agent])
    assert agent.drain() == (200, None)
    seen = agent.until("ready")
    assert (seen["drained"], seen["reason"]) == (True, "Drained")
    after = job.start(None, [agent])
    assert after[0]["first"] >= before[0]["first"]
    assert agent.stop() == (200, None)
    agent.until("ready")
    until_gone([psutil.Process(one["pid"]) for one in after.values() if psutil.pid_exists(one["pid"])])
