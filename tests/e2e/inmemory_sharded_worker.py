"""A rank of the in-memory tests whose state is sharded (FSDP2, HSDP). Arguments: a JSON object of `Options`.

Gradients are whole numbers, and sums of them are exact in any order and over any number of ranks. So final weights and moments are
those of an undisturbed single process bit by bit, though each size of the world divides the reduction differently.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import elastipod
from elastipod.data.loader import ElasticLoader
from elastipod.in_memory.apply_step import apply_gradients
from elastipod.in_memory.parts import part_content
from elastipod.in_memory.phases import Phase
from elastipod.in_memory.sharded_memory import ShardedMemory

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.e2e.inmemory_evaluation import evaluate
from tests.e2e.inmemory_holds import hold_after

SAMPLES, WIDTH = 96, 32  # rows of 32 floats: every shard is divided into whole vectors
MICRO = 4  # samples in a pass
OVERFLOWS = (1, 6, 8, 9, 13)  # with `scaled`


@dataclass(frozen=True)
class Options:
    """What one run trains. mesh: as for `State`. copies: as for `Copies`, none if empty.

    mutant: whether generation 2 adds no gradients up over replicas. scaled: a GradScaler scales the losses; some steps overflow. loads:
    the data comes from an `ElasticLoader` with a worker process. evaluates: after the block of a step, as `inmemory_evaluation` does.
    alone_s: how long the optimizer takes when a rank that has lost its world completes its step. optimizes_from: the first step of which
    the optimizer is not left out, as a GradScaler does after overflows.
    """

    folder: str
    mesh: dict[str, int] = field(default_factory=lambda: {"shard": -1})
    copies: dict[str, int] = field(default_factory=dict)
    steps: int = 24
    global_batch: int = 12
    step_s: float = 0.01
    checkpoint_every: int = 0
    evaluates: bool = False
    mutant: bool = False
    scaled: bool = False
    loads: bool = False
    alone_s: float = 0.0
    optimizes_from: int = 1


class Rows(nn.Module):
    """Adds up products with its rows. Gradients depend on the weights, in whole numbers."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        pull = (self.weight.detach() * 4).round().clamp(-8, 8)
        return (inputs.sum(0) * self.weight).sum() + len(inputs) * (pull * self.weight).sum()


class Model(nn.Module):
    """Layers of uneven sizes: with more ranks than rows some shards are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Rows(rows) for rows in (50, 3))
        self.last = Rows(7)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.last(inputs), *(layer(inputs) for layer in self.layers)]).sum()


def build(mesh: Any) -> dict[str, object]:
    torch.manual_seed(7)
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def build_with(
    more: Mapping[str, Callable[[], object]], right: Callable[[Any], dict[str, object]], mesh: Any
) -> dict[str, object]:
    """The same, and further members."""
    return {**right(mesh), **{name: make() for name, make in more.items()}}


def build_mutant(right: Callable[[Any], dict[str, object]], mesh: Any) -> dict[str, object]:
    built = right(mesh)
    model: Any = built["model"]
    if os.environ["ELASTIPOD_GENERATION"] == "2":
        # In each pass, because `accumulate` says anew whether a pass reduces.
        model.register_forward_pre_hook(lambda module, _: module.set_requires_all_reduce(False))
    return built


def apply_late(options: Options, state: elastipod.State) -> None:
    """Apply the gradients, not before a step of that number, and without a world as slowly as a large optimizer on the host."""
    if state._memory.rank.phase is Phase.QUIESCED:
        time.sleep(options.alone_s)
    if state.completed + 1 >= options.optimizes_from:
        apply_gradients(state._members)


def keep_to_budget(copies: elastipod.Copies) -> None:
    """Fail where a rank holds more images than its budget allows, right after copies were made: it holds most then."""
    copy = ShardedMemory.copy

    def checked(memory: ShardedMemory) -> None:
        copy(memory)
        held = sum(image.num_bytes for images in memory._kept.values() for image in images.values())
        assert held <= copies.memory_bytes, f"{held} bytes after step {memory.completed}, of {copies.memory_bytes}"

    setattr(ShardedMemory, "copy", checked)  # noqa: B010 a plain assignment is refused by the type of the method


def train(options: Options) -> None:
    folder = Path(options.folder)
    inputs = torch.randint(-3, 4, (SAMPLES, WIDTH), generator=torch.Generator().manual_seed(3)).float()
    epochs = options.steps * options.global_batch // SAMPLES
    plan = elastipod.ElasticBatches(SAMPLES, options.global_batch, epochs=epochs)
    copies = elastipod.Copies(**options.copies) if options.copies else None
    if copies is not None:
        keep_to_budget(copies)
    more: dict[str, Callable[[], object]] = {}
    if options.scaled:
        more["scaler"] = partial(torch.amp.GradScaler, "cpu", init_scale=1024.0, growth_interval=4)
    if options.loads:
        more["loader"] = partial(ElasticLoader[Any], TensorDataset(inputs), plan, micro_batch=MICRO, num_workers=1)
    state = elastipod.State(
        partial(build_with, more, partial(build_mutant, build) if options.mutant else build),
        mesh=options.mesh,
        copies=copies,
        apply=partial(apply_late, options) if options.alone_s or options.optimizes_from > 1 else None,
        checkpoints=folder / "checkpoints" if options.checkpoint_every else None,
        checkpoint_every=options.checkpoint_every,
        sample_log=folder / "samples",
    )
    generation = 0
    for step in state.steps(plan, grain=1):
        if state.generation != generation:
            generation = state.generation
            say(f"generation {generation} rank {state.rank} of {state.world_size} after step {state.completed}")
        with step as batch:
            loaded = state.loader.passes(batch) if options.loads else iter(())
            for number, micro in enumerate(elastipod.accumulate(state.model, batch, MICRO)):
                own = next(loaded)[1][0] if options.loads else inputs[list(micro.indices)]
                loss = state.model(own) * state.world_size  # FSDP2 divides by it: exactly
                if options.scaled:
                    overflows = batch.step in OVERFLOWS and state.rank == number == 0
                    loss = state.scaler.scale(loss * torch.inf if overflows else loss)
                loss.backward()
            if options.scaled and batch.step % 2:
                state.scaler.unscale_(state.optimizer)
            nn.utils.clip_grad_norm_(state.model.parameters(), 1e30)  # its sum is over the mesh; nothing is clipped
        if options.evaluates and step.is_done:
            evaluate(state, folder, inputs)
        time.sleep(options.step_s)
        hold_after(batch.step, folder)
    save_final(state, folder)
    say(f"finished after step {state.completed}")


def save_final(state: elastipod.State, folder: Path) -> None:
    """Write this rank's part: for each tensor where it begins, and its bytes."""
    part = next(iter(state._memory.rank.parts))
    shards = part_content(state._members, part, lambda: None)
    found = {
        shape.key: [shape.stretch(part)[0], bytes(shape.bytes_of(shards.tensors[shape.key]).tolist()).hex()]
        for shape in shards.shapes
    }
    name = f"final-{state.rank}"
    (folder / name).write_text(json.dumps({"tensors": found, "values": shards.values}))


def say(text: str) -> None:
    print(f"{time.monotonic():.3f} pid {os.getpid()} {text}", flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    train(Options(**json.loads(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # unloading all of torch takes seconds on a busy machine and shows nothing
