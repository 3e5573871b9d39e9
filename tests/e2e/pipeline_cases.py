"""Pipelines whose stages have different parameters, optimizer groups and schedules, over worlds of ranks; run by test_checkpoints."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from tests.e2e.rank_worlds import run_world
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module

from elastipod import CheckpointManager, build_mesh
from elastipod.errors import CheckpointError

LAYERS = {0: (0,), 1: (1, 2)}  # of the model, by stage


class Layers(torch.nn.Module):
    """Some layers of the model, under their names in the whole, and a buffer that differs between replicas."""

    def __init__(self, numbers: tuple[int, ...], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleDict({str(number): torch.nn.Linear(3 + number, 4) for number in numbers})
        for number in numbers:
            self.layers[str(number)].register_buffer("seen", torch.tensor([float(seed)]))


class Stage:
    """Training of one stage, the same on each of its replicas. Each layer has a group of its own, so stages differ in groups too."""

    def __init__(self, number: int, seed: int, tensor_parallel: DeviceMesh | None = None) -> None:
        self.model = Layers(LAYERS[number], seed)
        if tensor_parallel is not None:
            columns: dict[str, ParallelStyle] = {f"layers.{layer}": ColwiseParallel() for layer in LAYERS[number]}
            parallelize_module(self.model, tensor_parallel, columns)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [*self.model.layers[str(layer)].parameters()], "lr": 0.1 * (layer + 1)}
                for layer in LAYERS[number]
            ]
        )
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5], gamma=0.5)
        self.members: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }

    def train(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for parameter in self.model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.grad = gradient
        self.optimizer.step()
        self.scheduler.step()

    def digest(self) -> str:
        found = hashlib.sha256()
        for name, parameter in sorted(self.model.named_parameters()):
            state = self.optimizer.state[parameter]
            for tensor in (parameter, *(state[key] for key in sorted(state))):
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                found.update(name.encode() + whole.detach().numpy().tobytes())
        return found.hexdigest() + repr(self.scheduler.get_last_lr())


def worlds(folder: Path, path: list[list[int]], in_memory: bool, tp: int = 1) -> list[Any]:
    """Hand a pipeline of two stages on from world to world; gives by world and rank [tier, step, digests before and after].

    path: by world, the node of each rank. tp: ranks among which each stage cuts its layers.
    """

    def on_rank(rank: int, step: int) -> list[Any]:
        mesh = build_mesh(pp=2, tp=tp, device_type="cpu")
        stage = Stage(mesh.get_local_rank("pp"), 10 * step, mesh["tp"] if tp > 1 else None)
        with CheckpointManager(
            folder / "checkpoints", mesh=mesh, memory=None if in_memory else False, keep=1
        ) as checkpoints:
            resume = checkpoints.load_latest(**stage.members)
            loaded = stage.digest() if resume else ""
            with torch.no_grad():
                for buffer in stage.model.buffers():
                    buffer.fill_(rank)
            for number in (step + 1, step + 2):
                stage.train(number)
            checkpoints.save(step + 2, **stage.members)
        return [resume and [resume.tier, resume.step], loaded, stage.digest()]

    return [
        run_world(
            len(nodes),
            lambda rank, step=2 * number: on_rank(rank, step),  # type: ignore[misc]
            environ=[{"ELASTIPOD_MEMORY_DIR": str(folder / f"node-{node}")} for node in nodes],
        )
        for number, nodes in enumerate(path)
    ]


def whole(folder: Path) -> list[Any]:
    """Load what the stages saved into the whole model, in one process; also into one with a layer too few."""
    said: list[Any] = []
    for layers in ((0, 1, 2), (0, 2)):
        model = Layers(layers, seed=99)
        with CheckpointManager(folder / "checkpoints", memory=False) as checkpoints:
            try:
                resume = checkpoints.load_weights(model=model)
                assert resume is not None
                said.append([resume.step, sum(parameter.abs().sum().item() for parameter in model.parameters())])
            except CheckpointError as error:
                said.append(str(error))
    return said


def refusals(folder: Path) -> list[Any]:
    """Save stages that have the same names, then load a pipeline that lacks a layer, and one whose stages moved."""

    def body(rank: int) -> list[str]:
        mesh, said = build_mesh(pp=2, device_type="cpu"), []
        with CheckpointManager(folder / "checkpoints", mesh=mesh, memory=False) as checkpoints:
            for first in (Stage(0, seed=rank), Stage(rank, seed=rank)):
                first.train(1)
                try:
                    checkpoints.save(1, **first.members)
                    said.append("saved")
                except CheckpointError as error:
                    said.append(str(error))
        for layers in ({0: (0,), 1: (1,)}, {0: (1, 2), 1: (0,)}):
            model = Layers(layers[rank], seed=7)
            optimizer = torch.optim.AdamW(model.parameters())
            with CheckpointManager(folder / "checkpoints", mesh=mesh, memory=False) as checkpoints:
                try:
                    resume = checkpoints.load_latest(model=model, optimizer=optimizer)
                    said.append(f"loaded {resume and resume.step}")
                except CheckpointError as error:
                    said.append(str(error))
        return said

    return run_world(2, body)
