"""An evaluation between two steps of the in-memory tests' workers: a sum over all ranks, in which one of them may die."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

import elastipod

EVERY = 2
DIES_AT, DIES_RANK = 8, 1


def evaluate(state: elastipod.State, folder: Path, inputs: torch.Tensor) -> None:
    """Evaluate if the step is one of those after which all ranks do; say whether it ended whole.

    Once in the life of a job, a rank dies in it when all others have come so far, so that they wait for it in the collective.
    """
    if not state.completed or state.completed % EVERY:
        return
    with state.between_steps() as block:
        state.model.eval()
        with torch.no_grad():
            total = state.model(inputs).double().sum()  # of FSDP2 a collective, too
        if state.completed == DIES_AT:
            _die_once(state, folder)
        dist.all_reduce(total)
    state.model.train()
    how = f"evaluated by {state.world_size}" if block.is_done else "not evaluated"
    print(f"generation {state.generation} rank {state.rank}: step {state.completed} {how}", flush=True)


def _die_once(state: elastipod.State, folder: Path) -> None:
    if state.rank != DIES_RANK:
        (folder / f"waits-{state.rank}").touch()
        return
    died = folder / "died"
    if died.exists():
        return
    while len(list(folder.glob("waits-*"))) < state.world_size - 1:
        time.sleep(0.005)
    died.touch()
    os.kill(os.getpid(), signal.SIGKILL)
