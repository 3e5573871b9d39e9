"""A rank of the in-memory tests whose losses a GradScaler scales. Arguments: a JSON object of `Options`.

Some steps overflow. They are left out, and the scale is halved: the first of all steps, and steps before, at and after changes of the
world. Every second step clips gradients, so they are unscaled in the loop's block, those of other steps when they are applied.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elastipod
from elastipod.in_memory.members import digest_of

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.e2e.inmemory_holds import hold_after
from tests.e2e.inmemory_worker import FEATURES, SAMPLES, data, say

OVERFLOWS = (1, 5, 6, 7, 8, 10, 12, 13, 14, 15)


@dataclass(frozen=True)
class Options:
    """What one run trains. is_exact: in a fixed order of sums, else reduced by DDP."""

    folder: str
    steps: int = 24
    global_batch: int = 12
    step_s: float = 0.01
    is_exact: bool = True


def build() -> dict[str, object]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 4))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01), "scaler": scaler}


def train(options: Options) -> None:
    folder = Path(options.folder)
    inputs, targets = data()
    epochs = options.steps * options.global_batch // SAMPLES
    plan = elastipod.ElasticBatches(SAMPLES, options.global_batch, epochs=epochs)
    state = elastipod.State(build, wrap=DistributedDataParallel, sample_log=folder / "samples")
    generation = 0
    for step in state.steps(plan, grain=1):
        if state.generation != generation:
            generation = state.generation
            say(f"generation {generation} rank {state.rank} of {state.world_size} after step {state.completed}")
        with step as batch:
            passes = (
                elastipod.fixed_order_passes(state.model, batch, 1)
                if options.is_exact
                else elastipod.accumulate(state.model, batch, 4)
            )
            for number, part in enumerate(passes):
                indices = list(part.indices)
                loss = nn.functional.cross_entropy(state.model(inputs[indices]), targets[indices])
                if batch.step in OVERFLOWS and state.rank == number == 0:
                    loss = loss * torch.inf
                state.scaler.scale(loss * part.weight).backward()
            if batch.step % 2:
                state.scaler.unscale_(state.optimizer)
                nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
        if step.is_done:
            say(f"step {batch.step} scale {state.scaler.get_scale():g}")
        time.sleep(options.step_s)
        hold_after(batch.step, folder)
    final = {**state.scaler.state_dict(), "digest": digest_of(state._members.digests())}
    (folder / f"final-{os.environ.get('ELASTIPOD_LOCAL_RANK', 'single')}").write_text(json.dumps(final))


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Options(**json.loads(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # unloading all of torch takes seconds on a busy machine and shows nothing
