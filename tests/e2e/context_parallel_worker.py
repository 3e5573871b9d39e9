"""A script with context parallelism: the ranks of a replica hold parts of each sequence and exchange keys and values (FSDP2 over all).

torch's own `context_parallel` knows no attention on CPUs (2.15: no sharding strategy for it), so the exchange is written here.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

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

HEADS, DIM, LENGTH = 4, 32, 8
SEQUENCE = 1  # the dimension of all activations that context parallelism divides


class Gather(torch.autograd.Function):
    """Gives the whole sequence of all ranks of a group; the gradient of a part is the sum of those that its readers have."""

    @staticmethod
    def forward(context: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        context.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=SEQUENCE)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=context.group)
        return gradient.chunk(context.group.size(), dim=SEQUENCE)[context.group.rank()], None


class Block(nn.Module):
    """Causal attention of this rank's tokens to those of the whole sequence."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self._group = group
        self.query, self.key, self.value, self.out = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key, value = (gather(layer(x), self._group) for layer in (self.key, self.value))
        query, key, value = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.query(x), key, value))
        seen = own_part(torch.ones(1, LENGTH, LENGTH, dtype=torch.bool).tril(), self._group)
        attended = scaled_dot_product_attention(query, key, value, attn_mask=seen)
        added: torch.Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return x + added


class Classifier(nn.Module):
    """Reads a digit as eight rows of eight pixels."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self._group = group
        self.embed = nn.Linear(8, DIM)
        self.blocks = nn.ModuleList([Block(group), Block(group)])
        self.head = nn.Linear(LENGTH * DIM, 10)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.embed(rows)
        for block in self.blocks:
            x = block(x)
        whole: torch.Tensor = self.head(gather(x, self._group).flatten(1))
        return whole


def gather(part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    whole: torch.Tensor = Gather.apply(part, group) if group else part
    return whole


def own_part(whole: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    return whole.chunk(group.size(), dim=SEQUENCE)[group.rank()] if group else whole


def sharded_model(group: dist.ProcessGroup | None) -> nn.Module:
    torch.manual_seed(0)
    model = Classifier(group)
    everyone = init_device_mesh("cpu", (dist.get_world_size(),))  # gradients are averaged over dp and cp
    for block in model.blocks:
        fully_shard(block, mesh=everyone)
    fully_shard(model, mesh=everyone)
    return model


def train(options: argparse.Namespace) -> None:
    mesh: DeviceMesh = build_mesh(cp=options.cp, device_type="cpu")
    group = mesh.get_group("cp") if options.cp > 1 else None
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels[:300], dtype=torch.float32).view(-1, LENGTH, 8) / 16
    labels = torch.tensor(labels[:300], dtype=torch.int64)
    plan = ElasticBatches(len(images), 16, epochs=options.epochs)
    model = sharded_model(group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)
    checkpoints = CheckpointManager(options.checkpoint_dir)
    resume = checkpoints.load_latest(model=model, optimizer=optimizer)
    if resume:
        plan = plan.resumed(resume.extra["data"])
    log = SampleLog(options.sample_log_dir, plan, generation=checkpoints.generation, dp_mesh=mesh, resume=resume)
    if dist.get_rank() == 0:
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        print(f"{sizes}, {data_parallel(mesh).world_size} data-parallel", flush=True)

    for batch in plan.iterate(dp_mesh=mesh):  # ranks of one context-parallel group train the same samples
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in accumulate(model, batch, size=8):
            chosen = list(part.indices)
            loss = cross_entropy(model(own_part(images[chosen], group)), labels[chosen]) * part.weight
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        optimizer.step()
        dist.all_reduce(total)
        mean = total.item() / dist.get_world_size()
        time.sleep(options.min_step_time)
        log.step(batch, mean)
        report(batch.step, batch.samples_seen, mean)

        is_last = batch.step == plan.total_steps
        is_leaving = not is_last and elastic_event_detected()
        if is_leaving or is_last:
            extra = {"data": plan.state_dict(batch.step)}
            checkpoints.save(batch.step, model=model, optimizer=optimizer, extra=extra, sample_log=log)
            log.end(batch.step, "drained" if is_leaving else "completed")
        if is_leaving:
            return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cp", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--checkpoint-dir", required=True)
    parser.add_argument("--sample-log-dir", required=True)
    parser.add_argument("--min-step-time", type=float, default=0.0)
    dist.init_process_group("gloo")
    try:
        train(parser.parse_args())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
