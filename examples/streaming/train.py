"""Train a small network on a stream of Hugging Face's datasets on however many workers there are.

`StreamLanes` keeps the position of a stream whose length nobody knows; with --count, samples are counted once and `Shards` gives
exact epochs. The files are made here. Start it with `hyperpodrun train.py ...`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import load_dataset
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastipod import (
    Batch,
    CheckpointManager,
    ElasticBatches,
    SampleLog,
    ShardReader,
    Shards,
    StreamLanes,
    accumulate,
    elastic_event_detected,
    report,
    shard_lengths,
)

Row = dict[str, Any]
FILES, LANES = 8, 6


class CountedRows:
    """The stream as shards of known lengths: exact epochs, and an order that depends on nothing but the seed."""

    def __init__(self, stream: Any, folder: Path, options: argparse.Namespace) -> None:
        self._stream = stream
        index = folder / "lengths.json"
        if dist.get_rank() == 0:  # reads all samples, when there is no such file yet
            shard_lengths(self._open, stream.num_shards, index)
        dist.barrier()
        lengths = shard_lengths(self._open, stream.num_shards, index)
        shards = Shards(lengths, lanes=options.global_batch)
        self._reader = ShardReader(shards, self._open)
        self.plan = ElasticBatches.over(shards, options.global_batch, epochs=options.epochs)
        self.grain = 1

    def read(self, batch: Batch) -> list[Row]:
        return self._reader.__getitems__(batch.indices_or_spare)

    def state_dict(self, step: int) -> dict[str, Any]:
        return {}  # the plan's position is all

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def _open(self, shard: int, first: int) -> Iterator[Row]:
        return iter(self._stream.shard(self._stream.num_shards, shard).skip(first))


def train(options: argparse.Namespace, rank: int, world_size: int) -> None:
    files = sorted(map(str, options.data_dir.glob("*.jsonl")))
    stream = load_dataset("json", data_files=files, split="train", streaming=True)
    data: Any = (
        CountedRows(stream, options.data_dir, options)
        if options.count
        else StreamLanes(lambda lane: stream.shard(LANES, lane), LANES, global_batch=options.global_batch)
    )
    plan = data.plan if options.count else data.plan(options.steps)
    torch.manual_seed(0)  # the same weights on every rank
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    checkpoints = CheckpointManager(options.checkpoint_dir)
    resume = checkpoints.load_latest(model=model, optimizer=optimizer)
    if resume:
        plan = plan.resumed(resume.extra["data"])
        data.load_state_dict(resume.extra["stream"])
    place = {"generation": checkpoints.generation, "rank": rank, "world_size": world_size, "resume": resume}
    log = SampleLog(options.sample_log_dir, plan, **place)
    for batch in plan.iterate(rank, world_size, grain=data.grain):
        started = time.monotonic()
        optimizer.zero_grad()
        loss = backward(model, batch, data.read(batch))
        optimizer.step()
        time.sleep(max(0.0, options.min_step_time - (time.monotonic() - started)))
        log.step(batch, loss)
        report(batch.step, batch.samples_seen, loss, batch.global_size / (time.monotonic() - started))
        is_last = batch.step == plan.total_steps
        is_leaving = not is_last and elastic_event_detected()
        if is_leaving or is_last or batch.step % options.checkpoint_every == 0:
            position = {"data": plan.state_dict(batch.step), "stream": data.state_dict(batch.step)}
            checkpoints.save(batch.step, model=model, optimizer=optimizer, extra=position, sample_log=log)
        if is_leaving or is_last:
            log.end(batch.step, "drained" if is_leaving else "completed")
        if is_leaving:
            return
        if is_last and rank == 0:
            print(f"done: {batch.step} steps, loss {loss:.6f}", flush=True)


def backward(model: nn.Module, batch: Batch, rows: list[Row]) -> float:
    """Compute the gradient of one step and give the mean loss over the global batch. Collective."""
    inputs = torch.tensor([row["row"] for row in rows])
    targets = torch.tensor([[row["target"]] for row in rows])
    total = torch.zeros((), dtype=torch.float64)
    for part in accumulate(model, batch, size=4):
        loss = nn.functional.mse_loss(model(inputs[part.rows]), targets[part.rows]) * part.weight
        loss.backward()
        total += loss.detach().double()
    dist.all_reduce(total)
    return float(total.item()) / batch.world_size


def make_files(folder: Path) -> None:
    """Write files of different lengths, each under its name only when it is whole, where no others are.

    Those that are there stay: an earlier start may have been killed between two of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"part-{file}.jsonl" for file in range(FILES)]
    there = {path.name for path in folder.glob("*.jsonl")}
    if not there <= set(names):
        return
    numbers = torch.Generator().manual_seed(1)
    for file, name in enumerate(names):
        rows = torch.randn(20 + file, 8, generator=numbers)
        targets = (rows @ torch.arange(8.0) / 8).tolist()
        if name in there:
            continue
        lines = [json.dumps({"row": row, "target": target}) for row, target in zip(rows.tolist(), targets, strict=True)]
        temporary = folder / f"part-{file}.tmp"
        temporary.write_text("\n".join(lines) + "\n")
        temporary.rename(folder / name)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--checkpoint-dir", required=True, help="shared by all workers; it resumes from what is there")
    parser.add_argument("--sample-log-dir", required=True, help="shared by all workers; `elastipod audit` reads it")
    parser.add_argument(
        "--data-dir", type=Path, required=True, help="shared by all workers; files are made unless it has others"
    )
    parser.add_argument("--count", action="store_true", help="count the samples once and train exact epochs")
    parser.add_argument("--epochs", type=int, default=20, help="with --count")
    parser.add_argument("--steps", type=int, default=300, help="without --count")
    parser.add_argument("--global-batch", type=int, default=12, help="rows per step over all workers")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps")
    parser.add_argument("--min-step-time", type=float, default=0.0, help="seconds, to slow down a demonstration")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    try:
        if rank == 0:
            make_files(options.data_dir)
        dist.barrier()
        train(options, rank, world_size)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
