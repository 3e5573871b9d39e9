"""Recovery and resize in memory with real agents, the test playing the operator."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.agent_client import until
from tests.e2e.agent_process import AgentProcess, is_gone, suspend, until_gone
from tests.e2e.agent_scripts import RunAgent
from tests.e2e.inmemory_holds import hold
from tests.e2e.inmemory_job import WORKER
from tests.e2e.inmemory_schedules import JOINED
from tests.free_ports import free_port
from tests.nonempty import every

from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import audit
from elastipod.chaos import CHAOS_ENV, FaultKind, Moment, PlannedFault

# The worker's file is run under its own path, so that it finds what lies beside it.
RUN_WORKER = f"import runpy, sys; sys.path.insert(0, {str(WORKER.parents[2])!r}); runpy.run_path({str(WORKER)!r}, run_name='__main__')"


def is_listening(port: int) -> bool:
    """Tell whether a process of this host listens at a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Agents:
    """Agents of one job; each has one rank. serves_store: the agent of group rank 0 serves the store; else a worker hosts it."""

    def __init__(self, agents: list[AgentProcess]) -> None:
        self.agents = agents
        self.serves_store = True
        self.meets_at: dict[str, Any] = {}  # the newest generation

    def start(self, generation: int, size: int) -> None:
        self.meets_at = {"master_addr": "127.0.0.1", "master_port": free_port()}
        if self.serves_store:
            assert every("store" in agent.status()["features"] for agent in self.agents[:size])
            self.meets_at["store_port"] = self.agents[0].port
        for rank, agent in enumerate(self.agents[:size]):
            assert agent.start(generation, rank=rank, nnodes=size, **self.meets_at) == (200, None)

    def prepare(self, newcomer: AgentProcess, generation: int, size: int) -> set[int]:
        """Have a worker wait until it may join the ranks of the newest generation; give the processes of its agent."""
        body = {"nnodes": size, "generation": generation, **self.meets_at}
        assert newcomer.call("POST", "/prepare", body) == (200, None)
        until(lambda: newcomer.status()["preparation"] == "ready", f"a prepared worker:\n{newcomer.printed()}")
        return {child.pid for child in psutil.Process(newcomer.process.pid).children(recursive=True)}

    def joined(self, generation: int) -> dict[int, tuple[int, int]]:
        """Give, by rank, the pid and the step with which a generation began."""
        printed = "".join(agent.printed() for agent in self.agents)
        found = (tuple(map(int, match)) for match in JOINED.findall(printed))
        return {rank: (pid, step) for pid, number, rank, _, step in found if number == generation}

    def until_step_after(self, step: int) -> None:
        until(lambda: (self.agents[0].status()["worker"]["step"] or 0) > step, f"a step after {step}")

    def until_joined(self, generation: int, size: int) -> dict[int, tuple[int, int]]:
        until(lambda: len(self.joined(generation)) == size, f"{size} ranks in generation {generation}")
        assert is_listening(self.meets_at["master_port"]) is not self.serves_store, (
            "a worker hosts a store where no agent does"
        )
        return self.joined(generation)


@pytest.fixture
def agents(run_agent: RunAgent, tmp_path: Path) -> Any:
    """Make agents whose workers train for a while, each on a node of its own. faults: what happens to the workers on purpose."""

    def make(num: int, *arguments: str, faults: Sequence[PlannedFault] = (), **options: Any) -> Agents:
        told = json.dumps({"folder": str(tmp_path), "steps": 80, "step_s": 0.05, **options})
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        env[CHAOS_ENV] = json.dumps([asdict(fault) for fault in faults])
        memory = [{"ELASTIPOD_MEMORY_DIR": str(tmp_path / f"memory-{number}")} for number in range(num)]
        made = [run_agent(RUN_WORKER, *arguments, script_args=(told,), env=env | own, is_warm=True) for own in memory]
        return Agents(made)

    return make


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="plain"),
        pytest.param(("--inprocess-restart",), id="in-process restart", marks=pytest.mark.long("variants")),
    ],
)
def test_a_killed_worker_is_replaced_and_a_resize_keeps_processes(
    arguments: tuple[str, ...], agents: Any, tmp_path: Path
) -> None:
    job = agents(2, *arguments)
    holds = [hold(tmp_path, step) for step in (10, 20)]
    job.start(1, 2)
    first = job.until_joined(1, 2)
    until(lambda: all(agent.status()["worker"]["step"] == 10 for agent in job.agents), "the first hold")
    os.kill(first[1][0], signal.SIGKILL)
    job.agents[1].until("faulted")
    holds[0].unlink()
    for agent in job.agents:
        agent.stop(1, restart_mode="ipr")
    for agent in job.agents:
        agent.until("ready")
    job.start(2, 2)
    second = job.until_joined(2, 2)
    assert second[0][0] == first[0][0], "the survivor kept its process"
    assert second[1][0] != first[1][0]
    assert second[0][1] == second[1][1] > 0, "both go on after a step that is in memory"

    for agent in job.agents:
        agent.drain(2)
    holds[1].unlink()
    for agent in job.agents:
        agent.until("ready")
    job.start(3, 1)
    third = job.until_joined(3, 1)
    assert third[0][0] == first[0][0]
    assert third[0][1] >= second[0][1]
    job.agents[0].until("completed")
    report = audit(read_logs(tmp_path / "samples"))
    assert report.exact, report
    assert sum(report.steps_repeated.values()) <= 1, "one crash, and a planned change"


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        pytest.param(FaultKind.HANG, Moment.FORWARD, id="in its first forward pass"),
        pytest.param(FaultKind.STOP, Moment.VERIFYING, id="stopped before", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_hangs_before_its_first_step_after_a_resize_is_the_only_one_replaced(
    kind: FaultKind, moment: Moment, agents: Any, tmp_path: Path
) -> None:
    """Then the others wait for the first step of its new process for longer than the limit, and nobody takes that for a hang."""
    faults = [
        PlannedFault(kind, moment, rank=1, from_generation=2, once=str(tmp_path / "happened")),
        PlannedFault(FaultKind.SLOW, Moment.FORWARD, rank=1, from_generation=3, seconds=5),
    ]
    job = agents(3, "--hang-timeout=3", faults=faults, steps=24)
    leaves = job.agents[2]
    held = hold(tmp_path, 6)
    job.start(1, 3)
    first = job.until_joined(1, 3)
    for agent in job.agents:
        assert agent.drain(1, restart_mode="ipr", leaves=agent is leaves) == (200, None)
    held.unlink()
    for agent in job.agents:
        agent.until("ready")
    job.agents.remove(leaves)
    job.start(2, 2)
    seen = job.agents[1].until("faulted")
    assert seen["reason"] == "WorkerUnhealthy"
    assert "rank 1 has made no step in this generation" in seen["message"]
    for agent in job.agents:
        assert agent.stop(2, restart_mode="ipr") == (200, None)
    for agent in job.agents:
        agent.until("ready")
    job.start(3, 2)
    third = job.until_joined(3, 2)
    assert [third[rank][0] == first[rank][0] for rank in (0, 1)] == [True, False]
    for agent in job.agents:
        assert agent.until("completed")["failure"] is None
    report = audit(read_logs(tmp_path / "samples"))
    assert report.exact, report
    assert sum(report.steps_repeated.values()) <= 1


@pytest.mark.long("variants")
@pytest.mark.parametrize("agent_is_killed", [True, False], ids=["agent", "worker"])
def test_who_has_group_rank_zero_dies_and_the_others_go_on_from_memory(
    agent_is_killed: bool, agents: Any, tmp_path: Path
) -> None:
    """The agent that serves the store, with its worker; or the worker that has rank 0, while its agent serves on."""
    job = agents(3, steps=8000)
    dies, *stay = job.agents
    job.start(1, 3)
    first = job.until_joined(1, 3)
    until(lambda: (stay[0].status()["worker"]["step"] or 0) > 5, "some steps")
    worker = psutil.Process(first[0][0])
    os.kill(dies.process.pid if agent_is_killed else worker.pid, signal.SIGKILL)
    until_gone([worker])
    for agent in stay:
        assert agent.stop(1, restart_mode="ipr") == (200, None)
    for agent in stay:
        agent.until("ready")
    job.agents = stay
    job.start(2, 2)
    second = job.until_joined(2, 2)
    assert [second[rank][0] for rank in (0, 1)] == [first[rank][0] for rank in (1, 2)], "they keep their processes"
    assert second[0][1] == second[1][1] >= 5, "and their steps"
    until(lambda: (stay[0].status()["worker"]["step"] or 0) > second[0][1] + 2, "further steps")
    assert sum(audit(read_logs(tmp_path / "samples")).steps_repeated.values()) <= 1


@pytest.mark.long("variants")
def test_where_an_agent_is_of_a_version_without_a_store_a_worker_hosts_it(agents: Any) -> None:
    """A generation meets at the store of an agent, the next one, with an older agent, at that of its rank 0, and then again."""
    job = agents(2, steps=8000)
    pids = set()
    for generation, serves in enumerate((True, False, True), start=1):
        job.serves_store = serves
        job.start(generation, 2)
        joined = job.until_joined(generation, 2)
        pids.add(tuple(joined[rank][0] for rank in (0, 1)))
        job.until_step_after(joined[0][1])
        for agent in job.agents:
            assert agent.drain(generation, restart_mode="ipr", leaves=False) == (200, None)
        for agent in job.agents:
            agent.until("ready")
    assert len(pids) == 1, "the processes are kept"


@pytest.mark.long("variants")
def test_the_newcomer_of_a_growth_is_at_the_barrier_before_the_others_are_told_to_stop(agents: Any) -> None:
    """Its process has started, imported and built while they train, has followed their steps, and is the one that joins them."""
    job = agents(3, steps=8000)
    *members, newcomer = job.agents
    job.start(1, 2)
    first = job.until_joined(1, 2)
    waiting = job.prepare(newcomer, 1, 2)
    assert newcomer.status()["in_memory"] == {"kind": "replicated", "kept": None}
    before = members[0].status()["worker"]["step"]
    until(lambda: members[0].status()["worker"]["step"] > before, "a step of the others, which nobody has stopped")

    for agent in members:
        assert agent.drain(1, restart_mode="ipr", leaves=False) == (200, None)
    for agent in members:
        agent.until("ready")
    job.start(2, 3)
    second = job.until_joined(2, 3)
    assert second[2][0] in waiting, "the newcomer's process was there before the stop"
    assert (second[0][0], second[1][0]) == (first[0][0], first[1][0])
    assert len({step for _, step in second.values()}) == 1, "all go on after the same step"
    newcomer.until_printed(f"has followed up to step {second[2][1]}\n")
    assert second[2][1] > before
    until(lambda: (newcomer.status()["worker"]["step"] or 0) > second[2][1], "a step of the newcomer")


@pytest.mark.slow
def test_a_newcomer_has_followed_to_the_checkpoint_with_which_all_others_begin_in_new_processes(
    agents: Any, tmp_path: Path
) -> None:
    """The step of the stop is in the memory of the nodes of those who trained. The newcomer's node has none of it."""
    job = agents(3, checkpoint_every=100)
    *members, newcomer = job.agents
    job.start(1, 2)
    first = job.until_joined(1, 2)
    waiting = job.prepare(newcomer, 1, 2)
    for agent in members:
        assert agent.drain(1, restart_mode="process_level_restart", leaves=False) == (200, None)
    for agent in members:
        agent.until("ready")
    job.start(2, 3)
    second = job.until_joined(2, 3)
    assert second[2][0] in waiting
    assert not {second[rank][0] for rank in (0, 1)} & {pid for pid, _ in first.values()}, "new processes"
    (step,) = {step for _, step in second.values()}
    assert step > 0
    newcomer.until_printed(f"has followed up to step {step}\n")
    job.agents[0].until("completed")
    report = audit(read_logs(tmp_path / "samples"))
    assert report.exact, report
    assert sum(report.steps_repeated.values()) == 0, report


@pytest.mark.long("variants")
def test_a_member_that_must_go_and_hangs_costs_the_others_neither_time_nor_state(agents: Any, tmp_path: Path) -> None:
    """As with a Spot notice whose time is too short: the drain reaches no common step. Nothing has been saved."""
    job = agents(3, steps=8000)
    *stay, goes = job.agents
    job.start(1, 3)
    first = job.until_joined(1, 3)
    until(lambda: (stay[0].status()["worker"]["step"] or 0) > 5, "some steps")
    hangs = psutil.Process(first[2][0])
    suspend(hangs)
    for agent in job.agents:
        assert agent.drain(1, timeout=3, restart_mode="ipr", leaves=agent is goes) == (200, None)
    for agent in job.agents:
        agent.until("ready")
        assert agent.status()["reason"] == "DrainTimedOut"
    assert is_gone(hangs), "an agent that is ready has ended its workers"
    job.start(2, 2)
    second = job.until_joined(2, 2)
    assert [second[rank][0] for rank in (0, 1)] == [first[rank][0] for rank in (0, 1)], "they keep their processes"
    assert second[0][1] == second[1][1] >= 5, "and the last step that was complete"
    until(lambda: (stay[0].status()["worker"]["step"] or 0) > second[0][1] + 2, "further steps")
    assert sum(audit(read_logs(tmp_path / "samples")).steps_repeated.values()) <= 1


@pytest.mark.long("variants")
def test_the_pod_of_rank_zero_freezes_and_the_others_keep_their_state(agents: Any) -> None:
    """Its connections stay open and new ones are accepted, as by a node that hangs: nothing that the others ask is ever answered."""
    job = agents(3, steps=8000)
    frozen, *stay = job.agents
    job.start(1, 3)
    first = job.until_joined(1, 3)
    until(lambda: (stay[0].status()["worker"]["step"] or 0) > 5, "some steps")
    agent = psutil.Process(frozen.process.pid)
    processes = [agent, *agent.children(recursive=True)]
    for process in processes:
        suspend(process)
    try:
        for each in stay:
            assert each.stop(1, restart_mode="ipr") == (200, None)
        for each in stay:
            each.until("ready", 90)
        job.agents = stay
        job.start(2, 2)
        second = job.until_joined(2, 2)
        assert [second[rank][0] for rank in (0, 1)] == [first[rank][0] for rank in (1, 2)], "they keep their processes"
        assert second[0][1] == second[1][1] >= 5, "and their steps"
    finally:
        for process in processes:
            process.resume()
