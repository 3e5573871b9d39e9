"""A small elastic training for the tests of versions: needs torch and our library, nothing else.

The first generation waits a little at each step, so that it is there when the drain comes; later ones run to the end.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastipod import (
    CheckpointManager,
    ElasticBatches,
    SampleLog,
    elastic_event_detected,
    gradient_sync,
    optimizer_norm,
    report,
)

SAMPLES = 1201  # no multiple of the batch: the last one is shared unevenly
FEATURES = 12


def build(parallel: str) -> nn.Module:
    """Make the same weights on every rank, then spread them."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))
    if parallel == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # torch 2.4 and 2.5
        from torch.distributed._composable.fsdp import fully_shard  # type: ignore[attr-defined]
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def train(folder: Path, parallel: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(2))
    wanted = data.sum(1, keepdim=True).sin()
    plan = ElasticBatches(SAMPLES, 16, seed=3, epochs=4)
    model = build(parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
    checkpoints = CheckpointManager(folder / "checkpoints")
    resume = checkpoints.load_latest(model=model, optimizer=optimizer, scheduler=schedule)
    step = resume.step if resume else 0
    log = SampleLog(
        folder / "samples", plan, generation=checkpoints.generation, rank=rank, world_size=world_size, resume=resume
    )
    if resume:
        log.loaded(step, optimizer_norm(optimizer))
    print(f"python {sys.version.split()[0]} torch {torch.__version__} begins after step {step}", flush=True)

    def leave(why: Literal["drained", "completed"]) -> None:
        checkpoints.save(step, model=model, optimizer=optimizer, scheduler=schedule, sample_log=log)
        log.end(step, why)
        print(f"{why} after step {step}", flush=True)

    for batch in plan.iterate(rank, world_size, start_step=step):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for part in batch.micro_batches(4):
            chosen = list(part.indices)
            with gradient_sync(model, part.is_last):
                loss = nn.functional.mse_loss(model(data[chosen]), wanted[chosen]) * part.weight
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        optimizer.step()
        schedule.step()
        step = batch.step
        log.step(batch, total)
        report(step, batch.samples_seen, total, 1.0)
        if checkpoints.generation == 1:
            time.sleep(0.05)
        if elastic_event_detected():
            leave("drained")
            return
    leave("completed")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parallel", choices=["ddp", "fsdp2"], required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        train(options.folder, options.parallel)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
