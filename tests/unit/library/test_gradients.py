"""The accumulated, weighted gradient of any world equals the one of a single process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nonempty import every
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

from elastipod.data import ElasticBatches
from elastipod.gradients import accumulate, accumulate_padded, gradient_sync

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard  # type: ignore[attr-defined]


MODEL: Any = torch.nn.Linear(2, 1)
BATCH: Any = ElasticBatches(8, 4).batch(1, 0, 1)


@pytest.mark.parametrize("function", [accumulate, accumulate_padded])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((object(), BATCH, 2), "model is an object; pass an nn.Module, such as state.model"),
        ((MODEL, [1, 2], 2), "batch is a list; pass a Batch, such as that of `with step as batch:`"),
        ((MODEL, BATCH, "8"), "size is '8'; it must be a whole number"),
    ],
)
def test_what_is_no_model_batch_or_size_is_refused_by_name(function: Any, arguments: Any, said: str) -> None:
    with pytest.raises(TypeError) as caught:
        next(iter(function(*arguments)))
    assert str(caught.value) == said


def loss_of(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(inputs), targets)


class Tower(torch.nn.Module):
    """A random small model: some layers of some widths, float64."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        sizes = [5, *widths, 3]
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(size, following).double() for size, following in pairwise(sizes)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        outputs: torch.Tensor = self.layers[-1](x)
        return outputs


@settings(max_examples=60)
@given(
    widths=st.lists(st.integers(1, 6), max_size=3),
    local_sizes=st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any),
    is_even=st.booleans(),
    last=st.integers(1, 40),
    micro_size=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_the_mean_over_ranks_is_the_gradient_of_one_process(
    widths: list[int], local_sizes: list[int], is_even: bool, last: int, micro_size: int, seed: int
) -> None:
    """Any model, world, split into parts and passes; also in the last, short batch of an epoch."""
    world_size, global_batch = len(local_sizes), sum(local_sizes)
    num_samples = global_batch + last % global_batch
    torch.manual_seed(seed)
    inputs, targets = torch.randn(num_samples, 5, dtype=torch.float64), torch.randint(0, 3, (num_samples,))
    model = Tower(widths)
    plan = ElasticBatches(num_samples, global_batch, seed=seed)
    chosen_sizes = () if is_even else local_sizes
    ranks = [plan.iterate(rank, world_size, local_sizes=chosen_sizes) for rank in range(world_size)]
    for step in range(1, plan.total_steps + 1):
        whole = list(plan.batch(step, 0, 1).indices)
        model.zero_grad()
        loss_of(model, inputs[whole], targets[whole]).backward()  # type: ignore[no-untyped-call]
        expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        summed = [torch.zeros_like(each) for each in expected]
        for batches in ranks:
            model.zero_grad()
            for part in accumulate(model, next(batches), micro_size):
                chosen = list(part.indices)
                (loss_of(model, inputs[chosen], targets[chosen]) * part.weight).backward()  # type: ignore[no-untyped-call]
            for total, parameter in zip(summed, model.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad
        for total, wanted in zip(summed, expected, strict=True):
            torch.testing.assert_close(total / world_size, wanted, rtol=1e-10, atol=1e-13)


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """A process group, which is destroyed and no garbage afterwards: a process that is forked later would hang on that."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    gc.collect()


@pytest.mark.usefixtures("world_of_one")
def test_a_compiled_model_is_held_back_from_reducing_too() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    compiled = cast(torch.nn.Module, torch.compile(model, backend="eager"))
    for enabled in (False, True):
        with gradient_sync(compiled, enabled):
            assert model.require_backward_grad_sync == enabled


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("is_compiled", [False, True], ids=["plain", "compiled"])
def test_parts_that_are_sharded_below_a_plain_module_are_held_back(is_compiled: bool) -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    layers: list[Any] = [inner[0], inner, torch.nn.Linear(2, 1)]
    for layer in layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    model = torch.nn.Sequential(torch.nn.Sequential(inner), torch.nn.ReLU(), layers[-1])
    held = cast(torch.nn.Module, torch.compile(model, backend="eager")) if is_compiled else model
    for enabled in (False, True):
        with gradient_sync(held, enabled):
            groups = [layer._get_fsdp_state()._fsdp_param_group for layer in layers]
            assert {group.reduce_grads for group in groups if group is not None} == {enabled}
    with pytest.raises(RuntimeError, match="in a pass"), gradient_sync(held, False):
        raise RuntimeError("in a pass")
    assert every(group.reduce_grads for group in groups if group is not None)


def test_one_unsplit_pass_per_rank_weighs_by_its_share() -> None:
    plan = ElasticBatches(dataset_size=7, global_batch=7)
    weights = [plan.batch(1, rank, 3).weight for rank in range(3)]
    assert weights == pytest.approx([3 * 2 / 7, 3 * 2 / 7, 3 * 3 / 7])
