"""Train a classifier of handwritten digits (scikit-learn's bundled data) with DDP, and know nothing of elastic training.

Start it with `hyperpodrun train.py ...` or `torchrun train.py ...`. It saves a checkpoint every so often, and looks for it when it
starts. Its global batch is the same at every size that divides it, and the images of a step follow from its number.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

TRAINING = 1500  # of 1797 images
GLOBAL_BATCH = 60  # divisible by 1 to 6 workers


def share(step: int, rank: int, world_size: int) -> torch.Tensor:
    """Give the indices of this rank's images of a step, which is counted from 1. Each epoch has an order of its own."""
    epoch, at = divmod(step - 1, TRAINING // GLOBAL_BATCH)
    order = torch.randperm(TRAINING, generator=torch.Generator().manual_seed(epoch))
    return order[at * GLOBAL_BATCH : (at + 1) * GLOBAL_BATCH][rank::world_size]


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the state after a step, on rank 0. A crash in the middle leaves the former file."""
    if dist.get_rank() == 0:
        unfinished = path.with_suffix(".unfinished")
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, unfinished)
        unfinished.replace(path)


def train(options: argparse.Namespace) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits, dtype=torch.int64)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    checkpoint = Path(options.checkpoint_dir) / "newest.pt"
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    first = 1
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"] + 1
    for step in range(first, options.steps + 1):
        chosen = share(step, rank, world_size)
        optimizer.zero_grad()
        loss = cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item() / world_size:.8f} workers {world_size}", flush=True)
        time.sleep(options.min_step_time)
        if step % options.checkpoint_every == 0 or step == options.steps:
            save(checkpoint, step, model, optimizer)
    if rank == 0:
        print(f"done: {options.steps} steps", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--checkpoint-dir", required=True, help="shared by all workers")
    parser.add_argument("--steps", type=int, default=75)
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps")
    parser.add_argument("--min-step-time", type=float, default=0.0, help="seconds, to slow down a demonstration")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")  # a model of this size trains fastest on the CPU
    try:
        train(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
