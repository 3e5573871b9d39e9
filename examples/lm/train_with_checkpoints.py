"""Train a small language model on the Python standard library's sources, on however many workers there are.

The training of `train.py` on the lower level, for scripts that save and load for themselves, and for a model that is sharded
(FSDP2). The function `train` makes it elastic: it resumes from the latest checkpoint, calls `elastic_event_detected()` once per
step, and when that gives True it saves a checkpoint and returns. Every resize and every crash restarts it in new processes.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from corpus import Corpus, read_corpus
from model import ByteTransformer
from settings import learning_rate, options_of, plan_batches, prepare_torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from elastipod import (
    Batch,
    CheckpointManager,
    SampleLog,
    accumulate,
    elastic_event_detected,
    optimizer_norm,
    report,
)


def train(options: argparse.Namespace, device: torch.device, rank: int, world_size: int) -> None:
    corpus = read_corpus(options.seq_len, options.corpus_kib << 10)
    plan = plan_batches(options, corpus)
    model = build_model(options, device, world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, plan.total_steps))

    checkpoints = CheckpointManager(options.checkpoint_dir, keep=2)
    resume = checkpoints.load_latest(model=model, optimizer=optimizer, scheduler=schedule)
    if resume:
        corpus.load_state_dict(resume.extra["corpus"])
    step = resume.step if resume else 0
    if resume:
        plan = plan.resumed(resume.extra["data"])
    log = SampleLog(
        options.sample_log_dir,
        plan,
        generation=checkpoints.generation,
        rank=rank,
        world_size=world_size,
        resume=resume,
    )
    if resume:
        log.loaded(resume.step, optimizer_norm(optimizer))
    if rank == 0:
        print(
            f"generation {checkpoints.generation}: {world_size} workers continue after step {step} of {plan.total_steps}",
            flush=True,
        )

    loss = resume.extra["loss"] if resume else math.nan

    def state() -> dict[str, Any]:
        """Give the content of a checkpoint of the current step."""
        extra = {"corpus": corpus.state_dict(), "data": plan.state_dict(step), "loss": loss}
        return {"model": model, "optimizer": optimizer, "scheduler": schedule, "extra": extra, "sample_log": log}

    for batch in plan.iterate(rank, world_size):
        started = time.monotonic()
        loss = train_step(model, optimizer, corpus, batch, options.micro_batch, device)
        schedule.step()
        step = batch.step
        time.sleep(max(0.0, options.min_step_time - (time.monotonic() - started)))
        samples_per_s = batch.global_size / (time.monotonic() - started)
        log.step(batch, loss)
        report(step, batch.samples_seen, loss, samples_per_s)
        if rank == 0 and (step % options.print_every == 0 or step == plan.total_steps):
            print(
                f"step {step}/{plan.total_steps} loss {loss:.4f} samples/s {samples_per_s:.1f} workers {world_size}",
                flush=True,
            )

        if step == plan.total_steps:
            break
        if elastic_event_detected():  # the same answer after the same step on every rank
            checkpoints.save(step, **state())
            log.end(step, "drained")
            if rank == 0:
                print(f"step {step} is saved; leaving, to continue at another size", flush=True)
            return
        if step % options.checkpoint_every == 0:
            checkpoints.save(step, **state())
        elif options.memory_every and step % options.memory_every == 0:
            checkpoints.save_async(step, **state(), durable=False)  # a crash resumes from here

    checkpoints.save(step, **state())
    log.end(step, "completed")
    if rank == 0:
        print(f"done: {step} steps, {plan.samples_after(step)} samples, final loss {loss:.4f}", flush=True)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    corpus: Corpus,
    batch: Batch,
    micro_batch: int,
    device: torch.device,
) -> float:
    """Run one optimizer step and give the mean loss over the global batch. Collective."""
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for micro in accumulate(model, batch, micro_batch):
        loss = model(*corpus.batch(tuple(micro.indices), device)) * micro.weight
        loss.backward()
        total += loss.detach().double()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if batch.world_size > 1:
        dist.all_reduce(total)
    return total.item() / batch.world_size


def build_model(options: argparse.Namespace, device: torch.device, world_size: int) -> nn.Module:
    """Create the same weights on every rank, then replicate or shard them."""
    torch.manual_seed(options.seed)
    model = ByteTransformer(options.dim, options.layers, options.heads, options.seq_len).to(device)
    if not dist.is_initialized():
        return model
    if options.parallel == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device.type, (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def parse_options() -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.add_argument("--parallel", choices=["ddp", "fsdp2"], default="ddp", help="replicate or shard the model")
    parser.add_argument(
        "--memory-every",
        type=int,
        default=0,
        help="steps between memory checkpoints, from which a crash resumes; 0: none",
    )
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    device = prepare_torch()
    if "WORLD_SIZE" not in os.environ:
        train(options, device, rank=0, world_size=1)
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(options, device, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
