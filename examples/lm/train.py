"""Train a small language model on the Python standard library's sources, on however many workers there are.

Start it with `hyperpodrun train.py ...` (elastic), `torchrun train.py ...` or plain `python train.py ...`. What makes it elastic is
`elastipod.State`: when workers come, go or crash, those that stay keep their process and their weights, and go on with the next
step. `train_with_checkpoints.py` is the same training on the lower level, with the model replicated or sharded.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from corpus import read_corpus
from model import ByteTransformer
from settings import learning_rate, options_of, plan_batches, prepare_torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastipod import State, accumulate


def build(options: argparse.Namespace, total_steps: int, device: torch.device) -> dict[str, object]:
    """Give everything that training changes. Runs once in each process, before there is any process group."""
    torch.manual_seed(options.seed)
    model = ByteTransformer(options.dim, options.layers, options.heads, options.seq_len).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, total_steps))
    return {"model": model, "optimizer": optimizer, "scheduler": schedule}


def main() -> None:
    options = options_of(__doc__).parse_args()
    device = prepare_torch()
    corpus = read_corpus(options.seq_len, options.corpus_kib << 10)
    plan = plan_batches(options, corpus)
    state = State(
        # The corpus is no part of what changes; as a member it sees to it that nobody goes on with another one.
        lambda: {**build(options, plan.total_steps, device), "corpus": corpus},
        wrap=DistributedDataParallel,
        checkpoints=options.checkpoint_dir,
        checkpoint_every=options.checkpoint_every,
        sample_log=options.sample_log_dir,
        seed=options.seed,
    )
    generation, last = -1, ""
    for step in state.steps(plan):
        if state.generation != generation and state.rank == 0:
            print(
                f"generation {state.generation}: {state.world_size} workers continue after step {state.completed} of "
                f"{plan.total_steps}",
                flush=True,
            )
        generation = state.generation

        with step as batch:  # computes the gradients; leaving it applies them
            started = time.monotonic()
            total = torch.zeros((), dtype=torch.float64, device=device)
            for micro in accumulate(state.model, batch, options.micro_batch):
                loss = state.model(*corpus.batch(tuple(micro.indices), device)) * micro.weight
                loss.backward()
                total += loss.detach().double()
            nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
            if batch.world_size > 1:
                dist.all_reduce(total)
            step.loss = total.item() / batch.world_size
            time.sleep(max(0.0, options.min_step_time - (time.monotonic() - started)))

        if not step.is_done:  # a peer is gone; the loop goes on when the world is whole again
            continue
        last = f", final loss {step.loss:.4f}"
        if state.rank == 0 and (state.completed % options.print_every == 0 or state.completed == plan.total_steps):
            samples_per_s = batch.global_size / (time.monotonic() - started)
            print(
                f"step {state.completed}/{plan.total_steps} loss {step.loss:.4f} samples/s {samples_per_s:.1f} "
                f"workers {state.world_size}",
                flush=True,
            )

    if state.rank == 0:
        if state.completed == plan.total_steps:
            print(f"done: {state.completed} steps, {plan.samples_after(state.completed)} samples{last}", flush=True)
        else:
            print(f"step {state.completed} is saved; leaving, to continue at another size", flush=True)


if __name__ == "__main__":
    main()
