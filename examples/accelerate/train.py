"""Train a small network in a plain loop with Hugging Face's Accelerate on however many workers there are.

`elastic_steps` replaces the loops over epochs and batches. The data is made here. Start it with `hyperpodrun train.py ...`.
"""

from __future__ import annotations

import argparse
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset

from elastipod.integrations.accelerate import elastic_steps


class Rows(Dataset):
    """Rows of eight numbers, whose target is a fixed mixture of them."""

    def __init__(self, size: int, sample_time: float) -> None:
        self._rows = torch.randn(size, 8, generator=torch.Generator().manual_seed(1))
        self._sample_time = sample_time

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self._sample_time)
        row = self._rows[index]
        return row, (row * torch.arange(8.0)).sum(-1, keepdim=True) / 8


def main() -> None:
    options = parse_options()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    total_steps = options.epochs * -(-options.samples // options.global_batch)
    scheduler = CosineAnnealingLR(optimizer, T_max=total_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = DataLoader(Rows(options.samples, options.sample_time), batch_size=4)  # at most, in one pass
    for step in elastic_steps(
        accelerator,
        loader,
        model,
        optimizer,
        scheduler,
        global_batch=options.global_batch,
        epochs=options.epochs,
        checkpoints=options.checkpoint_dir,
        checkpoint_every=options.checkpoint_every,
        sample_log=options.sample_log_dir,
    ):
        for rows, targets in step:
            step.backward(mse_loss(model(rows), targets))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        accelerator.print(f"step {step.number} loss {step.loss:.6f}", flush=True)
    accelerator.print(f"done: {total_steps} steps")
    accelerator.end_training()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--checkpoint-dir", required=True, help="shared by all workers; it resumes from what is there")
    parser.add_argument("--sample-log-dir", help="shared by all workers; `elastipod audit` reads it")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--global-batch", type=int, default=24, help="rows per step over all workers")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps")
    parser.add_argument("--sample-time", type=float, default=0.0, help="seconds, to slow down a demonstration")
    return parser.parse_args()


if __name__ == "__main__":
    main()
