"""Train a classifier of handwritten digits (scikit-learn's bundled data) on however many workers there are.

Start it with `hyperpodrun train.py ...` (elastic), `torchrun train.py ...` or plain `python train.py ...`. The size of the dataset is
not a multiple of the batch, so the last batch of each epoch is short and divided unevenly among the workers.
"""

from __future__ import annotations

import argparse
import math
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from elastipod import (
    Batch,
    CheckpointManager,
    ElasticBatches,
    SampleLog,
    accumulate,
    elastic_event_detected,
    optimizer_norm,
    report,
)

TRAINING = 1500  # of 1797 images; the others are the test set


def train(options: argparse.Namespace, rank: int, world_size: int) -> None:
    images, labels = read_digits()
    plan = ElasticBatches(TRAINING, options.global_batch, seed=options.seed, epochs=options.epochs)
    torch.manual_seed(options.seed)  # the same weights on every rank
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, eps=1e-6)

    checkpoints = CheckpointManager(options.checkpoint_dir, keep=2)
    resume = checkpoints.load_latest(model=model, optimizer=optimizer)
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
        log.loaded(step, optimizer_norm(optimizer))
    if rank == 0:
        print(f"generation {checkpoints.generation}: {world_size} workers continue after step {step}", flush=True)

    loss = resume.extra["loss"] if resume else math.nan

    def save() -> None:
        extra = {"data": plan.state_dict(step), "loss": loss}
        checkpoints.save(step, model=model, optimizer=optimizer, extra=extra, sample_log=log)

    for batch in plan.iterate(rank, world_size):
        started = time.monotonic()
        loss = train_step(model, optimizer, images, labels, batch)
        time.sleep(max(0.0, options.min_step_time - (time.monotonic() - started)))
        samples_per_s = batch.global_size / (time.monotonic() - started)
        step = batch.step
        log.step(batch, loss)
        report(step, batch.samples_seen, loss, samples_per_s)
        if rank == 0 and step % options.print_every == 0:
            print(f"step {step}/{plan.total_steps} loss {loss:.4f} samples/s {samples_per_s:.1f}", flush=True)

        if step == plan.total_steps:
            break
        if elastic_event_detected():  # the same answer after the same step on every rank
            save()
            log.end(step, "drained")
            if rank == 0:
                print(f"step {step} is saved; leaving, to continue at another size", flush=True)
            return
        if step % options.checkpoint_every == 0:
            save()

    save()
    log.end(step, "completed")
    if rank == 0:
        with torch.no_grad():
            correct = (model(images[TRAINING:]).argmax(1) == labels[TRAINING:]).double().mean().item()
        samples = plan.samples_after(step)
        print(
            f"done: {step} steps, {samples} samples, final loss {loss:.4f}, {correct:.1%} of unseen digits right",
            flush=True,
        )


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor, batch: Batch
) -> float:
    """Run one optimizer step and give the mean loss over the global batch. Collective."""
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64)
    for micro in accumulate(model, batch, size=16):
        chosen = list(micro.indices)
        loss = cross_entropy(model(images[chosen]), labels[chosen]) * micro.weight
        loss.backward()
        total += loss.detach().double()
    optimizer.step()
    if batch.world_size > 1:
        dist.all_reduce(total)
    return total.item() / batch.world_size


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Give all images as float32, shape (1797, 64), in 0..1, and their labels, in the order of the dataset."""
    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels, dtype=torch.int64)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--checkpoint-dir", required=True, help="shared by all workers; a run resumes from its latest checkpoint"
    )
    parser.add_argument("--sample-log-dir", required=True, help="shared by all workers; `elastipod audit` reads it")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--global-batch", type=int, default=64, help="images per step over all workers")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps")
    parser.add_argument("--print-every", type=int, default=20, help="steps")
    parser.add_argument(
        "--min-step-time",
        type=float,
        default=0.0,
        help="minimum time of a step in seconds, to slow down a demonstration",
    )
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.use_deterministic_algorithms(True)
    if "WORLD_SIZE" not in os.environ:
        train(options, rank=0, world_size=1)
        return
    dist.init_process_group("gloo")  # a model of this size trains fastest on the CPU
    try:
        train(options, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
