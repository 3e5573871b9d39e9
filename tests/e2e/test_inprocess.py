"""In-process restart with real agents and real worker processes, the tests playing the operator."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.agent_client import until
from tests.agent_scenarios import ASK_THE_LIBRARY, restart_loop
from tests.e2e.agent_process import AgentProcess, is_gone, suspend, until_gone
from tests.e2e.agent_scripts import RunAgent
from tests.e2e.inprocess_pods import Pods
from tests.free_ports import free_port
from tests.long_runs import LongRun
from tests.nonempty import some

from elastipod.ipc.protocol import SOCKET_ENV, RestartMode

LOOP = restart_loop(ASK_THE_LIBRARY)
EXIT = "import sys; sys.exit(int(sys.argv[1]))"


@pytest.fixture
def pods(run_agent: RunAgent, tmp_path: Path) -> Any:
    """Make pods whose workers run LOOP."""

    def make(num: int, nproc: int, *options: str, script_args: tuple[str, ...] = (), timeout_s: int = 120) -> Pods:
        arguments = [f"--nproc-per-node={nproc}", "--inprocess-restart", f"--inprocess-timeout={timeout_s}", *options]
        agents = [run_agent(LOOP, *arguments, script_args=script_args) for _ in range(num)]
        return Pods(tmp_path, agents, nproc)

    return make


@pytest.mark.slow
def test_a_fault_of_one_rank_restarts_all_ranks_in_their_processes(pods: Any) -> None:
    job = pods(2, 2)
    for agent in job.agents:
        agent.until_printed("]:up ", 2)  # before any start
    job.start(1)
    first = job.pids(1)
    assert set(first) == {0, 1, 2, 3}
    for line in ("rank 0 of 4 group 0 of 2", "rank 1 of 4 group 0 of 2", "rank 2 of 4 group 1 of 2", "rank 3 of 4"):
        assert f"run 1 restarts 0 {line}" in job.printed()

    job.order(3, "in_process_restart")
    seen = job.agents[1].until("faulted")
    assert (seen["reason"], seen["message"]) == ("LostItsMind", "rank 3 says so")
    assert (seen["restartMode"], seen["failure"]["global_rank"]) == ("in_process_restart", 3)
    assert [(one["rank"], one["failed"], one["data"]) for one in seen["worker_data"]] == [
        (2, False, "data of 2"),
        (3, True, "data of 3"),
    ]
    assert job.agents[0].status()["status"] == "running", "its ranks learn of it from the operator's stop"
    assert job.agents[1].start(2)[0] == 409
    job.stop(1, restart_mode="ipr")
    until(lambda: job.printed().count("called back") == 4, "what the workers print in their way back")
    assert [agent.status().get("priority") for agent in job.agents] == ["True", "True"]

    data = [one for agent in job.agents for one in agent.status()["worker_data"]]
    job.start(2, worker_data=data)
    assert job.pids(2) == first, "no process was started anew"
    assert "run 2 restarts 1 rank 3 of 4 group 1 of 2" in job.printed()
    assert len(re.findall("run 2 .* others 4", job.printed())) == 4
    assert "priority" not in job.agents[0].status()

    job.order(0, "crash")
    seen = job.agents[0].until("faulted")
    assert (seen["reason"], seen["failure"]["signal"]) == ("WorkerCrash", "SIGKILL")
    assert psutil.pid_exists(first[1]), "a fault ends nobody"
    job.stop(2, restart_mode="ipr")
    assert [agent.status().get("priority") for agent in job.agents] == [None, "True"]
    assert [one["failed"] for one in job.agents[0].status()["worker_data"]] == [True, False]
    job.start(3)
    third = job.pids(3)
    assert third[0] != first[0]
    assert {rank: third[rank] for rank in (1, 2, 3)} == {rank: first[rank] for rank in (1, 2, 3)}


@pytest.mark.parametrize(
    ("how", "mode", "new"),
    [
        pytest.param("process_level_restart", "process_level_restart", {0, 1}, id="process level: all are new"),
        pytest.param(
            "job_level_restart",
            "job_level_restart",
            {0, 1},
            id="job level: all, until the pods go",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "local_process_level_restart",
            "ipr",
            {1},
            id="local process level: who asked for it",
            marks=pytest.mark.slow,
        ),
        pytest.param("in_process_restart", "in_process_restart", set(), id="in process: nobody"),
    ],
)
def test_the_stop_says_which_processes_are_started_anew(pods: Any, how: str, mode: str, new: set[int]) -> None:
    job = pods(1, 2)
    job.start(1)
    job.order(1, how)
    assert job.agents[0].until("faulted")["restartMode"] == how
    job.stop(1, restart_mode=mode)
    assert job.agents[0].status()["restartMode"] == "in_process_restart", "what was asked for is done"
    assert ("worker_data" in job.agents[0].status()) == (new != {0, 1}), "new processes know of no data"
    job.start(2)
    before, after = job.pids(1), job.pids(2)
    assert {rank for rank in after if after[rank] != before[rank]} == new


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stuck", "stopped"])
def test_ranks_that_do_not_come_back_in_time_cost_all_processes_of_the_pod(pods: Any, how: str) -> None:
    timeout_s = 10  # in which every process has to start, too
    job = pods(1, 2, timeout_s=timeout_s)
    job.start(1)
    before = job.pids(1)
    processes = [psutil.Process(pid) for pid in before.values()]
    if how == "stuck":
        job.order(1, "stuck")
        until(lambda: not (job.folder / "order-1").exists(), "the order to be taken")
    else:
        suspend(psutil.Process(before[1]))
    agent = job.agents[0]
    agent.stop(1, restart_mode="ipr")
    assert agent.status()["status"] == "stopping"
    agent.until("ready")
    agent.until_printed(f"local rank 1 did not reach the barrier within {timeout_s} s")
    job.start(2)
    assert not set(before.values()) & set(job.pids(2).values())
    assert all(map(is_gone, processes))


@pytest.mark.slow
def test_a_drain_leaves_processes_that_return_and_replaces_those_that_exit(pods: Any) -> None:
    for script_args, is_kept in (((), True), (("exit",), False)):
        job = pods(1, 2, script_args=script_args)
        agent = job.agents[0]
        for generation in (1, 2):
            job.start(generation)
            assert agent.drain(generation) == (200, None)
            seen = agent.until("ready")
            told = (seen["drained"], seen["reason"], seen["generation"])
            assert told == (True, "Drained", generation), agent.printed()
        assert (job.pids(1) == job.pids(2)) is is_kept, "the event is asked for anew in each run"
        job.start(3)
        agent.stop(3, restart_mode="ipr")
        assert agent.until("ready")["drained"] is False


@pytest.mark.slow
def test_a_crash_during_a_drain_is_told_and_calls_the_others_back(pods: Any) -> None:
    job = pods(1, 2, script_args=("deaf",))
    agent = job.agents[0]
    job.start(1)
    agent.drain(1, timeout=600)
    job.order(1, "crash")
    seen = agent.until("ready")
    assert (seen["drained"], seen["reason"], seen["failure"]["signal"]) == (False, "WorkerCrash", "SIGKILL")
    job.start(2)
    assert [job.pids(1)[rank] == job.pids(2)[rank] for rank in (0, 1)] == [True, False]


def test_workers_that_a_drain_does_not_reach_are_called_back(pods: Any) -> None:
    job = pods(1, 2, script_args=("deaf",))
    job.start(1)
    job.agents[0].drain(1, timeout=0.2)
    seen = job.agents[0].until("ready")
    assert (seen["drained"], seen["reason"]) == (False, "DrainTimedOut")
    job.start(2)
    assert job.pids(1) == job.pids(2)


@pytest.mark.slow
def test_a_training_that_ends_is_completed_and_can_be_run_again(pods: Any) -> None:
    job = pods(1, 2)
    job.start(1)
    job.order(0, "end")
    job.order(1, "end")
    agent = job.agents[0]
    agent.until("completed")
    assert agent.printed().count("]:up ") == 2, "nobody is started anew unless asked"
    assert agent.start(1) == (200, None)
    job.stop(1)
    job.start(2)
    assert not set(job.pids(1).values()) & set(job.pids(2).values())


def test_a_worker_that_dies_at_the_barrier_is_replaced_and_released_with_the_others(pods: Any) -> None:
    job = pods(1, 2)
    agent = job.agents[0]
    agent.until_printed("]:up ", 2)
    pids = [int(pid) for pid in re.findall(r"]:up \d (\d+)", agent.printed())]
    os.kill(pids[0], signal.SIGKILL)
    agent.until_printed("]:up ", 3)
    job.start(1)
    assert len(set(pids) & set(job.pids(1).values())) == 1
    assert agent.status()["status"] == "running"


def test_a_spare_waits_and_knows_it(run_agent: RunAgent) -> None:
    script = (
        "from hyperpod_elastic_agent.ipc import InProcessRestartSocketClient\n"
        "agent = InProcessRestartSocketClient()\n"
        "for _ in range(2):\n"
        "    info = agent.hyperpod_wait_rank_info()\n"
        "    print('SPARE', info[1]['worker_envs']['SPARE'], info[1]['worker_envs']['RANK'], flush=True)\n"
        "print('released', agent.hyperpod_barrier()[1]['worker_envs']['SPARE'], flush=True)\n"
    )
    agent = run_agent(script, "--inprocess-restart")
    assert agent.start(1, rank=2, nnodes=2, spare=True) == (200, None)
    agent.until_printed("SPARE True 2")
    seen = agent.status()
    assert (seen["status"], seen["spare"]) == ("ready", "True")
    assert agent.start(2, rank=1, nnodes=2, spare=False) == (200, None)
    agent.until_printed("SPARE False 1")
    agent.until_printed("released False")
    agent.until("completed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "local rank 0 ended with exit code 3 before it reached hyperpod_barrier()"),
        (0, "local rank 0 ended with exit code 0 before it reached hyperpod_barrier()"),
    ],
)
def test_a_script_that_never_comes_to_the_barrier_is_a_fault_of_the_next_start(
    run_agent: RunAgent,
    code: int,
    words: str,
) -> None:
    agent = run_agent(EXIT, "--inprocess-restart", script_args=(str(code),))
    seen = agent.status()
    assert (seen["reason"], seen["message"].partition(";")[0]) == ("WorkerCrash", words)
    agent.start(1)
    seen = agent.until("faulted")
    assert seen["failure"]["message"].startswith(words)
    agent.until_printed("a worker ended between runs", 3)
    assert agent.printed().count("a worker ended between runs") == 3, "it was tried three times"


def test_a_killed_agent_leaves_no_worker(pods: Any) -> None:
    job = pods(1, 2)
    job.start(1)
    workers = [psutil.Process(pid) for pid in job.pids(1).values()]
    socket_path = Path(workers[0].environ()[SOCKET_ENV])
    job.agents[0].process.kill()
    job.agents[0].process.wait()
    until_gone(workers)
    shutil.rmtree(socket_path.parent, ignore_errors=True)  # in a pod it goes with the container's memory


def test_the_plain_mode_takes_reports_checkpoints_and_faults(run_agent: RunAgent) -> None:
    script = (
        "import os, time\n"
        "from hyperpod_elastic_agent.checkpoint_discovery import CheckpointType\n"
        "from hyperpod_elastic_agent.ipc import TrainingManager\n"
        "rank, manager = int(os.environ['RANK']), TrainingManager()\n"
        "series = manager.get_checkpoint_discovery_client('run', 2, 0)\n"
        "print('latest', series.get_latest_checkpoint_path(), flush=True)\n"
        "series.update(7, '/x/7', CheckpointType.MODEL_CHECKPOINT)\n"
        "manager.InProcessRestart.hyperpod_notify_labels({'PP': str(rank)})\n"
        "manager.InProcessRestart.hyperpod_send_data(rank, 'd')\n"
        "while rank == 0 or os.environ['JOB_RESTART_COUNT'] == '1':\n"
        "    time.sleep(0.05)\n"
        "while series.get_latest_checkpoint_path() != '/x/7':\n"
        "    time.sleep(0.01)\n"
        "manager.InProcessRestart.hyperpod_send_fault(rank, message='no more')\n"
        "time.sleep(600)\n"
    )
    agent = run_agent(script, "--nproc-per-node=2")
    agent.start(1, progress={"run": {"progressData": "/x/5", "progressCount": 5}})
    seen = agent.until("faulted")
    assert (seen["reason"], seen["message"], seen["failure"]["global_rank"]) == ("WorkerFault", "no more", 1)
    assert seen["progress"] == {"run": {"progressData": "/x/7", "progressCount": 7, "progressReported": True}}
    agent.until_printed("latest /x/5", 2)
    until(lambda: not psutil.Process(agent.process.pid).children(), "the workers' end")
    agent.stop(1)
    agent.until("ready")
    agent.start(2, progress=seen["progress"])
    agent.until_printed("latest /x/7", 2)
    until(lambda: len(agent.status().get("worker_data", ())) == 2, "both ranks' data")
    seen = agent.status()
    assert (seen["status"], seen["rank_labels"], seen["restartMode"]) == (
        "running",
        {"PP": "0"},
        "process_level_restart",
    )


TORCH = """
import os
import torch, torch.distributed as dist
from hyperpod_elastic_agent.elastic_event_handler import elastic_event_detected
from hyperpod_elastic_agent.ipc import HyperPodIPCException, InProcessRestartSocketClient
agent = InProcessRestartSocketClient()
while True:
    os.environ.update(agent.hyperpod_barrier()[1]["worker_envs"])
    dist.init_process_group("gloo")
    rank, run = dist.get_rank(), os.environ["ELASTIPOD_GENERATION"]
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    print("run", run, "sum", total.item(), "pid", os.getpid(), flush=True)
    if run == "1":
        elastic_event_detected()
        if rank == 1:
            agent.hyperpod_send_fault(rank)
        agent.hyperpod_wait_fault(timeout=240)
    else:
        step = 0
        while not elastic_event_detected():
            step += 1
        print("drained after", step, flush=True)
    dist.destroy_process_group()
"""


def test_torch_ranks_form_a_new_group_in_the_same_processes_and_agree_on_an_event(
    run_agent: RunAgent,
) -> None:
    agents = [run_agent(TORCH, "--inprocess-restart", "--inprocess-timeout=240") for _ in range(2)]
    for generation in (1, 2):
        port = free_port()
        for rank, agent in enumerate(agents):
            assert agent.start(generation, rank=rank, nnodes=2, master_port=port) == (200, None)
        for agent in agents:
            until(partial(_has_printed, agent, f"run {generation} sum 3.0"), f"run {generation}")
        if generation == 1:
            agents[1].until("faulted")
            for agent in agents:
                agent.stop(1, restart_mode="ipr")
                agent.until("ready")
    for agent in agents:
        agent.drain(2)
    assert [agent.until("ready")["drained"] for agent in agents] == [True, True]
    for agent in agents:
        agent.until_printed("drained after")  # a worker's way to the barrier is another one than that of its output
    steps = [re.findall(r"drained after (\d+)", agent.printed()) for agent in agents]
    assert steps[0] == steps[1]
    assert len(steps[0]) == 1
    for agent in agents:
        assert len(set(re.findall(r"run \d sum 3.0 pid (\d+)", agent.printed()))) == 1


@pytest.mark.long("inprocess")
def test_whatever_happens_to_workers_the_pods_become_ready_again(pods: Any, long_run: LongRun) -> None:
    """Random signals, faults and stops, at random moments: every stop ends in READY, every start in a run or a fault."""
    rng = random.Random(long_run.seed)
    job = pods(2, 2, timeout_s=3)
    for generation in range(1, 151):
        for rank, agent in enumerate(job.agents):
            assert agent.start(generation, rank=rank, nnodes=2) == (200, None)
        todo = rng.choice(["", "kill at once", "kill", "stop", "terminate", *RestartMode])
        if todo != "kill at once":
            until(lambda: _is_settled(job, generation), f"run {generation}")  # noqa: B023 called here
        _disturb(job, generation, todo, rng)
        time.sleep(rng.choice([0, 0, 0.05, 0.3]))
        mode = rng.choice(["drain", *RestartMode])
        for agent in job.agents:
            answer = agent.drain(generation, 1) if mode == "drain" else agent.stop(generation, restart_mode=mode)
            assert answer == (200, None)
        for agent in job.agents:
            agent.until("ready")
        for file in job.folder.glob("order-*"):
            file.unlink()
        long_run.count(runs=generation)
    for agent in some(job.agents):
        assert psutil.Process(agent.process.pid).num_fds() < 40, "descriptors are given back"


def _has_printed(agent: AgentProcess, text: str) -> bool:
    return text in agent.printed()


def _is_settled(job: Pods, generation: int) -> bool:
    is_faulted = any(agent.status()["status"] == "faulted" for agent in job.agents)
    return is_faulted or len(job.pids(generation)) == job.nproc * len(job.agents)


def _disturb(job: Pods, generation: int, todo: str, rng: random.Random) -> None:
    numbers = {
        "kill at once": signal.SIGKILL,
        "kill": signal.SIGKILL,
        "stop": signal.SIGSTOP,
        "terminate": signal.SIGTERM,
    }
    if todo in numbers:
        workers = [one for agent in job.agents for one in psutil.Process(agent.process.pid).children(recursive=True)]
        with suppress(ProcessLookupError):
            os.kill(rng.choice([one.pid for one in workers]), numbers[todo])
    elif todo:
        job.order(rng.randrange(4), RestartMode(todo).value)
