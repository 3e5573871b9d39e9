"""A model that trains over worlds of ranks and saves checkpoints."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from elastipod.checkpoint import CheckpointManager, Resume
from elastipod.torch_compat import DTensor

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard  # type: ignore[attr-defined]


class Run:
    """A model that trains: on one process, or over the world as DDP, FSDP2 or HSDP (two replicas).

    As most trainers have it, biases do not decay, which is a parameter group of their own, and one layer is frozen.
    """

    def __init__(self, kind: str, *, seed: int = 0, width: int = 10) -> None:
        torch.manual_seed(seed)
        self.model: torch.nn.Module = torch.nn.Sequential(
            torch.nn.Linear(6, width),
            torch.nn.Tanh(),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(width, width, bias=False).requires_grad_(False),
            torch.nn.Linear(width, 3),
        )
        if kind == "ddp":
            self.model = DistributedDataParallel(self.model)
        elif kind == "fsdp":
            fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        elif kind == "hsdp":
            fully_shard(
                self.model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
            )
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": 0.1},
                {
                    "params": [parameter for parameter in trained if parameter.ndim == 1],
                    "weight_decay": 0.0,
                    "lr": 0.02,
                },
            ],
            lr=0.05,
        )
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5], gamma=0.5)

    def train(self, first: int, last: int) -> None:
        """Make steps ``first`` to ``last``; every rank has the same samples."""
        for step in range(first, last + 1):
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            self.model(inputs).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()

    def save(self, checkpoints: CheckpointManager, step: int) -> Path | str:
        return checkpoints.save(
            step, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, extra={"s": step}
        )

    def save_async(self, checkpoints: CheckpointManager, step: int, *, durable: bool = True) -> None:
        checkpoints.save_async(
            step,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            extra={"s": step},
            durable=durable,
        )

    def load(self, checkpoints: CheckpointManager) -> Resume | None:
        return checkpoints.load_latest(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)

    def digest(self) -> str:
        """Give a digest of all weights, moments and the schedule, the same for the same values however they are sharded."""
        found = hashlib.sha256()
        for name, parameter in sorted(self.model.named_parameters()):
            found.update(name.removeprefix("module.").encode())
            state = self.optimizer.state[parameter] if parameter.requires_grad else {}
            assert len(state) == 3 * parameter.requires_grad
            for tensor in (parameter, *(state[key] for key in sorted(state))):
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                found.update(whole.detach().numpy().tobytes())
        found.update(repr(self.scheduler.get_last_lr()).encode())
        return found.hexdigest()


def nodes(folder: Path, count: int) -> list[dict[str, str]]:
    """Give each rank a node of its own, with its own memory."""
    return [{"ELASTIPOD_MEMORY_DIR": str(folder / f"node-{number}")} for number in range(count)]
