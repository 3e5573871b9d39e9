"""Train a small transformer with tensor and data parallelism; only the data-parallel axis changes with the size of the job.

Start it with `hyperpodrun train.py --tp=2 ...` (elastic) or `torchrun train.py --tp=2 ...`.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from elastipod import (
    CheckpointManager,
    ElasticBatches,
    SampleLog,
    accumulate,
    build_mesh,
    data_parallel,
    elastic_event_detected,
    report,
)

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
DIM = HEADS * HEAD_DIM


class Block(nn.Module):
    """Attention and a feed-forward part. With tensor parallelism each rank has some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(DIM, HEADS * HEAD_DIM)
        self.key = nn.Linear(DIM, KV_HEADS * HEAD_DIM)
        self.value = nn.Linear(DIM, KV_HEADS * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        shared = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(shared, dim=1) for part in (key, value))
        attended = scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(gelu(self.up(x)))


class Classifier(nn.Module):
    """Reads a digit as eight rows of eight pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8 * DIM, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(1))


def parallel_model(mesh: DeviceMesh) -> nn.Module:
    """Give the model, cut over `tp` and then sharded over `dp`. The weights are the same at every size."""
    torch.manual_seed(0)
    model = Classifier()
    if "tp" in (mesh.mesh_dim_names or ()):
        columns = dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel())
        rows = dict.fromkeys(("out", "down"), RowwiseParallel())
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {**columns, **rows})
    data = mesh["dp", "shard"] if "shard" in (mesh.mesh_dim_names or ()) else mesh["dp"]  # two dimensions: HSDP
    for block in model.blocks:
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    return model


def train(options: argparse.Namespace) -> None:
    mesh = build_mesh(tp=options.tp, shard=options.shard, device_type="cpu", heads=HEADS, kv_heads=KV_HEADS)
    images, labels = read_digits()
    plan = ElasticBatches(len(images), 16, epochs=options.epochs)
    model = parallel_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)

    checkpoints = CheckpointManager(options.checkpoint_dir)
    resume = checkpoints.load_latest(model=model, optimizer=optimizer)
    if resume:
        plan = plan.resumed(resume.extra["data"])
    log = SampleLog(
        options.sample_log_dir,
        plan,
        generation=checkpoints.generation,
        dp_mesh=mesh,  # one rank of each tensor-parallel group writes
        resume=resume,
    )
    if dist.get_rank() == 0:
        print(
            f"{dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))}, {data_parallel(mesh).world_size} data-parallel",
            flush=True,
        )

    for batch in plan.iterate(dp_mesh=mesh):  # ranks of one tensor-parallel group train the same samples
        started = time.monotonic()
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in accumulate(model, batch, size=8):
            chosen = list(part.indices)
            loss = cross_entropy(model(images[chosen]), labels[chosen]) * part.weight
            loss.backward()
            total += loss.detach()
        optimizer.step()
        for name in mesh.mesh_dim_names or ():
            if name in ("dp", "shard"):
                dist.all_reduce(total, group=mesh.get_group(name))
        mean = total.item() / batch.world_size
        time.sleep(max(0.0, options.min_step_time - (time.monotonic() - started)))
        log.step(batch, mean)
        report(batch.step, batch.samples_seen, mean)

        is_last = batch.step == plan.total_steps
        leaving = not is_last and elastic_event_detected()
        if leaving or is_last or batch.step % options.checkpoint_every == 0:
            extra = {"data": plan.state_dict(batch.step)}
            checkpoints.save(batch.step, model=model, optimizer=optimizer, extra=extra, sample_log=log)
        if leaving or is_last:
            log.end(batch.step, "drained" if leaving else "completed")
            if dist.get_rank() == 0:
                print(f"left after step {batch.step}, loss {mean:.4f}", flush=True)
        if leaving:
            return


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Give 300 images as float32, shape (300, 8, 8), in 0..1, and their labels."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels[:300], dtype=torch.float32).view(-1, 8, 8) / 16
    return images, torch.tensor(labels[:300], dtype=torch.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="ranks of one tensor-parallel group; the same at every size")
    parser.add_argument("--shard", type=int, default=1, help="ranks that shard the weights of one replica (HSDP)")
    parser.add_argument("--checkpoint-dir", required=True, help="shared by all workers")
    parser.add_argument("--sample-log-dir", required=True, help="shared by all workers; `elastipod audit` reads it")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps")
    parser.add_argument("--min-step-time", type=float, default=0.0, help="seconds; slows down a demonstration")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    try:
        train(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
