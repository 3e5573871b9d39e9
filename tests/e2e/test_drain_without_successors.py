"""A drain after which too few replicas stay to train: what only their memory would hold is saved, and their processes stay."""

from __future__ import annotations

import random
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.agent_scripts import RunAgent
from tests.e2e.core_operator import CoreOperator
from tests.unit.core.builders import pid, policy

from elastipod_operator.core.record import Depth

SCRIPT = """
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastipod import ElasticBatches, State


def build():
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


state = State(build, wrap=DistributedDataParallel, checkpoints=sys.argv[1])
for step in state.steps(ElasticBatches(dataset_size=40_000, global_batch=4, seed=1)):
    with step as batch:
        if Path(sys.argv[2]).exists():
            print("held", flush=True)
        while Path(sys.argv[2]).exists():
            time.sleep(0.01)
        state.model(torch.ones(len(batch.indices), 3)).sum().backward()
    if step.is_done:
        print(f"process {os.getpid()} made step {batch.step} of generation {state.generation}", flush=True)
    time.sleep(0.05)
"""
STEP = re.compile(r"process (\d+) made step (\d+) of generation (\d+)")
ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@pytest.fixture
def job(run_agent: RunAgent, tmp_path: Path) -> Job:
    return Job(run_agent, tmp_path)


class Job:
    """Two pods of a job of fixed size that train, and a third one; the node of the first is drained."""

    def __init__(self, run_agent: RunAgent, folder: Path) -> None:
        self.checkpoints = folder / "checkpoints"
        self.holds = [folder / f"hold-{ordinal}" for ordinal in range(3)]
        self.agents = [
            run_agent(SCRIPT, script_args=(str(self.checkpoints), str(hold)), env=ENV) for hold in self.holds
        ]

    def train(self, **limits: Any) -> None:
        self.operator = CoreOperator(self.agents[:2], policy(2, 2, **limits), generation=random.randrange(100, 800))
        self.operator.act_until(lambda: self.operator.record is not None and self.steps(0), "two pods that train")

    @property
    def generation(self) -> int:
        assert self.operator.record is not None
        return self.operator.record.generation

    def steps(self, ordinal: int) -> list[tuple[int, int]]:
        """Give the process and the step of each step that a pod has made in the present generation."""
        found = [tuple(map(int, match)) for match in STEP.findall(self.agents[ordinal].printed())]
        return [(process, step) for process, step, its in found if its == self.generation]

    def until_stopped(self) -> None:
        leaver, other = self.agents[:2]
        self.operator.act_until(lambda: leaver.process.poll() is not None, "the end of the pod that must go")
        self.operator.act_until(lambda: other.status()["status"] == "ready", "the other one to have stopped")

    def goes_on_from_memory_with_the_third(self, process: int, step: int) -> None:
        self.operator.add(self.agents[2])
        before = self.generation
        self.operator.act_until(lambda: self.generation > before and self.steps(1), "the replacement to train")
        assert self.operator.record is not None
        assert self.operator.record.members == (pid(1), pid(2))
        assert self.operator.history[-1].depth is Depth.MEMORY
        assert self.steps(1)[0] == (process, step + 1), "it goes on from memory, in its process"


def test_the_newest_step_is_saved_and_the_processes_wait_for_the_replacement(job: Job) -> None:
    """The user could suspend the job, or the other node be drained, before there is another pod."""
    job.train()
    job.operator.must_go(0)
    job.until_stopped()
    told = {n: body["leaves"] for n, path, body in job.operator.calls if path == "/stop"}
    assert told == {0: True, 1: True}
    process, newest = job.steps(1)[-1]
    assert {int(each.name.split("-")[1]) for each in job.checkpoints.glob("step-*")} == {newest}
    assert job.agents[1].status()["in_memory"]["kept"] == 1
    job.goes_on_from_memory_with_the_third(process, newest)


def test_a_drain_that_runs_out_of_time_leaves_the_state_with_who_stays(job: Job) -> None:
    """The worker that must go does not come to the stop step, and the other one waits for its gradients."""
    job.train(graceful_timeout=timedelta(seconds=8))
    job.holds[0].touch()
    job.operator.act_until(lambda: "held" in job.agents[0].printed(), "the worker that does not come any further")
    job.operator.must_go(0)
    job.until_stopped()
    assert not list(job.checkpoints.glob("step-*"))
    assert job.agents[1].status()["in_memory"]["kept"] == 1
    job.goes_on_from_memory_with_the_third(*job.steps(1)[-1])
