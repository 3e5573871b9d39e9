"""Two models, two optimizers and two schedules in worlds of other sizes and kinds; run by test_checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.e2e.rank_worlds import run_world
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from elastipod.checkpoint import CheckpointManager
from elastipod.torch_compat import DTensor

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard  # type: ignore[attr-defined]

MATRIX_OPTIMIZER = getattr(torch.optim, "Muon", torch.optim.SGD)  # Muon exists from torch 2.9 on


class Pair:
    """A model with an average of its weights, of which one optimizer trains the matrices and another one the rest."""

    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        plain = torch.nn.Sequential(
            torch.nn.Linear(6, 10),
            torch.nn.Tanh(),
            torch.nn.Linear(10, 10).requires_grad_(False),
            torch.nn.Linear(10, 3),
        )
        average = AveragedModel(plain)
        self.model: torch.nn.Module = plain
        if kind == "ddp":
            self.model = DistributedDataParallel(plain)
        elif kind == "fsdp":
            for module in (plain, average):
                fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.average = average
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizers = {
            "matrices": MATRIX_OPTIMIZER([each for each in trained if each.ndim == 2], lr=0.02, momentum=0.9),
            "others": torch.optim.AdamW([each for each in trained if each.ndim == 1], lr=0.05),
        }
        self.schedules = {
            name: torch.optim.lr_scheduler.MultiStepLR(each, [2, 5], gamma=0.5)
            for name, each in self.optimizers.items()
        }

    def train(self, first: int, last: int) -> None:
        """Make steps ``first`` to ``last``; every rank has the same samples."""
        for step in range(first, last + 1):
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            self.model.zero_grad()
            self.model(inputs).square().mean().backward()
            for each in (*self.optimizers.values(), *self.schedules.values()):
                each.step()
            weights = getattr(self.model, "module", self.model).parameters()
            with torch.no_grad():
                for mean, weight in zip(self.average.module.parameters(), weights, strict=True):
                    mean.lerp_(weight, 0.5)
            self.average.n_averaged += 1

    def objects(self) -> dict[str, Any]:
        return {
            "model": {"model": self.model, "average": self.average},
            "optimizer": self.optimizers,
            "scheduler": self.schedules,
        }

    def digest(self) -> str:
        """Give a digest of all weights, moments, schedules and rates, the same for the same values however they are sharded."""
        found = hashlib.sha256()
        weights = [("average", each) for each in self.average.parameters()]
        weights += [(name.removeprefix("module."), each) for name, each in sorted(self.model.named_parameters())]
        for name, parameter in weights:
            states = [each.state[parameter] for each in self.optimizers.values() if parameter in each.state]
            tensors = [state[key] for state in states for key in sorted(state)]
            found.update(f"{name} {len(tensors)}".encode())
            for tensor in (parameter, *tensors):
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                found.update(whole.detach().numpy().tobytes())
        rates = [schedule.get_last_lr() for schedule in self.schedules.values()]
        found.update(f"{rates} {int(self.average.n_averaged)}".encode())
        return found.hexdigest()


def members(folder: Path, path: list[list[Any]], in_memory: bool) -> list[Any]:
    """Hand one state on from world to world, [kind, ranks] each; gives, by world and rank, the digests before and after."""

    def body(kind: str, step: int) -> Callable[[int], Any]:
        def on_rank(rank: int) -> list[Any]:
            run = Pair(kind, seed=step and step + rank)
            memory = folder / f"node-{rank % 2}" if in_memory else False
            with CheckpointManager(folder / "checkpoints", memory=memory) as checkpoints:
                resume = checkpoints.load_latest(**run.objects())
                loaded = run.digest() if resume else ""
                run.train(step + 1, step + 2)
                checkpoints.save_async(step + 2, **run.objects(), durable=not in_memory)
                checkpoints.wait()
            return [resume and [resume.step, resume.tier], loaded, run.digest()]

        return on_rank

    return [run_world(size, body(kind, 2 * number)) for number, (kind, size) in enumerate(path)]
