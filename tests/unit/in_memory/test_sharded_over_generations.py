"""A sharded `State` in ranks of their own processes, over generations: what leaves, what comes, and what a copy brings back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.patience import PATIENCE_S
from tests.unit.in_memory.forked_ranks import run_ranks
from tests.unit.in_memory.test_state_over_generations import DATA, Agents, Job, patient  # noqa: F401 a fixture
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from elastipod import Copies, ElasticBatches, State
from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import audit
from elastipod.checkpoint.collective_planning import DOMAIN_ENV
from elastipod.local_worker import local_worker
from elastipod.worker_file import EventLevel

PLAN = ElasticBatches(dataset_size=48, global_batch=12, seed=1, epochs=5)
LEAVES_AT = 4
InStep = Callable[[State, int], None]


class Net(nn.Module):
    """A model of which no tensor can be divided evenly by the worlds of these tests, with a frozen layer, an unused one and a buffer."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.frozen = nn.Linear(5, 5, bias=False).requires_grad_(False)
        self.last = nn.Linear(5, 1)
        self.unused = nn.Linear(2, 3)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        found: torch.Tensor = self.last(torch.tanh(self.frozen(self.first(inputs))))
        return found


class Counting(torch.optim.SGD):
    """Keeps, for each parameter, how often it ran: as a tensor that is whole on every rank of the mesh."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for each in group["params"]:
                kept = self.state[each]
                if "runs" not in kept:
                    kept["runs"] = DTensor.from_local(torch.zeros(2), each.device_mesh, [Replicate()])
                kept["runs"].add_(1)


def build(mesh: Any) -> dict[str, object]:
    """Make a training with two optimizers, one of which has two groups.

    After the first generation all weights and options are other ones: the right ones come from the state in memory alone.
    """
    generation = int(os.environ.get("ELASTIPOD_GENERATION", "1"))
    torch.manual_seed(generation)
    model = Net()
    for module in (model.first, model.frozen, model.last, model.unused, model):
        fully_shard(module, mesh=mesh)
    biases = [model.first.bias, model.last.bias]
    groups: list[dict[str, Any]] = [
        {"params": [model.first.weight, *model.unused.parameters()], "weight_decay": 0.1 * generation},
        {"params": biases, "weight_decay": 0.0, "lr": 0.05 * generation},
    ]
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(groups, lr=0.1),
        "other": Counting([model.last.weight], lr=0.01 * generation, momentum=0.9),
    }


def train(folder: Path, in_step: InStep, reduced: InStep, **options: Any) -> list[Any]:
    """Train the plan; give each generation with its size and first step, and the whole weights before the last step."""
    state = State(build, mesh={"shard": -1}, sample_log=folder / "samples", **options)
    worlds: list[list[int]] = []
    weights: list[float] = []
    for step in state.steps(PLAN):
        with step as batch:
            if not worlds or worlds[-1][0] != state.generation:
                worlds.append([state.generation, state.world_size, batch.step])
            in_step(state, batch.step)
            assert [each.tolist() for each in state.model.buffers()] == [[batch.step - 1] * 2], (
                "a newcomer has the buffers too"
            )
            runs = [each["runs"].to_local().tolist() for each in state.other.state.values()]
            assert runs == [[batch.step - 1] * 2] * (batch.step > 1)
            if batch.step == PLAN.total_steps:
                whole = [parameter.full_tensor() for parameter in state.model.parameters()]  # type: ignore[attr-defined]
                weights = torch.cat([each.detach().flatten() for each in whole]).tolist()
            (state.model(DATA[list(batch.indices)]).square().mean() * batch.weight).backward()
            reduced(state, batch.step)
    return [worlds, weights]


def nothing(state: State, step: int) -> None:
    """Let the step be."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The weights of a single process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ((_, weights),) = run_ranks(1, lambda _: train(folder, nothing, nothing))
    torch.manual_seed(1)
    built = Net()
    assert len(weights) == sum(each.numel() for each in built.parameters())
    assert weights[-9:] == torch.cat([each.detach().flatten() for each in built.unused.parameters()]).tolist()
    assert weights[20:45] == built.frozen.weight.flatten().tolist()
    found: list[float] = weights
    return found


@pytest.mark.slow
def test_a_rank_that_leaves_hands_its_shards_over_and_comes_back_with_none_that_count(
    tmp_path: Path, undisturbed: list[float]
) -> None:
    """Three ranks, two, and three again, of which the two that stayed know the newest step."""
    job = Job(tmp_path, Agents([[0, 1, 2], [0, 1], [1, 0, 2]]), has_own_pods=True)

    def drain(state: State, step: int) -> None:
        worker = local_worker()
        assert worker is not None
        if state.generation == 1 and step == LEAVES_AT:
            worker.file.set_event(EventLevel.DRAIN, time.time() + PATIENCE_S, leaves=state.rank == 2, kept=True)
        elif state.generation > 1:
            worker.file.set_event(EventLevel.NONE)

    def call_back(state: State, step: int) -> None:
        """Have the agents call both ranks back once both have the gradients of a step: it is complete all the same."""
        link = state._world.link
        if link is not None and state.generation == 2 and step == 2 * LEAVES_AT:
            (tmp_path / f"reduced-{state.rank}").touch()
            until = time.monotonic() + PATIENCE_S
            while len(list(tmp_path.glob("reduced-*"))) < 2:
                assert time.monotonic() < until, "the other rank has no gradients"
                time.sleep(0.01)
            link.report_fault(state.rank, "asked to by the test")
            assert link.wait_until_over(PATIENCE_S)

    found = job.run(lambda _: train(tmp_path, drain, call_back), 3)
    worlds = [each[0] for each in found]
    first_of_two = worlds[0][1][2]
    assert LEAVES_AT < first_of_two <= 2 * LEAVES_AT
    (first_of_three,) = {world[-1][2] for world in worlds}
    assert worlds[0] == worlds[1] == [[1, 3, 1], [2, 2, first_of_two], [3, 3, first_of_three]]
    assert worlds[2] == [[1, 3, 1], [3, 3, first_of_three]]
    assert first_of_three in (2 * LEAVES_AT, 2 * LEAVES_AT + 1), "the step in work is repeated, no other"
    assert not list(tmp_path.glob("checkpoints")), "all went from memory to memory"
    assert audit(read_logs(tmp_path / "samples")).exact
    for _, weights in found:
        assert weights == pytest.approx(undisturbed, rel=1e-3, abs=1e-5)


def test_copies_in_another_failure_domain_bring_back_the_newest_copied_step(
    tmp_path: Path, undisturbed: list[float]
) -> None:
    job = Job(tmp_path, Agents([[0, 1], [0, 2]]), has_own_pods=True)

    def break_at(state: State, step: int) -> None:
        if state.generation == 1 and state.rank == 1 and step == 8:
            link = state._world.link
            assert link is not None
            link.report_fault(1, "broke")
            raise ZeroDivisionError

    def body(process: int) -> Any:
        os.environ[DOMAIN_ENV] = f"rack-{process}"
        copies = Copies(1 << 20, every=3)
        if process == 1:
            with pytest.raises(ZeroDivisionError):
                train(tmp_path, break_at, nothing, copies=copies)
            return None
        return train(tmp_path, break_at, nothing, copies=copies)

    survivor, _, newcomer = job.run(body, 3)
    assert survivor[0] == [[1, 2, 1], [2, 2, 7]], "it goes on after step 6"
    assert newcomer[0] == [[2, 2, 7]]
    assert audit(read_logs(tmp_path / "samples")).exact
    for _, weights in (survivor, newcomer):
        assert weights == pytest.approx(undisturbed, rel=1e-3, abs=1e-5)
