"""What the notary sees of a model that `fully_shard` has divided, here over one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.free_ports import free_port
from tests.unit.in_memory.forked_ranks import run_ranks, world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from elastipod.checkpoint.rng import seed_new_rank
from elastipod.data import ElasticBatches
from elastipod.gradients import gradient_sync
from elastipod.in_memory.notary import SAMPLES_PER_TENSOR, Notary, Trained
from elastipod.in_memory.sharded_gradients import reduced_in, watch_whole_parameters
from elastipod.torch_compat import drop_sharding_caches

PLAN = ElasticBatches(40, 8, seed=1)


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
    drop_sharding_caches()


def build(mesh: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def problems(
    model: nn.Module,
    *,
    between: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> list[str]:
    """Let a rank train step 3 with two passes, of which the last one reduces. between, after: happen after each of them."""
    seed_new_rank(3, 0)
    notary = Notary(model, model, seed=3)
    for is_last, then in ((False, between), (True, after)):
        with gradient_sync(model, is_last):
            model(torch.randn(4, 2)).square().sum().backward()
        then()
    notary.close()
    return notary.problems(PLAN.batch(3, 0, 1), PLAN, 3, Trained(2))


def lose_passes(model: nn.Module) -> None:
    """Lose what FSDP2 has not reduced yet."""
    for group in model[0]._get_fsdp_state()._fsdp_param_groups:  # type: ignore[index]
        for each in group.fsdp_params:
            each.unsharded_param.grad = None


def test_a_right_step_has_no_problem_also_when_gradients_are_clipped_after_it(mesh: Any) -> None:
    model = build(mesh)
    assert problems(model, after=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3)) == []


def test_gradients_that_were_not_reduced_as_they_should_be_are_named(mesh: Any) -> None:
    model = build(mesh)
    assert problems(model, between=lambda: lose_passes(model)) == [
        "the reduced gradient of model.0.weight is not the mean over all ranks' samples on rank 0"
    ]


def test_gradients_that_autograd_gives_a_script_are_no_pass(mesh: Any) -> None:
    model: Any = build(mesh)
    for loses in (False, True):
        model.zero_grad()
        notary = Notary(model, model, seed=3)
        for is_last in (False, True):
            with gradient_sync(model, is_last):
                loss = model(torch.randn(4, 2)).square().sum()
                torch.autograd.grad(loss, model[1].weight, retain_graph=True)
                loss.backward()
            if loses and not is_last:
                lose_passes(model)
        notary.close()
        assert bool(notary._wrong_gradient()) == loses


def test_parameters_are_seen_whole_with_the_names_of_the_whole_model_until_that_ends(mesh: Any) -> None:
    model = build(mesh)
    seen: list[tuple[str, tuple[int, ...]]] = []

    def watch(name: str, parameter: nn.Parameter) -> list[Any]:
        shape = tuple(parameter.shape)
        return [parameter.register_hook(lambda _: seen.append((name, shape)))]  # type: ignore[no-untyped-call]

    end = watch_whole_parameters(model, watch)
    model(torch.ones(4, 2)).sum().backward()
    assert sorted(seen) == [("0.bias", (3,)), ("0.weight", (3, 2)), ("1.bias", (1,)), ("1.weight", (1, 3))]
    end()
    model(torch.ones(4, 2)).sum().backward()
    assert len(seen) == 4


def test_a_gradient_that_one_rank_has_not_seen_is_compared_on_none() -> None:
    """The rest is compared: here rank 0 has all of the last layer's reduced gradient."""
    port = free_port()

    def body(rank: int) -> list[str]:
        with world(rank, 2, port):
            mesh = init_device_mesh("cpu", (2,))
            found = []
            for mistake in (None, "1.weight", "0.weight"):
                model = build(mesh)
                notary = Notary(model, model, seed=3)
                right = notary._note_held
                if rank == 1:  # it sees nothing of the first layer
                    notary._note_held = lambda at, _: None if at < 2 else right(at, _)  # type: ignore[method-assign]  # noqa: B023
                model(torch.randn(4, 2)).square().sum().backward()
                if mistake is not None:
                    at = [each.name for each in notary._sampled].index(mistake)
                    assert notary._reduced is not None
                    notary._reduced[at * SAMPLES_PER_TENSOR :][:SAMPLES_PER_TENSOR] += 1.0
                notary.close()
                found.append(notary._wrong_gradient())
            return found

    wrong = "the reduced gradient of model.1.weight is not the mean over all ranks' samples"
    assert run_ranks(2, body) == [["", wrong, ""], [""] * 3]


class Block(nn.Module):
    """Is compiled as a whole, with the modules in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(inputs).relu())
        return found


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of the compiler's own making
@pytest.mark.parametrize("in_place", [False, True])
def test_blocks_that_were_compiled_are_seen_whether_or_not_they_have_run_before(in_place: bool) -> None:
    """The compiler is not to see the hooks: code that it made before would not run them, and it refuses them in `fullgraph`."""
    port = free_port()

    def body(rank: int) -> list[Any]:
        with world(rank, 1, port):
            mesh = init_device_mesh("cpu", (1,))
            graphs: list[Any] = []

            def count(graph: Any, inputs: Any) -> Any:
                graphs.append(graph)
                return graph.forward

            found: list[Any] = []
            for is_survivor in (False, True):
                torch.compiler.reset()
                torch.manual_seed(0)
                model: Any = nn.Sequential(*(Block() for _ in range(10)))
                for at, block in enumerate(model):
                    if in_place:
                        block.compile(backend=count, fullgraph=True)
                    else:
                        model[at] = torch.compile(block, backend=count, fullgraph=True)
                    fully_shard(model[at], mesh=mesh)
                fully_shard(model, mesh=mesh)
                if is_survivor:
                    model(torch.ones(2, 4)).sum().backward()
                    model.zero_grad()
                graphs.clear()
                notary = Notary(model, model, seed=3)
                model(torch.ones(2, 4)).sum().backward()
                notary.close()
                found.append([notary._wrong_gradient(), len(notary._unseen), len(graphs) < 4])
            return [*found, len(graphs)]

    assert run_ranks(1, body) == [[["", 0, True], ["", 0, True], 0]]


# -- types that gradients are reduced in, and gradients that a script drops ----------------------------------------


def layers(mesh: Any, policy: MixedPrecisionPolicy) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


LOW, FULL, HALF = torch.bfloat16, torch.float32, torch.float16


@pytest.mark.parametrize(
    ("computes_in", "reduces_in"),
    [(None, LOW), (None, HALF), (LOW, None), (LOW, LOW), (LOW, FULL), (None, FULL), (None, None)],
)
@pytest.mark.parametrize("reduced", [1, 16])
def test_gradients_may_be_reduced_in_another_type(
    mesh: Any, computes_in: torch.dtype | None, reduces_in: torch.dtype | None, reduced: int
) -> None:
    """reduced: number of the passes that are reduced, each by itself."""
    model = layers(mesh, MixedPrecisionPolicy(param_dtype=computes_in, reduce_dtype=reduces_in))
    for loses in (False, True):
        for seed in range(4):
            model.zero_grad()
            notary = Notary(model, model, seed=seed)
            torch.manual_seed(seed)
            for number in range(16):
                with gradient_sync(model, number >= 16 - reduced):
                    (model(torch.randn(4, 8)) * torch.randn(4, 8)).sum().backward()
                if loses and number == 14:
                    lose(model)
            notary.close()
            assert bool(notary._wrong_gradient()) == loses


def lose(model: nn.Module) -> None:
    """Take away a part of all passes so far, wherever FSDP2 keeps them."""
    for layer in model.children():
        sharded: Any = layer
        for group in sharded._get_fsdp_state()._fsdp_param_groups:
            for each in group.fsdp_params:
                for parameter in (each.unsharded_param, each.sharded_param):
                    if parameter.grad is not None:
                        parameter.grad.mul_(0.5)


def test_what_a_policy_reduces_in_is_that_of_the_innermost_module(mesh: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    assert reduced_in(model) == {}
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=LOW))
    assert reduced_in(model) == {"0.weight": None, "0.bias": None, "1.weight": LOW, "1.bias": LOW}


@pytest.mark.parametrize(("passes", "loses"), [(1, False), (3, False), (3, True)])
def test_a_step_that_drops_the_gradients_of_a_first_backward_pass_is_right(mesh: Any, passes: int, loses: bool) -> None:
    model = build(mesh)
    notary = Notary(model, model, seed=3)
    for phase in range(2):
        model.zero_grad()
        for number in range(passes):
            with gradient_sync(model, number == passes - 1):
                model(torch.randn(4, 2)).square().sum().backward()
            if loses and (phase, number) == (1, 0):
                lose_passes(model)
    notary.close()
    assert bool(notary._wrong_gradient()) == loses
