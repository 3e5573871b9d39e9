"""Train a small network with Lightning on however many workers there are.

Three lines make it elastic: the import, `world_settings()` in the Trainer, and `elastic_fit` in place of `trainer.fit`. The
data is made here. Start it with `hyperpodrun train.py ...`.
"""

from __future__ import annotations

import argparse
import time

import lightning as L
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

from elastipod.integrations.lightning import elastic_fit, world_settings


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


class Regression(L.LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps = steps
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        rows, targets = batch
        return mse_loss(self.layers(rows), targets)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-6)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self._steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    options = parse_options()
    L.seed_everything(0, verbose=False)  # the same weights on every rank
    module = Regression(options.epochs * -(-options.samples // options.global_batch))
    trainer = L.Trainer(
        max_epochs=options.epochs,
        strategy="ddp",
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **world_settings(),
    )
    loader = DataLoader(Rows(options.samples, options.sample_time), batch_size=4)  # at most, in one pass
    elastic_fit(
        trainer,
        module,
        loader,
        global_batch=options.global_batch,
        checkpoints=options.checkpoint_dir,
        checkpoint_every=options.checkpoint_every,
        sample_log=options.sample_log_dir,
    )
    if trainer.is_global_zero:
        print(f"done: {trainer.global_step} steps", flush=True)


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
