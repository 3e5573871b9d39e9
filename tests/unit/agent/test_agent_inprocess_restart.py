"""In-process restarts with small real workers, the agent in the process of the test."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
from tests.agent_client import until
from tests.agent_scenarios import ASK_THE_WORKER_FILE, restart_loop
from tests.unit.agent.agent_in_process import AgentInProcess

from elastipod_agent.inprocess import pooled_workers

LOOP = restart_loop(ASK_THE_WORKER_FILE)


class Job:
    """One agent with two workers that run LOOP."""

    def __init__(self, agent: AgentInProcess) -> None:
        self.agent = agent

    def run(self, scenario: Any, *, script_args: tuple[str, ...] = (), timeout_s: int = 120, script: str = LOOP) -> int:
        options = ("--nproc-per-node=2", "--inprocess-restart", f"--inprocess-timeout={timeout_s}")
        return self.agent.run(script, scenario, *options, script_args=script_args)

    def start(self, generation: int, **fields: Any) -> dict[int, int]:
        """Start a run and wait until both ranks are in it; gives their pids by rank."""
        assert self.agent.start(generation, rank=0, nnodes=1, **fields) == (200, None)
        until(lambda: len(self.pids(generation)) == 2, f"both ranks in run {generation}:\n{self.agent.printed()}")
        return self.pids(generation)

    def stop(self, generation: int, **fields: Any) -> dict[str, Any]:
        """Stop the run and wait for a ready agent; gives its status."""
        assert self.agent.stop(generation, **fields) == (200, None)
        return self.agent.until("ready")

    def pids(self, generation: int) -> dict[int, int]:
        lines = re.findall(rf"run {generation} restarts .* rank (\d+) .* pid (\d+)", self.agent.printed())
        return {int(rank): int(pid) for rank, pid in lines}

    def order(self, rank: int, todo: str) -> None:
        draft = self.agent.folder / f"order-{rank}.new"
        draft.write_text(todo)
        draft.rename(self.agent.folder / f"order-{rank}")


@pytest.fixture
def job(agent: AgentInProcess) -> Job:
    return Job(agent)


@pytest.mark.parametrize(
    ("later", "mode", "is_new"),
    [
        ("local_process_level_restart", "ipr", (False, True)),
        ("process_level_restart", "prl", (True, True)),
    ],
)
def test_who_has_failed_may_ask_for_more_than_the_first_who_reports(
    job: Job, later: str, mode: str, is_new: tuple[bool, bool]
) -> None:
    """Rank 0 is the victim whose collective has failed; rank 1 knows that its process is of no use any more."""

    def scenario() -> None:
        first = job.start(1)
        job.order(0, "in_process_restart")
        assert job.agent.until("faulted")["restartMode"] == "in_process_restart"
        job.order(1, later)
        until(lambda: job.agent.status()["restartMode"] == later, "the most that is asked for")
        seen = job.agent.status()
        assert (seen["status"], seen["failure"]["global_rank"]) == ("faulted", 0)
        job.stop(1, restart_mode=mode)
        second = job.start(2)
        assert tuple(second[rank] != first[rank] for rank in (0, 1)) == is_new

    assert job.run(scenario) == 0


def test_a_fault_of_one_rank_restarts_all_ranks_in_their_processes(job: Job) -> None:
    def scenario() -> None:
        first = job.start(1)
        job.order(1, "in_process_restart")
        seen = job.agent.until("faulted")
        assert (seen["reason"], seen["message"]) == ("LostItsMind", "rank 1 says so")
        assert (seen["restartMode"], seen["failure"]["global_rank"]) == ("in_process_restart", 1)
        told = [(one["rank"], one["failed"], one["data"]) for one in seen["worker_data"]]
        assert told == [(0, False, "data of 0"), (1, True, "data of 1")]
        assert job.agent.start(2)[0] == 409
        seen = job.stop(1, restart_mode="ipr")
        assert (seen["priority"], seen["restartMode"]) == ("True", "in_process_restart")
        assert job.start(2, worker_data=seen["worker_data"]) == first
        assert "priority" not in job.agent.status()
        job.order(0, "crash")
        seen = job.agent.until("faulted")
        assert (seen["reason"], seen["failure"]["signal"]) == ("WorkerCrash", "SIGKILL")
        assert seen["failure"]["global_rank"] == 0
        os.kill(first[1], 0)  # a fault ends nobody else
        seen = job.stop(2, restart_mode="ipr")
        assert "priority" not in seen
        assert [one["failed"] for one in seen["worker_data"]] == [True, False]
        third = job.start(3)
        assert (third[0] == first[0], third[1] == first[1]) == (False, True)

    job.run(scenario)
    printed = job.agent.printed()
    assert printed.count("called back") == 3
    for line in ("run 1 restarts 0 rank 0 of 2 group 0 of 1", "run 2 restarts 1 rank 1 of 2 group 0 of 1"):
        assert line in printed


@pytest.mark.parametrize(
    ("how", "mode", "new"),
    [
        pytest.param("process_level_restart", "process_level_restart", {0, 1}, id="process level: all are new"),
        pytest.param("local_process_level_restart", "ipr", {1}, id="local process level: who asked for it"),
        pytest.param("in_process_restart", "in_process_restart", set(), id="in process: nobody"),
    ],
)
def test_the_stop_says_which_processes_are_replaced(job: Job, how: str, mode: str, new: set[int]) -> None:
    def scenario() -> None:
        before = job.start(1)
        job.order(1, how)
        assert job.agent.until("faulted")["restartMode"] == how
        seen = job.stop(1, restart_mode=mode)
        assert seen["restartMode"] == "in_process_restart", "what was asked for is done"
        assert ("worker_data" in seen) == (new != {0, 1}), "new processes know of no data"
        after = job.start(2)
        assert {rank for rank in after if after[rank] != before[rank]} == new

    job.run(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stuck", "stopped"])
def test_ranks_that_do_not_come_back_in_time_cost_all_processes_of_the_pod(job: Job, how: str) -> None:
    def scenario() -> None:
        before = job.start(1)
        if how == "stuck":
            job.order(1, "stuck")
            until(lambda: not (job.agent.folder / "order-1").exists(), "the order to be taken")
        else:
            os.kill(before[1], signal.SIGSTOP)
        job.stop(1, restart_mode="ipr")
        job.agent.until_printed("local rank 1 did not reach the barrier within 8 s")
        assert not set(before.values()) & set(job.start(2).values())

    job.run(scenario, timeout_s=8)  # in which every process has to start, too


def test_a_drain_leaves_processes_that_return(job: Job) -> None:
    def scenario() -> None:
        for generation in (1, 2):
            job.start(generation)
            assert job.agent.drain(generation) == (200, None)
            seen = job.agent.until("ready")
            assert (seen["drained"], seen["reason"], seen["generation"]) == (True, "Drained", generation)
        assert job.pids(1) == job.pids(2)
        job.start(3)
        assert job.stop(3, restart_mode="ipr")["drained"] is False

    job.run(scenario)


@pytest.mark.slow
def test_a_crash_during_a_drain_is_reported_and_calls_the_others_back(job: Job) -> None:
    def scenario() -> None:
        before = job.start(1)
        job.agent.drain(1, timeout=600)
        job.order(1, "crash")
        seen = job.agent.until("ready")
        assert (seen["drained"], seen["reason"], seen["failure"]["signal"]) == (False, "WorkerCrash", "SIGKILL")
        after = job.start(2)
        assert [before[rank] == after[rank] for rank in (0, 1)] == [True, False]

    job.run(scenario, script_args=("deaf",))


def test_workers_that_a_drain_does_not_reach_are_called_back(job: Job) -> None:
    """A script that never asks for elastic events still listens for faults."""

    def scenario() -> None:
        before = job.start(1)
        job.agent.drain(1, timeout=0.2)
        seen = job.agent.until("ready")
        assert (seen["drained"], seen["reason"]) == (False, "DrainTimedOut")
        assert seen["message"].endswith("were returned to the barrier")
        job.agent.until_printed("called back", 2)
        assert job.start(2) == before

    job.run(scenario, script_args=("deaf",))


@pytest.mark.slow
def test_a_drain_that_a_rank_hangs_in_ends_in_new_processes(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooled_workers, "LATE_RETURN_S", 4.0)  # enough for the other rank

    def scenario() -> None:
        before = job.start(1)
        job.order(1, "stuck")
        until(lambda: not (job.agent.folder / "order-1").exists(), "the order to be taken")
        job.agent.drain(1, timeout=0.2)
        seen = job.agent.until("ready")
        assert (seen["drained"], seen["reason"]) == (False, "DrainTimedOut")
        job.agent.until_printed("local rank 1 did not reach the barrier within 4 s")
        assert not set(before.values()) & set(job.start(2).values())

    job.run(scenario)


def test_a_training_that_ends_is_completed_and_can_be_run_again(job: Job) -> None:
    def scenario() -> None:
        before = job.start(1)
        for rank in (0, 1):
            job.order(rank, "end")
        job.agent.until("completed")
        assert job.agent.printed().count("]:up ") == 2, "nobody is started again unless asked"
        job.stop(1)
        assert not set(before.values()) & set(job.start(2).values())

    job.run(scenario)


@pytest.mark.slow
def test_a_worker_that_dies_at_the_barrier_is_replaced_and_released_with_the_others(job: Job) -> None:
    def scenario() -> None:
        job.agent.until_printed("]:up ", 2)
        pids = [int(pid) for pid in re.findall(r"]:up \d (\d+)", job.agent.printed())]
        os.kill(pids[0], signal.SIGKILL)
        job.agent.until_printed("]:up ", 3)
        assert len(set(pids) & set(job.start(1).values())) == 1
        assert job.agent.status()["status"] == "running"

    job.run(scenario)
    assert "a worker ended between runs" in job.agent.printed()


def test_a_spare_waits_and_knows_it(agent: AgentInProcess) -> None:
    script = (
        "from hyperpod_elastic_agent.ipc import InProcessRestartSocketClient\n"
        "agent = InProcessRestartSocketClient()\n"
        "for _ in range(2):\n"
        "    info = agent.hyperpod_wait_rank_info()\n"
        "    print('SPARE', info[1]['worker_envs']['SPARE'], info[1]['worker_envs']['RANK'], flush=True)\n"
        "print('released', agent.hyperpod_barrier()[1]['worker_envs']['SPARE'], flush=True)\n"
    )

    def scenario() -> None:
        assert agent.start(1, rank=2, nnodes=2, spare=True) == (200, None)
        agent.until_printed("SPARE True 2")
        assert (agent.status()["status"], agent.status()["spare"]) == ("ready", "True")
        assert agent.start(2, rank=1, nnodes=2, spare=False) == (200, None)
        agent.until_printed("SPARE False 1")
        agent.until_printed("released False")
        agent.until("completed")

    agent.run(script, scenario, "--inprocess-restart")


@pytest.mark.slow
@pytest.mark.parametrize("code", [3, 0])
def test_a_script_that_never_comes_to_the_barrier_is_a_fault_of_the_next_start(
    agent: AgentInProcess, code: int
) -> None:
    words = f"local rank 0 ended with exit code {code} before it reached hyperpod_barrier()"

    def scenario() -> None:
        seen = agent.until("ready")
        assert (seen["reason"], seen["message"].partition(";")[0]) == ("WorkerCrash", words)
        agent.start(1)
        assert agent.until("faulted")["failure"]["message"].startswith(words)
        agent.until_printed("a worker ended between runs", 3)  # lines come a little later than the status

    agent.run(f"raise SystemExit({code})", scenario, "--inprocess-restart")
    assert agent.termination_message.startswith(words)


def test_a_pre_script_runs_before_the_first_workers(agent: AgentInProcess) -> None:
    (agent.folder / "pre.sh").write_text("echo first\n")

    def scenario() -> None:
        agent.until_printed("]:up ")

    agent.run(LOOP, scenario, "--inprocess-restart", f"--pre-train-script={agent.folder / 'pre.sh'}")
    assert agent.printed().index("[pre-train]:first") < agent.printed().index("]:up ")


def test_a_failing_pre_script_is_a_fault_of_the_next_start(agent: AgentInProcess) -> None:
    (agent.folder / "pre.sh").write_text("echo no data; exit 4\n")

    def scenario() -> None:
        agent.until("ready")
        agent.start(1)
        seen = agent.until("faulted")
        assert seen["reason"] == "PreScriptFailed"
        assert "no data" in seen["message"]

    agent.run(LOOP, scenario, "--inprocess-restart", f"--pre-train-script={agent.folder / 'pre.sh'}")
