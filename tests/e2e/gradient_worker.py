"""One rank that compares gradients: DDP, FSDP2 and HSDP over four ranks against the whole batch in one process, model after model.

Prints one JSON line: cases, the largest relative difference, the reductions that were seen and expected, and how many ranks were
refused because their seed is another.
"""

from __future__ import annotations

import json
import random
import sys
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from elastipod.batches.batch_plan import plan_batch
from elastipod.data import ElasticBatches
from elastipod.errors import DataError
from elastipod.gradients import accumulate

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard  # type: ignore[attr-defined]

SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)  # newer, older torch
REDUCE_SCATTER = getattr(dist, SCATTER)


def main() -> None:
    cases, first_seed = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    refused = torch.tensor(is_refused(dist.get_rank()), dtype=torch.int64)
    dist.all_reduce(refused)
    worst, seen, expected = 0.0, 0, 0
    for seed in range(first_seed, first_seed + cases):
        for parallel in ("ddp", "fsdp2", "hsdp"):
            difference, reductions, wanted = compare(seed, parallel)
            worst, seen, expected = max(worst, difference), seen + reductions, expected + wanted
    if dist.get_rank() == 0:
        found = {
            "cases": 3 * cases,
            "worst": worst,
            "reductions": seen,
            "expected": expected,
            "refused": refused.item(),
        }
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def is_refused(seed: int) -> bool:
    """Tell whether this rank may not train with its own seed because others came first with theirs."""
    try:
        ElasticBatches(100, 10, seed=seed).iterate(dist.get_rank(), dist.get_world_size())
    except DataError as error:
        return "make the same plan on every rank" in str(error)
    return False


def compare(seed: int, parallel: str) -> tuple[float, int, int]:
    """Train nothing, only compare: every batch of one epoch of a random plan. Gives the difference, and reductions seen and due."""
    chance = random.Random(seed)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    global_batch = chance.randint(world_size, 24)
    samples = global_batch + chance.randint(0, global_batch)
    sizes: tuple[int, ...] = ()
    if chance.random() < 0.5:
        cuts = sorted(chance.randint(0, global_batch) for _ in range(world_size - 1))
        sizes = tuple(end - first for first, end in zip([0, *cuts], [*cuts, global_batch], strict=True))
    size = plan_batch(global_batch, world_size, max_micro_batch=chance.randint(1, 6)).micro_batch
    widths = [5, *(chance.randint(1, 9) for _ in range(chance.randint(0, 3))), 3]
    torch.manual_seed(seed)
    whole, spread = tower(widths), tower(widths)
    spread.load_state_dict(whole.state_dict())
    inputs, targets = torch.randn(samples, 5, dtype=torch.float64), torch.randint(0, 3, (samples,))
    model, counted = distribute(spread, parallel)
    plan = ElasticBatches(samples, global_batch, seed=seed)
    worst = 0.0
    for batch in plan.iterate(rank, world_size, local_sizes=sizes):
        everything = list(plan.batch(batch.step, 0, 1).indices)
        whole.zero_grad()
        nn.functional.cross_entropy(whole(inputs[everything]), targets[everything]).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
        for part in accumulate(model, batch, size):
            chosen = list(part.indices)
            (nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen]) * part.weight).backward()  # type: ignore[no-untyped-call]
        for mine, wanted in zip(spread.parameters(), whole.parameters(), strict=True):
            gradient: Any = mine.grad
            full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            assert wanted.grad is not None
            scale = max(wanted.grad.abs().max().item(), 1e-3)
            worst = max(worst, (full - wanted.grad).abs().max().item() / scale)
    buckets = 1 if parallel == "ddp" else len(widths) - 1  # FSDP2 reduces layer by layer
    return worst, counted[0], plan.total_steps * buckets


def tower(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size, following in pairwise(widths):
        layers += [nn.Linear(size, following).double(), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def distribute(model: nn.Sequential, parallel: str) -> tuple[nn.Module, list[int]]:
    """Spread a model and count its reductions: buckets of DDP, reduce-scatters of FSDP2."""
    counted = [0]
    if parallel != "ddp":
        shape = (dist.get_world_size(),) if parallel == "fsdp2" else (2, dist.get_world_size() // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

        def scatter(*arguments: Any, **named: Any) -> Any:
            counted[0] += 1
            return REDUCE_SCATTER(*arguments, **named)

        setattr(dist, SCATTER, scatter)
        return model, counted
    spread = DistributedDataParallel(model)

    def reduce(state, bucket):  # type: ignore[no-untyped-def]  # without annotations: DDP compares them with types, and here they are texts
        counted[0] += bucket.is_last()
        handle = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        assert handle is not None
        return handle.get_future().then(lambda done: done.value()[0])

    spread.register_comm_hook(None, reduce)
    return spread, counted


if __name__ == "__main__":
    main()
