"""The user guide's loops over worlds of ranks, down to an epoch's short last batch; run by test_user_guide_ranks."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.e2e.rank_worlds import run_world, serve
from tests.guide import LOADER, LOOP, PADDED, SUMMED, function_of, stateful_script
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elastipod
from elastipod import CheckpointManager, ElasticBatches

SIZE, GLOBAL_BATCH = 258, 256  # the last batch has two samples


def loop_of(passes: str) -> str:
    """Give the loop over the steps of a plan whose gradients come from a block of the guide."""
    step = "optimizer.zero_grad()\n" + passes + "optimizer.step()\n"
    return "for batch in plan.iterate(rank, world_size):\n" + textwrap.indent(step, "    ")


PADDED_AND_SUMMED = PADDED.replace(
    "size=4", "size=4, tokens=sum(num_tokens(index) for index in batch.indices)"
).replace("losses_of", "summed_losses_of")
LOOPS = {
    "loop": LOOP,
    "loader": LOADER,
    "stateful": stateful_script(),
    "summed": loop_of(SUMMED),
    "padded": loop_of(PADDED),
    "padded and summed": loop_of(PADDED_AND_SUMMED),
}


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that are their indices."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


def num_tokens(index: int) -> int:
    return index % 5 + 1


class Training:
    """What the guide leaves open: a model, its optimizer and loss; records each step's gradient and loss over all ranks."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.plain = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        self.model = DistributedDataParallel(self.plain) if dist.is_initialized() else self.plain
        self.optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.1)
        self.optimizer.register_step_pre_hook(self._record)
        self._loss, self._passes = 0.0, 0  # of the step under way, as they go into the gradient
        self.steps: list[dict[str, Any]] = []

    def loss_of(self, model: nn.Module, data: Any) -> torch.Tensor:
        """Give the mean loss over some samples; what backward() multiplies it by is recorded with it."""
        rows = torch.as_tensor(data, dtype=torch.float64).reshape(-1, 1) / SIZE
        loss: torch.Tensor = (model(rows) - torch.sin(7 * rows)).pow(2).mean()
        return self._heard(loss)

    def summed_loss_of(self, model: nn.Module, indices: Sequence[int]) -> torch.Tensor:
        """Give the loss of the samples' tokens, added up."""
        rows = torch.tensor([index for index in indices for _ in range(num_tokens(index))], dtype=torch.float64)
        rows = rows.reshape(-1, 1) / SIZE
        loss: torch.Tensor = (model(rows) - torch.sin(7 * rows)).pow(2).sum()
        return self._heard(loss)

    def losses_of(self, model: nn.Module, indices: Sequence[int]) -> torch.Tensor:
        """Give the loss of each sample; what goes into the gradient is recorded as their weighted sum."""
        rows = torch.tensor(indices, dtype=torch.float64).reshape(-1, 1) / SIZE
        return self._heard_rows((model(rows) - torch.sin(7 * rows)).pow(2).flatten())

    def summed_losses_of(self, model: nn.Module, indices: Sequence[int]) -> torch.Tensor:
        """Give the loss of each sample's tokens, added up."""
        rows = torch.tensor(indices, dtype=torch.float64).reshape(-1, 1) / SIZE
        counts = torch.tensor([num_tokens(index) for index in indices], dtype=torch.float64)
        return self._heard_rows((model(rows) - torch.sin(7 * rows)).pow(2).flatten() * counts)

    def _heard_rows(self, losses: torch.Tensor) -> torch.Tensor:
        losses.register_hook(  # type: ignore[no-untyped-call]
            lambda weights: self._weigh(float((losses.detach() * weights).sum()), 1.0)
        )
        return losses

    def _heard(self, loss: torch.Tensor) -> torch.Tensor:
        loss.register_hook(lambda weight: self._weigh(loss.item(), weight.item()))  # type: ignore[no-untyped-call]
        return loss

    def _weigh(self, loss: float, weight: float) -> None:
        self._loss += loss * weight / self.world_size
        self._passes += 1

    def _record(self, *_: object) -> None:
        if not self._passes:
            return  # torch makes a step without gradients when it is asked for the state of a new optimizer
        total = torch.tensor(self._loss, dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(total)
        gradient = [
            value for each in self.plain.parameters() if each.grad is not None for value in each.grad.flatten().tolist()
        ]
        self.steps.append({"loss": total.item(), "gradient": gradient})
        self._loss, self._passes = 0.0, 0


def loop_over_a_world(folder: Path, name: str, world_size: int) -> list[list[dict[str, Any]]]:
    """Run a loop of the guide for one epoch; give loss and gradient of every step, by rank."""

    def body(_: int) -> list[dict[str, Any]]:
        elastipod.elastic_event_detected = lambda: False
        training = Training()
        names: dict[str, Any] = {each: getattr(elastipod, each) for each in elastipod.__all__}
        names |= {each: getattr(training, each) for each in ("model", "optimizer", "rank", "world_size", "loss_of")}
        names |= {"torch": torch, "dist": dist, "num_tokens": num_tokens, "summed_loss_of": training.summed_loss_of}
        names |= {"losses_of": training.losses_of, "summed_losses_of": training.summed_losses_of}
        names |= {"dataset": Rows(), "plan": ElasticBatches(SIZE, GLOBAL_BATCH)}
        names |= {"checkpoints": CheckpointManager(folder / "checkpoints", memory=False), "resume": None}
        if name == "stateful":
            from torchdata.stateful_dataloader import StatefulDataLoader

            names["StatefulDataLoader"] = StatefulDataLoader
        exec(function_of(LOOPS[name], folder) + "script()", names)
        return training.steps

    return run_world(world_size, body)


if __name__ == "__main__":
    serve({"loop": loop_over_a_world})
