"""A training in memory for pods that are killed: a small model over DDP whose state lives through the loss of others.

Usage, under hyperpodrun: kills_training.py --folder DIR --steps N --pace SECONDS --hurry FILE
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elastipod

GLOBAL_BATCH = 12
FEATURES = 16
CHECKPOINT_EVERY = 500  # the last resort; nothing here should need it


def build() -> dict[str, object]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 1))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pace", type=float, required=True, help="seconds that a step takes, until --hurry is there")
    parser.add_argument("--hurry", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = elastipod.State(
        build,
        wrap=DistributedDataParallel,
        checkpoints=options.folder / "checkpoints",
        checkpoint_every=CHECKPOINT_EVERY,
        sample_log=options.folder / "samples",
    )
    inputs = torch.randn(97, FEATURES, generator=torch.Generator().manual_seed(3))
    for step in state.steps(elastipod.ElasticBatches(options.steps * GLOBAL_BATCH, GLOBAL_BATCH)):
        with step as batch:
            for micro in elastipod.accumulate(state.model, batch, GLOBAL_BATCH):
                part = inputs[[index % len(inputs) for index in micro.indices]]
                (state.model(part).square().mean() * micro.weight).backward()
        if not options.hurry.exists():
            time.sleep(options.pace)


if __name__ == "__main__":
    main()
