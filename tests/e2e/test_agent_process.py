"""The agent as a real process, driven over HTTP as the operator does, with real workers and no Kubernetes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from tests.agent_client import until
from tests.e2e.agent_process import AgentProcess, until_gone
from tests.e2e.agent_scripts import FAMILY, POLL, SAY_RANK, RunAgent, _below, worker_pids
from tests.free_ports import free_port
from tests.nonempty import some
from tests.patience import PATIENCE_S

ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print("sum", total.item(), flush=True)
dist.destroy_process_group()
"""
ELASTIC = """
import time
import torch.distributed as dist
from hyperpod_elastic_agent.elastic_event_handler import elastic_event_detected
dist.init_process_group("gloo")
step = 0
while not elastic_event_detected():
    step += 1
    if step == 3:
        print("training", flush=True)
    time.sleep(0.01)
print("stopped after", step, flush=True)
"""


def test_two_pods_train_together_and_complete(run_agent: RunAgent) -> None:
    agents = [run_agent(ALL_REDUCE), run_agent(ALL_REDUCE)]
    port = free_port()
    for rank, agent in enumerate(agents):
        assert agent.start(1, rank=rank, nnodes=2, master_port=str(port)) == (200, None)
    for rank, agent in enumerate(some(agents)):
        seen = agent.until("completed")
        assert seen["drained"] is False
        assert seen["failure"] is None
        agent.until_printed(f"group_rank={rank}")
        agent.until_printed("\n[default0]:sum 3.0\n")  # the agent waits for its output, but not for long


def test_an_event_at_one_pod_drains_the_job_at_the_same_step(run_agent: RunAgent) -> None:
    agents = [run_agent(ELASTIC), run_agent(ELASTIC)]
    port = free_port()
    for rank, agent in enumerate(agents):
        agent.start(1, rank=rank, nnodes=2, master_port=port)
    for agent in agents:
        agent.until_printed("training")
    agents[1].drain(1)
    for agent in agents:
        until(partial(_has_drained, agent), "the drain of both pods")
        agent.until_printed("stopped after")
    steps = {re.findall(r"stopped after (\d+)", agent.printed())[0] for agent in agents}
    assert len(steps) == 1


def _has_drained(agent: AgentProcess) -> bool:
    return agent.status()["drained"] is True


def test_a_killed_worker_is_a_fault_at_once_and_the_next_generation_runs(run_agent: RunAgent) -> None:
    agent = run_agent(POLL, "--nproc-per-node=2")
    assert agent.start(1)[0] == 200
    agent.until_printed("pid", 2)
    before = agent.status()
    assert before["worker"]["step"] == 7
    assert before["worker"]["world_size"] == 2
    assert before["worker"]["total_steps"] == 100
    victim = worker_pids(agent)[0]
    os.kill(victim, signal.SIGKILL)
    _, seen = agent.call("GET", f"/status?after={before['version']}&wait={PATIENCE_S}")
    assert seen["status"] == "faulted", "the exit itself is told, before anybody asks again"
    assert seen["reason"] == "WorkerCrash"
    assert seen["failure"]["signal"] == "SIGKILL"
    assert seen["failure"]["exitcode"] is None
    assert seen["version"] > before["version"]
    assert agent.start(2)[0] == 409, "a faulted agent is stopped first"
    assert agent.stop(1)[0] == 200
    assert agent.until("ready")["drained"] is False
    assert agent.start(2)[0] == 200
    agent.until_printed("gen 2", 2)
    assert agent.status()["failure"] is None


def test_an_exception_is_reported_with_its_traceback(run_agent: RunAgent) -> None:
    agent = run_agent("def train():\n    raise KeyError('lr')\ntrain()\n")
    agent.start(1)
    failure = agent.until("faulted")["failure"]
    assert failure["exitcode"] == 1
    assert failure["global_rank"] == 0
    assert failure["message"].startswith("rank 0 (local rank 0) ended with exit code 1")
    assert failure["message"].endswith("KeyError: 'lr'")
    assert "Traceback" in failure["message"]
    assert agent.end() == 1


def test_a_graceful_stop_drains(run_agent: RunAgent) -> None:
    agent = run_agent(POLL, "--nproc-per-node=2")
    agent.start(1)
    agent.until_printed("pid", 2)
    assert agent.drain(1) == (200, None)
    seen = agent.until("ready")
    assert (seen["drained"], seen["reason"], seen["generation"]) == (True, "Drained", 1)
    assert seen["worker"]["step"] == 7, "the last report stays readable"
    assert agent.end() == 0


def test_a_worker_that_ignores_the_event_is_killed_when_its_time_is_up(run_agent: RunAgent) -> None:
    agent = run_agent(POLL, script_args=("ignore",))
    agent.start(1)
    agent.until_printed("pid")
    asked_at = time.monotonic()
    agent.drain(1, timeout=1)
    seen = agent.until("ready")
    assert time.monotonic() - asked_at >= 1
    assert (seen["drained"], seen["reason"]) == (False, "DrainTimedOut")


def test_a_repeated_stop_gives_a_drain_less_time_and_never_more(run_agent: RunAgent) -> None:
    agent = run_agent(POLL, script_args=("ignore",))
    agent.start(1)
    agent.until_printed("pid")
    agent.drain(1, timeout=600)
    asked_at = time.monotonic()
    assert agent.drain(1, timeout=3)[0] == 200
    agent.drain(1, timeout=600)
    assert agent.until("ready")["reason"] == "DrainTimedOut"
    assert time.monotonic() - asked_at >= 3


def test_a_hard_stop_ends_a_drain(run_agent: RunAgent) -> None:
    agent = run_agent(POLL, script_args=("ignore",))
    agent.start(1)
    agent.until_printed("pid")
    agent.drain(1, timeout=600)
    agent.drain(1, timeout=600)
    assert agent.status()["status"] == "stopping"
    agent.stop(1)
    assert agent.until("ready")["drained"] is False


def test_a_drain_that_came_through_another_pod_is_no_completion(run_agent: RunAgent) -> None:
    """The event is agreed among all ranks: workers here may leave although this agent was not asked yet."""
    acknowledge = (
        "import os\nfrom elastipod.worker_file import WorkerFile\n"
        "WorkerFile.open(os.environ['ELASTIPOD_WORKER_FILE']).acknowledge(0)\n"
    )
    agent = run_agent(acknowledge)
    agent.start(1)
    until(lambda: agent.status()["drained"], "the drain")
    assert agent.status()["reason"] == "Drained"
    assert "STOPPING" in agent.status()["transitions"], "by the moves that the protocol knows"
    assert agent.drain(1) == (200, None), "its own stop then changes nothing"
    assert agent.status()["drained"] is True


def test_a_crash_during_a_drain_is_told(run_agent: RunAgent) -> None:
    crash = POLL + "sys.exit(3)\n"
    agent = run_agent(crash, "--nproc-per-node=2")
    agent.start(1)
    agent.until_printed("pid", 2)
    agent.drain(1)
    seen = agent.until("ready")
    assert (seen["drained"], seen["reason"], seen["failure"]["exitcode"]) == (False, "WorkerCrash", 3)


def test_all_descendants_of_workers_end_with_them(run_agent: RunAgent) -> None:
    agent = run_agent(FAMILY)
    agent.start(1)
    agent.until_printed("family")
    tree = until(lambda: len(found := _below(agent)) == 4 and found, "worker, children and orphan")
    agent.stop(1)
    agent.until("ready")
    until_gone(tree)
    until(lambda: not _below(agent), "the last zombie to be collected")


def test_no_worker_outlives_an_agent_that_is_killed(run_agent: RunAgent) -> None:
    agent = run_agent(POLL)
    agent.start(1)
    agent.until_printed("pid")
    worker = psutil.Process(worker_pids(agent)[0])
    left_behind = Path(worker.environ()["ELASTIPOD_WORKER_FILE"]).parents[1]
    agent.process.kill()
    agent.process.wait()
    until_gone([worker])
    shutil.rmtree(left_behind, ignore_errors=True)


def test_the_wake_up_signal_kills_nobody_who_does_not_listen(run_agent: RunAgent) -> None:
    agent = run_agent("import time\nprint('awake', flush=True)\ntime.sleep(600)\n")
    agent.start(1)
    agent.until_printed("awake")
    agent.drain(1, timeout=0.3)
    assert agent.until("ready")["reason"] == "DrainTimedOut"
    assert "SIGUSR1" not in agent.printed()


DEAF = "import time\nprint('awake', flush=True)\ntime.sleep(600)\n"
HANDLES = (
    "import signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: None)\nprint('awake', flush=True)\n"
    + "time.sleep(1)\n" * 600
)
# Asks where Python allows no handler.
ASKS = """
import threading, time
from hyperpod_elastic_agent.elastic_event_handler import elastic_event_detected
asking = threading.Thread(target=elastic_event_detected)
asking.start()
asking.join()
print("awake", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_workers_that_cannot_know_of_a_drain_are_told_of(run_agent: RunAgent) -> None:
    """Half a minute after their start, when their imports are over; a shell between agent and script changes nothing."""
    agents: list[AgentProcess] = []
    for script, *launcher in (
        (ASKS,),
        (HANDLES, "--no-python", "sh", "-c", f'{sys.executable} "$0"; true'),
        (DEAF,),
    ):
        agent = run_agent(script, *launcher)
        agent.start(1)
        agent.until_printed("awake")
        agent.drain(1)
        agents.append(agent)
    *others, deaf = agents
    until(lambda: deaf.status()["unanswered"], "the agent to find out")
    assert [agent.status()["unanswered"] for agent in others] == [False, False]
    deaf.stop(1, is_graceful=False)
    seen = deaf.until("ready")
    assert (seen["drained"], seen["reason"], seen["unanswered"]) == (False, "EventUnanswered", False)
    assert "elastic_event_detected()" in seen["message"]


def test_a_taken_master_port_is_told_as_such(run_agent: RunAgent) -> None:
    agent = run_agent(SAY_RANK)
    with socket.create_server(("127.0.0.1", 0)) as other:
        agent.start(1, master_port=other.getsockname()[1])
        seen = agent.until("faulted")
    assert seen["reason"] == "WorkerFault"
    assert seen["message"].startswith("EADDRINUSE")


def test_tee_redirects_and_filters_mean_what_they_mean_in_torchrun(run_agent: RunAgent, tmp_path: Path) -> None:
    script = "import os, sys\nprint('out', os.environ['RANK'])\nprint('err', os.environ['RANK'], file=sys.stderr)\n"
    logs = tmp_path / "logs"
    agent = run_agent(
        script, "--nproc-per-node=2", f"--log_dir={logs}", "--tee", "1", "--redirect", "2", "--rdzv-id=r1"
    )
    agent.start(1)
    agent.until("completed")
    agent.until_printed("[default1]:out 1")
    assert "err 1" not in agent.printed()
    (own,) = logs.glob("r1_*")
    assert (own / "attempt_0/1/stdout.log").read_text("utf-8") == "out 1\n"
    assert (own / "attempt_0/0/stderr.log").read_text("utf-8") == "err 0\n"
