"""A process whose loop ends by an exception of the script ends too, wherever the script keeps its loop."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.free_ports import free_port
from tests.nonempty import some
from tests.patience import PATIENCE_S

SCRIPT = """
import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastipod import ElasticBatches, State


def build():
    model = nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(loop):
    for step in loop:
        with step as batch:
            if batch.step == 2:
                raise ZeroDivisionError("the script's own mistake")
            state.model(torch.ones(1, 1)).sum().backward()


def train_with_a_local_name():
    loop = state.steps(plan)
    train(loop)


state = State(build, wrap=DistributedDataParallel)
plan = ElasticBatches(dataset_size=8, global_batch=2, seed=1)
if os.environ["RANK"] == "0":
    loop = state.steps(plan)
    train(loop)
else:
    train_with_a_local_name()
"""


def test_a_loop_that_its_traceback_keeps_does_not_keep_the_process(tmp_path: Path) -> None:
    """The interpreter ends such a loop when its threads are gone already."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, script],
            env={**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in some(ranks):
            _, said = rank.communicate(timeout=PATIENCE_S)
            assert "ZeroDivisionError: the script's own mistake" in said
            assert rank.returncode == 1
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
