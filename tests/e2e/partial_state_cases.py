"""Models of which some parts are trained now and then only, over worlds of ranks; run by test_checkpoints."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.e2e.rank_worlds import run_world
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from elastipod.checkpoint import CheckpointManager
from elastipod.errors import CheckpointError
from elastipod.torch_compat import DTensor

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard  # type: ignore[attr-defined]


class Experts(torch.nn.Module):
    """A body, experts of which each step takes one, and a head that nobody uses. The second expert is taken from step 3 on."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(6, 10)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(10, 10) for _ in range(2))
        self.unused = torch.nn.Linear(10, 3)

    def forward(self, inputs: torch.Tensor, step: int) -> torch.Tensor:
        expert: torch.nn.Module = self.experts[1 if step >= 3 and step % 2 else 0]
        found: torch.Tensor = expert(torch.tanh(self.body(inputs)))
        return found


class Run:
    """Training of such a model, on one process or over the world, with two parameter groups; every rank has the same samples."""

    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        model = Experts()
        self.model: torch.nn.Module = model
        size = dist.get_world_size() if dist.is_initialized() else 1
        if kind == "ddp":
            self.model = DistributedDataParallel(model, find_unused_parameters=True)
        elif kind != "plain":
            mesh = (
                init_device_mesh("cpu", (size,))
                if kind == "fsdp"
                else init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("a", "b"))
            )
            for part in (model.body, *model.experts, model.unused):
                fully_shard(part, mesh=mesh)
            fully_shard(model, mesh=mesh)
        experts = list(model.experts.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [*model.body.parameters(), *model.unused.parameters()], "lr": 0.05},
                {"params": experts, "lr": 0.02, "weight_decay": 0.1},
            ]
        )

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            self.model(inputs, step).square().mean().backward()
            self.optimizer.step()

    def digest(self) -> list[str]:
        """Give a digest of weights and optimizer state, and the names of the parameters that have none yet."""
        found = hashlib.sha256()
        without: list[str] = []
        for name, parameter in sorted(self.model.named_parameters()):
            state = self.optimizer.state.get(parameter, {})
            found.update(f"{name.removeprefix('module.')} {sorted(state)}".encode())
            if not state:
                without.append(name.removeprefix("module."))
            for tensor in (parameter, *(state[key] for key in sorted(state))):
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                found.update(whole.detach().numpy().tobytes())
        return [found.hexdigest(), *without]


def partial(folder: Path, path: list[list[Any]], in_memory: bool) -> list[Any]:
    """Hand such a state on from world to world, [kind, ranks] each, two steps in each.

    Gives, by world and rank, digests: of what was loaded, after two steps, and after two more that no other world sees.
    The memory of node 1 is lost after each world.
    """

    def body(kind: str, step: int) -> Any:
        def on_rank(rank: int) -> list[Any]:
            run = Run(kind, seed=step + rank)
            memory = folder / f"node-{rank}" if in_memory else False
            with CheckpointManager(folder / "checkpoints", memory=memory) as checkpoints:
                resume = checkpoints.load_latest(model=run.model, optimizer=run.optimizer)
                loaded = [resume.step, resume.tier, run.digest()] if resume else None
                run.train(step + 1, step + 2)
                checkpoints.save_async(step + 2, model=run.model, optimizer=run.optimizer, durable=not in_memory)
                checkpoints.wait()
                saved = run.digest()
            run.train(step + 3, step + 4)
            return [loaded, saved, run.digest()]

        return on_rank

    told = []
    for number, (kind, size) in enumerate(path):
        told.append(run_world(size, body(kind, 2 * number)))
        shutil.rmtree(folder / "node-1", ignore_errors=True)
    return told


def stages(folder: Path) -> list[Any]:
    """Save a model of which each of two ranks has a stage of its own, and then one of which only one rank has moments."""

    def body(rank: int) -> list[str]:
        said: list[str] = []

        def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
            with CheckpointManager(folder / "checkpoints", memory=folder / "memory") as checkpoints:
                try:
                    checkpoints.save(1, model=model, optimizer=optimizer)
                    said.append("saved")
                except CheckpointError as error:
                    said.append(str(error))

        stage = torch.nn.ModuleDict({f"stage{rank}": torch.nn.Linear(2, 2)})
        save(stage, torch.optim.SGD(stage.parameters(), lr=0.1))
        model = torch.nn.Linear(2, 2, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if rank == 1:
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        save(model, optimizer)
        if rank == 0:
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        save(model, optimizer)
        return said

    return run_world(2, body)
