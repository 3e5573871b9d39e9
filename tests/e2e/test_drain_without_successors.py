"""A drain after which too few replicas stay to train: what only their memory would hold is saved, and their processes stay."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

from tests.agent_client import until
from tests.e2e.agent_scripts import RunAgent
from tests.e2e.core_operator import CoreOperator
from tests.patience import PATIENCE_S
from tests.unit.core.builders import pid, policy

from elastipod_operator.core.record import Depth

SCRIPT = """
import os
import sys
import time

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
        state.model(torch.ones(len(batch.indices), 3)).sum().backward()
    if step.is_done:
        print(f"process {os.getpid()} made step {batch.step} of generation {state.generation}", flush=True)
    time.sleep(0.05)
"""
STEP = re.compile(r"process (\d+) made step (\d+) of generation (\d+)")
ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def test_the_newest_step_of_a_job_of_fixed_size_is_saved_and_its_processes_wait_for_the_replacement(
    run_agent: RunAgent, tmp_path: Path
) -> None:
    """The node of one of two pods is drained; the user could suspend the job, or the other node be drained, before there is another."""
    folder = tmp_path / "checkpoints"
    agents = [run_agent(SCRIPT, script_args=(str(folder),), env=ENV) for _ in range(3)]
    operator = CoreOperator(agents[:2], policy(2, 2), generation=random.randrange(100, 800))

    def steps(ordinal: int, generation: int) -> list[tuple[int, int]]:
        """Give the process and the step of each step that a pod has made."""
        found = [tuple(map(int, match)) for match in STEP.findall(agents[ordinal].printed())]
        return [(process, step) for process, step, its in found if its == generation]

    def act_until(condition: Callable[[], object], what: str) -> None:
        def passed() -> object:
            operator.act()
            return condition()

        until(passed, what, PATIENCE_S)

    act_until(lambda: operator.record is not None and steps(0, operator.record.generation), "two pods that train")
    assert operator.record is not None
    first = operator.record.generation
    operator.must_go(0)
    act_until(lambda: all(agent.status()["status"] == "ready" for agent in agents[:2]), "both to have stopped")
    told = {n: body["leaves"] for n, path, body in operator.calls if path == "/stop"}
    assert told == {0: True, 1: True}
    saved = {int(each.name.split("-")[1]) for each in folder.glob("step-*")}
    process, newest = steps(1, first)[-1]
    assert saved == {newest}
    assert agents[1].status()["in_memory"]["kept"] == 1

    operator.add(agents[2])
    act_until(lambda: steps(1, first + 1), "the replacement to train")
    assert operator.record.members == (pid(1), pid(2))
    assert operator.history[-1].depth is Depth.MEMORY
    assert steps(1, first + 1)[0] == (process, newest + 1), "it goes on from memory, in its process"
