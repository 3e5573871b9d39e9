"""What the notary takes for rounding, and which mistakes it still finds beside it: passes that cancel, lower precisions, dropped ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.free_ports import free_port
from tests.unit.in_memory.forked_ranks import run_ranks, world
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from elastipod import fixed_order_passes
from elastipod.data import ElasticBatches
from elastipod.gradients import announce_reduced_gradients, gradient_sync
from elastipod.in_memory.notary import Notary

SAID = "the reduced gradient of model.{} is not the mean over all ranks' samples"
WORLD = 2
PASSES = 16
Mistake = Callable[[int, int], float]  # gives what a rank's gradients are multiplied with in a pass


@pytest.fixture
def only_rank() -> Iterator[None]:
    """Be the only rank of a world."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def layers(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(20))).to(dtype)


def no_mistake(rank: int, number: int) -> float:
    return 1.0


@contextmanager
def unseen_factor(model: nn.Module, factor: float) -> Iterator[None]:
    """Multiply the gradients of the backward passes inside, after the notary has seen them."""
    handles = [each.register_hook(lambda gradient: gradient * factor) for each in model.parameters()]  # type: ignore[no-untyped-call]
    yield
    for handle in handles:
        handle.remove()


def found_in_noise(
    rank: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    mistake: Mistake = no_mistake,
    *,
    taken_back: float | None = None,
) -> str:
    """Train a step of 16 passes with gradients that are noise, as those of few samples are, and give what the notary says.

    taken_back: the part of the first half of the passes that the second half takes back.
    """
    torch.manual_seed(seed)
    model = layers(dtype)
    wrapped = DistributedDataParallel(model)
    notary = Notary(model, wrapped, seed=seed)
    for number in range(PASSES):
        half, place = divmod(number, PASSES // 2)
        torch.manual_seed(1000 * seed + 100 * rank + (number if taken_back is None else place))
        factor = 1.0 if taken_back is None or not half else -taken_back
        with gradient_sync(wrapped, number == PASSES - 1):
            loss = (wrapped(torch.randn(4, 8).to(dtype)) * torch.randn(4, 8).to(dtype)).sum() * factor
            with unseen_factor(model, mistake(rank, number)):
                loss.backward()
    notary.close()
    return notary._wrong_gradient()


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_passes_that_cancel_are_no_mistake(dtype: torch.dtype) -> None:
    assert {found_in_noise(0, seed, dtype) for seed in range(12)} == {""}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_passes_that_cancel_on_several_ranks_are_no_mistake(dtype: torch.dtype) -> None:
    port = free_port()

    def body(rank: int) -> list[str]:
        with world(rank, WORLD, port):
            return [
                found_in_noise(rank, seed, dtype, taken_back=part) for part in (None, 0.999, 1.0) for seed in range(6)
            ]

    assert run_ranks(WORLD, body) == [[""] * 18] * WORLD


def test_passes_of_which_a_small_rest_remains_are_no_mistake() -> None:
    model = nn.Linear(1, 1, bias=False)
    notary = Notary(model, model, seed=3)
    for size in (1.0, 1e-3, -1.0009999):
        (size * model(torch.ones(1, 1))).sum().backward()
    announce_reduced_gradients(1.0)
    notary.close()
    assert notary._wrong_gradient() == ""


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize(("mistake", "name"), [(None, ""), (0, "0.weight"), (1, "1.weight"), (2, "2.weight")])
def test_parameters_of_different_types_are_compared_together(mistake: int | None, name: str) -> None:
    """Layers that were frozen when the first pass ran have fewer passes than the others."""
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    model = nn.ModuleList(nn.Linear(4, 4, bias=False, dtype=each) for each in dtypes)
    notary = Notary(model, model, seed=3)
    for wanted in ((0, 2), (0, 1, 2), (1,), (0, 1, 2)):
        torch.stack([model[at](torch.randn(3, 4, dtype=dtypes[at])).sum().double() for at in wanted]).sum().backward()  # type: ignore[no-untyped-call]
    if mistake is not None:
        model[mistake].weight.grad.mul_(1.5)  # type: ignore[union-attr, operator]
    announce_reduced_gradients(1.0)
    notary.close()
    said = f"the reduced gradient of model.{name} is not the mean over all ranks' samples"
    assert notary._wrong_gradient() == (said if name else "")


# -- mistakes that are no rounding ---------------------------------------------------------------------------------


def a_lost_pass(rank: int, number: int) -> float:
    return 0.0 if number == 7 else 1.0


def a_lost_pass_of_one_rank(rank: int, number: int) -> float:
    return 0.0 if (rank, number) == (1, 7) else 1.0


def a_wrong_divisor(rank: int, number: int) -> float:
    return WORLD / (WORLD + 1)


def a_rank_left_out(rank: int, number: int) -> float:
    return 0.0 if rank == 1 else 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mistake", [a_lost_pass, a_lost_pass_of_one_rank, a_wrong_divisor, a_rank_left_out])
def test_a_mistake_is_found_beside_the_rounding_of_many_passes(mistake: Mistake, dtype: torch.dtype) -> None:
    port = free_port()

    def body(rank: int) -> list[bool]:
        with world(rank, WORLD, port):
            return [bool(found_in_noise(rank, seed, dtype, mistake)) for seed in range(3)]

    assert run_ranks(WORLD, body) == [[True] * 3] * WORLD


# -- gradients that a script asks autograd for -----------------------------------------------------------------------


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize("as_ddp", [False, True])
def test_gradients_that_autograd_gives_a_script_are_no_pass(as_ddp: bool) -> None:
    """As for a weight of a loss that adapts to them: nothing is accumulated, though the weight's hooks are called."""
    torch.manual_seed(0)
    model = layers()
    wrapped = DistributedDataParallel(model) if as_ddp else model
    weight = next(reversed([*model.parameters()]))
    for mistake in (1.0, 0.5):
        wrapped.zero_grad()
        notary = Notary(model, wrapped, seed=3)
        for number in range(2):
            with gradient_sync(wrapped, number == 1):
                loss = wrapped(torch.randn(4, 8)).square().sum()
                torch.autograd.grad(loss, weight, retain_graph=True)
                with unseen_factor(model, mistake):
                    loss.backward()
        if not as_ddp:
            announce_reduced_gradients(1.0)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        torch.autograd.grad(wrapped(torch.randn(4, 8)).sum(), weight)
        notary.close()
        assert notary._wrong_gradient() == ("" if mistake == 1.0 else SAID.format("0.weight"))


@pytest.mark.usefixtures("only_rank")
def test_what_a_script_asked_autograd_for_is_not_taken_for_a_pass_without_a_gradient() -> None:
    weight = nn.Parameter(torch.ones(1))
    model = nn.ParameterList([weight])
    notary = Notary(model, model, seed=3)
    weight.sum().backward()  # type: ignore[no-untyped-call]
    torch.autograd.grad(weight.sum(), weight)
    Nothing.apply(weight).sum().backward()
    announce_reduced_gradients(1.0)
    notary.close()
    assert notary._wrong_gradient() == ""


class Nothing(torch.autograd.Function):
    """Gives its input no gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None


# -- gradients that a communication hook compresses ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "mistake", "is_found"),
    [
        (1.0, no_mistake, False),
        (1e-6, no_mistake, False),
        (1e-7, no_mistake, False),
        (1e-9, no_mistake, False),
        (1.0, a_lost_pass, True),
        (1.0, a_lost_pass_of_one_rank, True),
        (1e-3, a_wrong_divisor, True),
    ],
)
def test_gradients_that_float16_has_no_numbers_for_are_no_mistake(
    size: float, mistake: Mistake, is_found: bool
) -> None:
    port = free_port()

    def body(rank: int) -> bool:
        with world(rank, WORLD, port):
            torch.manual_seed(0)
            model = nn.Linear(64, 64)
            wrapped = DistributedDataParallel(model)
            wrapped.register_comm_hook(None, fp16_compress_hook)
            notary = Notary(model, wrapped, seed=3)
            for number in (6, 7):
                torch.manual_seed(10 * rank + number)
                with gradient_sync(wrapped, number == 7), unseen_factor(model, mistake(rank, number)):
                    (wrapped(torch.randn(4, 64)) * torch.randn(4, 64) * size).sum().backward()
            notary.close()
            return bool(notary._wrong_gradient())

    assert run_ranks(WORLD, body) == [is_found] * WORLD


# -- gradients that a script drops ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("passes", [1, 3])
def test_a_step_that_drops_the_gradients_of_a_first_backward_pass_is_right(
    passes: int, to_none: bool, as_views: bool
) -> None:
    """As sharpness-aware minimisation does: the gradients of a first pass only say where those of the second are taken."""
    torch.manual_seed(0)
    model = layers()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=as_views)
    for mistake in (1.0, 0.5):
        wrapped.zero_grad()
        notary = Notary(model, wrapped, seed=3)
        for phase in range(2):
            wrapped.zero_grad(set_to_none=to_none)
            for number in range(passes):
                with gradient_sync(wrapped, number == passes - 1):
                    loss = wrapped(torch.randn(4, 8)).square().sum()
                    with unseen_factor(model, mistake if phase else 1.0):
                        loss.backward()
            with torch.no_grad():
                for each in model.parameters():
                    assert each.grad is not None
                    each.add_(each.grad, alpha=0.001)
        notary.close()
        assert notary._wrong_gradient() == ("" if mistake == 1.0 else SAID.format("0.weight"))


@pytest.mark.usefixtures("only_rank")
def test_passes_that_are_added_up_by_a_script_count_though_their_gradients_are_taken_away() -> None:
    plan = ElasticBatches(40, 8, seed=1)
    model = DistributedDataParallel(layers())
    for mistake in (1.0, 0.0):
        notary = Notary(model.module, model, seed=3)
        for number, part in enumerate(fixed_order_passes(model, plan.batch(3, 0, 1), 2)):
            loss = model(torch.randn(2, 8)).square().mean() * part.weight
            with unseen_factor(model.module, mistake if number == 1 else 1.0):
                loss.backward()
        notary.close()
        assert notary._wrong_gradient() == ("" if mistake else SAID.format("0.weight"))


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize("reduced", [1, PASSES])
def test_passes_that_are_reduced_one_by_one_are_right(reduced: int) -> None:
    torch.manual_seed(0)
    model = layers(torch.bfloat16)
    wrapped = DistributedDataParallel(model)
    notary = Notary(model, wrapped, seed=3)
    for number in range(PASSES):
        with gradient_sync(wrapped, number >= PASSES - reduced):
            wrapped(torch.randn(4, 8).bfloat16()).sum().backward()
    notary.close()
    assert notary._wrong_gradient() == ""
