"""A rank of the in-memory tests: trains a small model with `elastipod.State`, in a fixed order of sums.

Arguments: a JSON object of `Options`. Prints one line for each generation that it trains in, and writes the digest of its final
weights and moments.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

import elastipod
from elastipod.data.loader import ElasticLoader
from elastipod.in_memory.members import digest_of

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.e2e import inmemory_mutants
from tests.e2e.inmemory_evaluation import evaluate
from tests.e2e.inmemory_holds import hold_after

SAMPLES, FEATURES = 96, 8


@dataclass(frozen=True)
class Options:
    """What one run trains. is_exact: in a fixed order of sums, so that worlds of all sizes give the same bits.
    mutant: a mistake of `inmemory_mutants` that is in force in generation 2. first_step_s: in the place of step_s in
    generation 1, where steps must be left when all have agreed on an event. loads: the data comes from an `ElasticLoader`.
    evaluates: "before" or "after" the block of a step, as `inmemory_evaluation` does.
    """

    folder: str
    steps: int = 24
    global_batch: int = 12
    step_s: float = 0.01
    first_step_s: float | None = None
    checkpoint_every: int = 0
    is_exact: bool = True
    mutant: str = ""
    backend: str | None = None
    loads: bool = False
    evaluates: str = ""


def build_with_loader(plan: elastipod.ElasticBatches) -> dict[str, object]:
    """The same, and a loader of the data with a worker process."""
    loader = ElasticLoader[Any](TensorDataset(*data()), plan, micro_batch=1, num_workers=1)
    return {**build(), "loader": loader}


def build() -> dict[str, object]:
    """Two optimizers with a schedule each, one of them with two groups, a frozen parameter and an average of the weights."""
    torch.manual_seed(7)
    first, last = nn.Linear(FEATURES, 32), nn.Linear(32, 4)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(32, 32, bias=False).requires_grad_(False), last)
    groups: list[dict[str, object]] = [{"params": [first.weight]}, {"params": [last.weight], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    biases = torch.optim.SGD([first.bias, last.bias], lr=0.01, momentum=0.9)
    schedules = {
        f"rate_of_{name}": torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + 0.1 * step))
        for name, each in {"optimizer": optimizer, "biases": biases}.items()
    }
    return {"model": model, "optimizer": optimizer, "biases": biases, **schedules, "ema": AveragedModel(model)}


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    return inputs, (inputs.sum(1) > 0).long() + 2 * (inputs[:, 0] > 0).long()


def train(options: Options) -> None:
    folder = Path(options.folder)
    inputs, targets = data()
    plan = elastipod.ElasticBatches(
        SAMPLES, options.global_batch, epochs=options.steps * options.global_batch // SAMPLES
    )
    state = elastipod.State(
        partial(build_with_loader, plan) if options.loads else build,
        wrap=inmemory_mutants.wrap,
        checkpoints=folder / "checkpoints" if options.checkpoint_every else None,
        checkpoint_every=options.checkpoint_every,
        sample_log=folder / "samples",
        backend=options.backend,
    )
    if options.mutant:
        inmemory_mutants.plant(options.mutant, state)
    generation = 0
    for step in state.steps(plan, grain=1):
        if state.generation != generation:
            generation = state.generation
            say(f"generation {generation} rank {state.rank} of {state.world_size} after step {state.completed}")
            if state._memory.following.step is not None:
                say(f"has followed up to step {state._memory.following.step}")
        if options.evaluates == "before":
            evaluate(state, folder, inputs)
        with step as batch:
            passes = (
                elastipod.fixed_order_passes(state.model, batch, 1)
                if options.is_exact
                else elastipod.accumulate(state.model, batch, 4)
            )
            loaded = state.loader.passes(batch) if options.loads else iter(())
            for part in passes:
                indices = list(part.indices)
                own_inputs, own_targets = next(loaded)[1] if options.loads else (inputs[indices], targets[indices])
                loss = nn.functional.cross_entropy(state.model(own_inputs), own_targets)
                (loss * part.weight).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
        if options.evaluates == "after" and step.is_done:
            evaluate(state, folder, inputs)
        first_step_s = options.step_s if options.first_step_s is None else options.first_step_s
        time.sleep(first_step_s if state.generation == 1 else options.step_s)
        hold_after(batch.step, folder)
    final = {key: digest for key, digest in state._members.digests().items() if key != "loader"}
    (folder / f"final-{os.environ.get('ELASTIPOD_LOCAL_RANK', 'single')}").write_text(digest_of(final))
    say(f"finished after step {state.completed}")


def say(text: str) -> None:
    print(f"{time.monotonic():.3f} pid {os.getpid()} {text}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Options(**json.loads(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # unloading all of torch takes seconds on a busy machine and shows nothing
