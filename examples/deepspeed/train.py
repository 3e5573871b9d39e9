"""Train a small network with DeepSpeed's ZeRO, stage 1, 2 or 3, on however many workers there are.

DeepSpeed's checkpoint of a stage belongs to one world size. When the size has changed, rank 0 converts the newest one with
DeepSpeed's own tool for universal checkpoints, and all ranks load that. The data is made here. Start it with
`hyperpodrun train.py ...`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from elastipod import Batch, ElasticBatches, SampleLog, elastic_event_detected, report
from elastipod.integrations.marks import Marked, MarkedCheckpoints


def train(options: argparse.Namespace, rank: int, world_size: int) -> None:
    plan = ElasticBatches(options.samples, options.global_batch, epochs=options.epochs)
    checkpoints = MarkedCheckpoints(options.checkpoint_dir, re.compile(r"step-(\d+)"))
    newest = checkpoints.newest()
    is_resized = newest is not None and newest.world_size != world_size
    engine = make_engine(options.stage, is_universal=is_resized)
    if newest:
        load(engine, newest, is_resized)
        plan = plan.resumed(newest.data)
    rows = torch.randn(options.samples, 8, generator=torch.Generator().manual_seed(1))
    targets = (rows * torch.arange(8.0)).sum(-1, keepdim=True) / 8
    data = (rows.to(engine.device), targets.to(engine.device))
    place = {"generation": checkpoints.generation, "rank": rank, "world_size": world_size, "resume": newest}
    log = SampleLog(options.sample_log_dir, plan, **place)
    for batch in plan.iterate(rank, world_size):
        started = time.monotonic()
        loss = train_step(engine, batch, *data)
        time.sleep(max(0.0, options.min_step_time - (time.monotonic() - started)))
        log.step(batch, loss)
        report(batch.step, batch.samples_seen, loss, batch.global_size / (time.monotonic() - started))
        is_last = batch.step == plan.total_steps
        is_leaving = not is_last and elastic_event_detected()
        if is_leaving or is_last or batch.step % options.checkpoint_every == 0:
            path = options.checkpoint_dir / f"step-{batch.step}"
            checkpoints.begin(path)
            engine.save_checkpoint(options.checkpoint_dir, tag=path.name, save_latest=False)
            checkpoints.finish(path, batch.step, plan.state_dict(batch.step))
            checkpoints.prune(keep=2)
        if is_leaving or is_last:
            log.end(batch.step, "drained" if is_leaving else "completed")
        if is_leaving:
            return
        if is_last and rank == 0:
            print(f"done: {batch.step} steps, loss {loss:.6f}", flush=True)


def make_engine(stage: int, *, is_universal: bool) -> Any:
    """Give DeepSpeed's engine. The plan divides the global batch, so DeepSpeed's own batch sizes are 1."""
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "checkpoint": {"load_universal": is_universal},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train_step(engine: Any, batch: Batch, rows: torch.Tensor, targets: torch.Tensor) -> float:
    """Run one optimizer step and give the mean loss over the global batch. Collective."""
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    for part in batch.micro_batches(4):
        engine.set_gradient_accumulation_boundary(part.is_last)
        at = list(part.indices)
        loss = nn.functional.mse_loss(engine(rows[at]), targets[at]) * part.weight
        engine.backward(loss)
        engine.step()  # changes the weights after the last pass only
        total += loss.detach().double()
    dist.all_reduce(total)
    return float(total.item()) / batch.world_size


def load(engine: Any, newest: Marked, is_resized: bool) -> None:
    """Load a checkpoint, at another world size by way of a universal one. Collective."""
    path = newest.path
    if is_resized:
        path = path.with_name(f"universal-{path.name}")
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)  # of a conversion that was cut off
            tool = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
            subprocess.run([*tool, "--input_folder", newest.path, "--output_folder", path], check=True)
        dist.barrier()
    engine.load_checkpoint(path.parent, tag=path.name)
    dist.barrier()
    if is_resized and dist.get_rank() == 0:
        shutil.rmtree(path)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--checkpoint-dir", type=Path, required=True, help="shared by all workers")
    parser.add_argument("--sample-log-dir", required=True, help="shared by all workers; `elastipod audit` reads it")
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3), help="of ZeRO")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--global-batch", type=int, default=24, help="rows per step over all workers")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps")
    parser.add_argument("--min-step-time", type=float, default=0.0, help="seconds, to slow down a demonstration")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    try:
        train(options, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
