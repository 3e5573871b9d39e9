"""A worker with Lightning, with dropout, validation and Lightning's own checkpoints; leaves after the steps that it is told."""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from elastipod.integrations.lightning import elastic_fit, world_settings


class Leave(L.Callback):  # type: ignore[misc]  # the package is not installed where mypy runs
    """Raises the elastic event in given steps."""

    def __init__(self, after: list[int]) -> None:
        self._after = set(after)

    def on_train_batch_start(self, trainer: Any, *more: Any) -> None:
        if trainer.global_step + 1 in self._after:
            self._after.clear()
            os.kill(os.getpid(), signal.SIGUSR1)


class Regression(L.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = (self.layers(batch[0]).squeeze(-1) - batch[1]).pow(2).mean()
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        print(f"validated after {self.trainer.global_step}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint-dir", required=True)
    parser.add_argument("--sample-log-dir", required=True)
    parser.add_argument("--leave-after", type=int, nargs="*", default=[])
    for name in ("samples", "epochs", "global-batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    L.seed_everything(0, verbose=False)
    rows = torch.randn(options.samples, 8)
    data = TensorDataset(rows, rows @ torch.arange(8.0) / 8)
    trainer = L.Trainer(
        max_epochs=options.epochs, strategy="ddp", accelerator="cpu", logger=False, log_every_n_steps=1,
        num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Leave(options.leave_after), ModelCheckpoint(options.checkpoint_dir + "-own", save_last=True)],
        **world_settings(),
    )  # fmt: skip
    elastic_fit(
        trainer, Regression(), DataLoader(data, batch_size=4), global_batch=options.global_batch,
        checkpoints=options.checkpoint_dir, sample_log=options.sample_log_dir,
        val_dataloaders=DataLoader(data, batch_size=options.samples, generator=torch.Generator()),
    )  # fmt: skip
    print(f"done: {trainer.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
