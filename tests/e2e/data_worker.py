"""A small real training for tests of data and batches: token file, global position, checkpoints, sample log; leaves or dies on order.

Orders come by environment, so that they hit a step and not a moment: LEAVE_AFTER (a step: save, then exit with 0), DIE_AFTER (a
step, or 0) with DIE_RANK (that rank kills itself when the step is made, before any checkpoint of it).
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastipod import CheckpointManager, ElasticBatches, SampleLog, gradient_sync, report
from elastipod.data import Batch, MicroBatch
from elastipod.data.loader import ElasticLoader
from elastipod.data.tokens import TokenFile, TokenWindows
from elastipod.testing.fixed_order import exact_sum, fixed_order_passes

GRAIN = 3
SEQ_LEN = 12


class Words(nn.Module):
    """Predicts the next byte from the ones before it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, 24)
        self.mixed = nn.GRU(24, 32, batch_first=True)
        self.out = nn.Linear(32, 256)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.mixed(self.bytes(windows[:, :-1]))
        return nn.functional.cross_entropy(self.out(hidden).flatten(0, 1), windows[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["fixed-order", "ddp"], required=True)
    for name in ("--tokens", "--checkpoint-dir", "--sample-log-dir"):
        parser.add_argument(name, required=True)
    for name in ("--samples", "--epochs", "--global-batch", "--checkpoint-every"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    try:
        train(options, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def train(options: argparse.Namespace, rank: int, world_size: int) -> None:
    windows = TokenWindows(TokenFile(options.tokens), SEQ_LEN)
    plan = ElasticBatches(options.samples, options.global_batch, seed=5, epochs=options.epochs)
    torch.manual_seed(0)
    model: nn.Module = Words()
    if options.mode == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)
    checkpoints = CheckpointManager(options.checkpoint_dir)
    resume = checkpoints.load_latest(model=model, optimizer=optimizer)
    if resume:
        plan = plan.resumed(resume.extra["data"])
    step = resume.step if resume else 0
    log = SampleLog(
        options.sample_log_dir,
        plan,
        generation=checkpoints.generation,
        rank=rank,
        world_size=world_size,
        resume=resume,
    )
    leave_after = int(os.environ["LEAVE_AFTER"])
    batches = fixed_order(model, windows, plan, rank, world_size, step)
    if options.mode == "ddp":
        batches = distributed(model, windows, plan, rank, world_size, step)

    def save() -> None:
        extra = {"data": plan.state_dict(step)}
        checkpoints.save(step, model=model, optimizer=optimizer, extra=extra, sample_log=log)

    for batch, losses in batches:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step = batch.step
        loss = exact_sum(losses)
        log.step(batch, loss)
        report(step, batch.samples_seen, loss, 0)
        if step == int(os.environ["DIE_AFTER"]) and rank == int(os.environ["DIE_RANK"]):
            os.kill(os.getpid(), signal.SIGKILL)
        if step % options.checkpoint_every == 0 or step == leave_after:
            save()
        if step == leave_after:
            break
    log.end(step, "completed" if step == plan.total_steps else "drained")
    log.close()
    checkpoints.close()


def fixed_order(
    model: nn.Module, windows: TokenWindows, plan: ElasticBatches, rank: int, world_size: int, step: int
) -> Iterator[tuple[Batch, list[float]]]:
    """Give every batch with its passes' losses once its gradient is there, added in the order that no world changes."""
    for batch in plan.iterate(rank, world_size, start_step=step, grain=GRAIN):
        losses = [
            one_pass(model, part, windows.batch(part.indices)) for part in fixed_order_passes(model, batch, GRAIN)
        ]
        yield batch, losses


def distributed(
    model: nn.Module, windows: TokenWindows, plan: ElasticBatches, rank: int, world_size: int, step: int
) -> Iterator[tuple[Batch, list[float]]]:
    """Give every batch with its passes' parts of the loss once DDP has averaged its gradient; a worker process loads."""
    dataset: Any = windows
    with ElasticLoader[torch.Tensor](
        dataset, plan, rank=rank, world_size=world_size, micro_batch=GRAIN, start_step=step, num_workers=1
    ) as loader:
        for batch, passes in loader:
            losses = []
            for part, data in passes:
                with gradient_sync(model, part.is_last):
                    losses.append(one_pass(model, part, data) / world_size)
            yield batch, losses


def one_pass(model: nn.Module, part: MicroBatch, windows: torch.Tensor) -> float:
    loss = model(windows) * part.weight
    loss.backward()
    return float(loss.item())


if __name__ == "__main__":
    main()
