"""What the notary makes of one rank's first step; `tests/e2e/test_inmemory.py` has mistakes in worlds of several ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.free_ports import free_port
from tests.unit.in_memory.forked_ranks import run_ranks, world
from tests.unit.in_memory.models import Compiled
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastipod.checkpoint.rng import rank_seed, seed_new_rank
from elastipod.data import Batch, ElasticBatches
from elastipod.gradients import announce_reduced_gradients
from elastipod.in_memory import notary as module
from elastipod.in_memory.notary import Notary, Trained, _sample, _sum, _wrong_data, _wrong_place, _wrong_random

PLAN = ElasticBatches(40, 8, seed=1)
BEFORE = Trained(2, 16)  # step 3


def problems(
    *,
    divisor: float | None = 1.0,
    change: Callable[[nn.Module], object] = lambda model: None,
    seeds: bool = True,
    batch: Batch | None = None,
    trained: Trained = BEFORE,
) -> list[str]:
    """Let a single rank train step 3 with two passes, and give what the notary says. change: is made after the passes."""
    torch.manual_seed(0)
    if seeds:
        seed_new_rank(3, 0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    if seeds:
        seed_new_rank(3, 0)
    notary = Notary(model, model, seed=3)
    for _ in range(2):
        model(torch.randn(4, 2)).square().sum().backward()
    change(model)
    if divisor is not None:
        announce_reduced_gradients(divisor)
    notary.close()
    announce_reduced_gradients(99.0)  # nobody listens any more
    return notary.problems(batch or PLAN.batch(3, 0, 1), PLAN, 3, trained)


def test_a_right_step_has_no_problem() -> None:
    assert problems() == []


def test_a_wrong_divisor_is_named_with_a_parameter_and_a_rank() -> None:
    assert problems(divisor=2.0) == [
        "the reduced gradient of model.0.weight is not the mean over all ranks' samples on rank 0"
    ]


def test_one_parameter_that_was_left_out_is_found() -> None:
    (said,) = problems(change=lambda model: next(iter(reversed(list(model.parameters())))).grad.zero_())  # type: ignore[union-attr]
    assert "the reduced gradient of model.1.bias" in said


def test_a_gradient_that_is_not_a_number_is_left_to_the_gradscaler() -> None:
    assert problems(change=lambda model: [each.grad.fill_(torch.nan) for each in model.parameters()]) == []  # type: ignore[union-attr]


def test_a_script_that_does_not_say_when_it_has_reduced_is_checked_for_all_but_that() -> None:
    former = replace(PLAN.batch(3, 0, 1), indices=PLAN.batch(2, 0, 1).indices)
    assert problems(divisor=None) == []
    assert problems(divisor=None, batch=former) == ["the ranks' samples together are not the batch of step 3"]


def test_a_random_state_that_nobody_derived_from_the_step_is_found() -> None:
    assert problems(seeds=False) == ["the random state is not that of its step on rank 0"]


# -- which elements are looked at ----------------------------------------------------------------------------------


def sampled(model: nn.Module, seed: int) -> dict[str, list[int]]:
    return {each.name: each.elements.tolist() for each in _sample(model, seed)}


def test_all_ranks_look_at_the_same_elements_of_every_parameter_that_is_trained() -> None:
    model = nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 1))
    model.register_parameter("empty", nn.Parameter(torch.empty(0)))
    model[0].bias.requires_grad_(False)
    torch.manual_seed(1)
    first = sampled(model, 3)
    torch.manual_seed(2)  # every rank has random numbers of its own
    assert first == sampled(model, 3)
    assert first != sampled(model, 4)
    assert list(first) == ["0.weight", "1.weight", "1.bias"], "the empty and the frozen one have nothing to look at"
    assert [len(elements) for elements in first.values()] == [4, 4, 4]
    assert max(first["0.weight"]) >= 40
    assert first["1.bias"] == [0] * 4, "it has one element"
    assert [each.parameter is dict(model.named_parameters())[each.name] for each in _sample(model, 3)] == [True] * 3
    assert _sample(nn.ReLU(), 3) == []


@pytest.mark.parametrize(("most", "number"), [(1, 1), (2, 2), (3, 2), (4, 4)])
def test_of_a_model_with_many_parameters_some_are_chosen_all_over_it(
    monkeypatch: pytest.MonkeyPatch, most: int, number: int
) -> None:
    monkeypatch.setattr(module, "SAMPLED_TENSORS", most)
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(sampled(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 0)) == names[:: 4 // number]


# -- data and random states ----------------------------------------------------------------------------------------

BATCH = PLAN.batch(3, 0, 1)


def facts(**changes: Any) -> dict[str, Any]:
    return {"step": 3, "count": 8, "sum": _sum(BATCH.indices), **changes}


def half(number: int) -> dict[str, Any]:
    own = BATCH.indices[4 * number : 4 * number + 4]
    return facts(count=4, sum=_sum(own))


NOT_THE_BATCH = ["the ranks' samples together are not the batch of step 3"]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ([facts()], []),
        ([half(0), half(1)], []),
        ([half(0), half(0)], NOT_THE_BATCH),
        ([half(0)], NOT_THE_BATCH),
        ([facts(count=7)], NOT_THE_BATCH),
        ([facts(sum=1)], NOT_THE_BATCH),
        ([facts(), facts(step=4, count=0, sum=0)], ["the ranks are at different steps: [3, 4]"]),
    ],
)
def test_the_samples_of_all_ranks_are_those_of_the_plan(told: list[dict[str, Any]], said: list[str]) -> None:
    assert _wrong_data(told, BATCH, PLAN) == said


def place(after: int = 2, samples: int | None = None, step: int = 3) -> dict[str, Any]:
    return {"step": step, "after": after, "samples": samples}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ([place(), place()], []),
        ([place(samples=16), place()], []),
        ([place(samples=16), place(samples=16)], []),
        ([place(), place(samples=8)], ["step 3 begins after 16 samples, and 8 were trained"]),
        ([place(samples=16), place(samples=24)], ["step 3 begins after 16 samples, and 16, 24 were trained"]),
        ([place(after=1, samples=8)] * 2, ["step 3 is trained with the state after step 1"]),
        ([place(), place(step=4)], []),  # which is told already
        ([place(), place(after=1)], ["step 3 is trained with the state after step 1, 2"]),
    ],
)
def test_a_step_follows_the_state_and_the_samples_that_ranks_remember(
    told: list[dict[str, Any]], said: list[str]
) -> None:
    """Also where all ranks skip a batch, or repeat one: the plan knows no better than they do then."""
    assert _wrong_place(told, BATCH) == said


@pytest.mark.parametrize(
    ("trained", "said"),
    [
        (Trained(2), []),
        (Trained(1), ["step 3 is trained with the state after step 1"]),
        (Trained(2, 24), ["step 3 begins after 16 samples, and 24 were trained"]),
    ],
)
def test_what_a_rank_has_trained_before_is_compared(trained: Trained, said: list[str]) -> None:
    assert problems(trained=trained) == said


def test_a_sum_of_samples_knows_no_order_and_is_the_same_number_on_every_rank() -> None:
    assert _sum([]) == 0
    assert _sum([0]) == 0x9E3779B97F4A7C15 % (1 << 61)
    assert _sum([3, 5]) == ((4 * 0x9E3779B97F4A7C15 ^ 9) + (6 * 0x9E3779B97F4A7C15 ^ 25)) % (1 << 61) == _sum([5, 3])


def random_state(step: int, rank: int) -> str:
    state = torch.Generator().manual_seed(rank_seed(step, rank)).get_state()
    return hashlib.sha256(state.numpy().tobytes()).hexdigest()


def test_random_states_of_other_ranks_and_steps_are_found() -> None:
    right = [{"random": random_state(6, rank)} for rank in range(3)]
    assert _wrong_random(right, 6) == []
    assert _wrong_random([right[0], right[0], {"random": random_state(5, 2)}], 6) == [
        "the random state is not that of its step on ranks 1-2"
    ]


@pytest.mark.parametrize(("most", "sum_"), [(8, _sum(BATCH.indices)), (7, 0)])
def test_what_a_rank_tells_the_others_of_its_step(monkeypatch: pytest.MonkeyPatch, most: int, sum_: int) -> None:
    """Of a batch with more samples only their number is compared."""
    told: list[str] = []
    monkeypatch.setattr(module, "MAX_COUNTED", most)

    def alone(text: str) -> list[str]:
        told.append(text)
        return [text]

    monkeypatch.setattr(module, "all_texts", alone)
    assert problems() == []
    told_once = {
        "step": 3,
        "after": 2,
        "samples": 16,
        "count": 8,
        "sum": sum_,
        "random": random_state(3, 0),
        "reduced": True,
        "wrong": "",
    }
    assert [json.loads(each) for each in told] == [told_once]


def test_where_only_some_ranks_reduced_that_is_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_another(text: str) -> list[str]:
        return [
            text,
            json.dumps(
                {
                    "step": 3,
                    "after": 2,
                    "samples": None,
                    "count": 0,
                    "sum": 0,
                    "random": random_state(3, 1),
                    "reduced": False,
                }
            ),
        ]

    monkeypatch.setattr(module, "all_texts", with_another)
    assert problems() == ["gradients were reduced on some ranks only"]


# -- gradients -----------------------------------------------------------------------------------------------------


def scaled(factor: float) -> Callable[[nn.Module], object]:
    return lambda model: [each.grad.mul_(factor) for each in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize(("factor", "is_found"), [(1 + 4e-6, False), (1 + 2e-5, True)])
@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_gradients_may_differ_by_some_roundings_however_large_they_are(
    factor: float, size: float, is_found: bool
) -> None:
    model = nn.Linear(3, 1, bias=False)
    notary = Notary(model, model, seed=3)
    (size * model(torch.ones(1, 3))).sum().backward()
    model.weight.grad.mul_(factor)  # type: ignore[union-attr]
    announce_reduced_gradients(1.0)
    notary.close()
    said = "the reduced gradient of model.weight is not the mean over all ranks' samples"
    assert notary._wrong_gradient() == (said if is_found else "")


def test_parameters_that_get_no_gradient_or_one_of_zeros_are_right() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    notary = Notary(model, model, seed=3)
    (0.0 * model[0](torch.ones(1, 2))).sum().backward()
    announce_reduced_gradients(1.0)
    notary.close()
    assert notary._wrong_gradient() == ""
    assert notary._reduced is not None
    assert notary._reduced.tolist() == [0.0] * 16


@pytest.fixture
def only_rank() -> Iterator[None]:
    """Be the only rank of a world."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize(
    ("compresses", "factor", "is_found"),
    [(True, 1.04, False), (True, 1.06, True), (False, 1.04, True), (False, 1.0, False)],
)
def test_what_ddp_reduced_may_differ_more_where_a_hook_compresses_it(
    compresses: bool, factor: float, is_found: bool
) -> None:
    model = nn.Linear(3, 1, bias=False)
    wrapped = DistributedDataParallel(model)

    def compress(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer() * factor)
        return done

    if compresses:
        compress.__annotations__.clear()  # DDP wants types there, not their names
        wrapped.register_comm_hook(None, compress)
    notary = Notary(model, wrapped, seed=3)
    if not compresses:
        model.weight.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]  # after the notary has seen it
    wrapped(torch.ones(1, 3)).sum().backward()
    model.weight.grad.zero_()  # type: ignore[union-attr]  # what a script does after the reduction is its own affair
    notary.close()
    assert bool(notary._wrong_gradient()) == is_found


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_what_ddp_reduced_is_looked_at_where_it_was_compiled_as_well(factor: float) -> None:
    model = nn.Linear(3, 1, bias=False)
    wrapped = Compiled(DistributedDataParallel(model))
    notary = Notary(model, wrapped, seed=3)
    model.weight.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]  # after the notary has seen it
    wrapped(torch.ones(1, 3)).sum().backward()
    notary.close()
    assert notary._reduced is not None
    assert bool(notary._wrong_gradient()) == (factor != 1.0)


@pytest.mark.usefixtures("only_rank")
def test_a_sparse_gradient_is_not_compared_beside_those_that_are() -> None:
    dense = nn.Linear(2, 2)
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), dense)
    wrapped = DistributedDataParallel(model)
    for factor, said in (
        (1.0, ""),
        (0.5, "the reduced gradient of model.1.weight is not the mean over all ranks' samples"),
    ):
        wrapped.zero_grad()
        notary = Notary(model, wrapped, seed=3)
        dense.weight.register_hook(partial(torch.mul, factor))  # type: ignore[no-untyped-call]  # after the notary has seen it
        wrapped(torch.tensor([1])).sum().backward()
        notary.close()
        assert notary._wrong_gradient() == said


@pytest.mark.usefixtures("only_rank")
def test_a_script_that_passes_its_batch_to_another_model_than_that_of_ddp_is_told_which() -> None:
    model = nn.Linear(2, 1)
    seed_new_rank(3, 0)
    notary = Notary(model, DistributedDataParallel(Compiled(model)), seed=3)
    model.weight.register_hook(partial(torch.mul, 0.5))  # type: ignore[no-untyped-call]
    model(torch.ones(1, 2)).sum().backward()
    notary.close()
    assert notary.problems(PLAN.batch(3, 0, 1), PLAN, 3, BEFORE) == [
        "the reduced gradient of model.weight is not the mean over all ranks' samples on rank 0; use state.model inside the block"
    ]


class _FrozenWeight(torch.autograd.Function):
    """Multiplies with a weight that gets no gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize("as_ddp", [False, True])
def test_a_function_may_give_a_weight_no_gradient(as_ddp: bool) -> None:
    """Autograd calls the weight's hooks all the same."""
    model = nn.Linear(2, 2)

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _FrozenWeight.apply(inputs, model.weight)
        return found + model.bias

    model.forward = forward  # type: ignore[assignment]
    wrapped = DistributedDataParallel(model) if as_ddp else model
    notary = Notary(model, wrapped, seed=3)
    wrapped(torch.ones(1, 2)).sum().backward()
    if not as_ddp:
        announce_reduced_gradients(1.0)
    notary.close()
    assert notary._wrong_gradient() == ""
    assert notary._own.has_passes(1)
    assert not notary._own.has_passes(0)


def test_a_rank_whose_gradient_is_not_the_mean_of_all_is_named() -> None:
    port = free_port()

    def body(rank: int) -> Any:
        with world(rank, 3, port):
            seed_new_rank(3, rank)
            model = nn.Linear(2, 2)
            seed_new_rank(3, rank)
            found = []
            for mistake in (1.0, 0.5):
                notary = Notary(model, model, seed=3)
                model.zero_grad()
                (float(rank - 1) * model(torch.ones(1, 2))).sum().backward()  # in the sum over the ranks they cancel
                for each in model.parameters():
                    assert each.grad is not None
                    dist.all_reduce(each.grad)
                    each.grad += 1.0 - mistake if rank == 2 else 0.0
                announce_reduced_gradients(3.0)
                notary.close()
                seed_new_rank(3, rank)
                found.append(notary.problems(PLAN.batch(3, rank, 3), PLAN, 3, Trained(2)))
            return found

    wrong = ["the reduced gradient of model.weight is not the mean over all ranks' samples on rank 2"]
    assert run_ranks(3, body) == [[[], wrong]] * 3
