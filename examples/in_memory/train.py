"""Train a classifier of handwritten digits that keeps its state in memory when workers come, go or crash.

The same training as `digits/train.py`. Start it with `hyperpodrun train.py ...` (elastic, in memory), `torchrun train.py ...` or plain
`python train.py ...`. What makes it elastic is `elastipod.State`: it builds process groups, resumes, reports, saves, and gives the
batches of whatever world there is.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from elastipod import ElasticBatches, State, accumulate

TRAINING = 1500  # of 1797 images; the others are the test set


def build() -> dict[str, object]:
    """Give everything that training changes. Runs once in each process, before there is any process group."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=50)
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def main() -> None:
    options = parse_options()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits, dtype=torch.int64)
    plan = ElasticBatches(TRAINING, options.global_batch, epochs=options.epochs)
    state = State(
        build,
        wrap=DistributedDataParallel,
        checkpoints=options.checkpoint_dir,
        checkpoint_every=options.checkpoint_every,
        sample_log=options.sample_log_dir,
    )
    for step in state.steps(plan):
        with step as batch:
            total = torch.zeros((), dtype=torch.float64)
            for part in accumulate(state.model, batch, size=16):
                chosen = list(part.indices)
                loss = cross_entropy(state.model(images[chosen]), labels[chosen]) * part.weight
                loss.backward()
                total += loss.detach().double()
            nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
            if batch.world_size > 1:
                dist.all_reduce(total)
            step.loss = total.item() / batch.world_size
        # A step that lost a peer is not done; the loop goes on when the world is whole again.
        if step.is_done and state.rank == 0 and state.completed % options.print_every == 0:
            print(
                f"step {state.completed}/{plan.total_steps} loss {step.loss:.4f} workers {state.world_size}", flush=True
            )

    if state.rank == 0 and state.completed == plan.total_steps:
        state.model.eval()
        with torch.no_grad():
            right = (state.model(images[TRAINING:]).argmax(1) == labels[TRAINING:]).double().mean().item()
        print(f"done: {state.completed} steps, {right:.1%} of unseen digits right", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--checkpoint-dir", required=True, help="for a new start; a recovery reads it only as a last resort"
    )
    parser.add_argument("--sample-log-dir", required=True, help="shared by all workers; `elastipod audit` reads it")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--global-batch", type=int, default=64, help="images per step over all workers")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps")
    parser.add_argument("--print-every", type=int, default=20, help="steps")
    return parser.parse_args()


if __name__ == "__main__":
    main()
