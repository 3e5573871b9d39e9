"""Passes of one size, sums over tokens, and a GradScaler: the same gradient, and one compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nonempty import every, some
from torch import nn

from elastipod.data import ElasticBatches
from elastipod.gradients import accumulate, accumulate_padded

NUM_SAMPLES, GLOBAL_BATCH, SIZE = 42, 16, 3  # 3 steps: two whole ones and one of 10 samples


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(NUM_SAMPLES, 5, dtype=torch.float64, generator=generator),
        torch.randn(NUM_SAMPLES, dtype=torch.float64, generator=generator),
    )


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def losses_of(model: Callable[..., Any], indices: Any) -> torch.Tensor:
    inputs, targets = data()
    losses: torch.Tensor = (model(inputs[list(indices)]).flatten() - targets[list(indices)]).square()
    return losses


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@settings(max_examples=40, deadline=None)
@given(world_size=st.integers(1, 12), size=st.integers(1, 20), global_batch=st.integers(1, 30), tail=st.integers(1, 30))
def test_passes_of_one_size_give_every_sample_its_weight_once(
    world_size: int, size: int, global_batch: int, tail: int
) -> None:
    plan = ElasticBatches(global_batch + tail, global_batch)
    model = net()
    for step in range(1, plan.total_steps + 1):
        weights: dict[int, float] = {}
        passes: set[int] = set()
        for rank in range(world_size):
            batch = plan.batch(step, rank, world_size)
            parts = list(accumulate_padded(model, batch, size))
            passes.add(len(parts))
            assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
            for part in parts:
                assert (len(part.indices), len(part.row_weights), len(part.rows)) == (size, size, size)
                assert part.indices == tuple(batch.indices_or_spare[row] for row in part.rows)
                for index, weight in zip(part.indices, part.row_weights, strict=True):
                    assert index not in weights or not weight, "a sample counts once"
                    if weight:
                        weights[index] = weight
            assert {index for part in parts for index in part.indices} <= {*batch.indices, batch.spare_index}
        assert len(passes) == 1
        whole = plan.batch(step, 0, 1)
        assert weights.keys() == set(whole.indices)
        assert every(weight == world_size / len(whole.indices) for weight in weights.values())


def test_padded_passes_give_the_gradient_of_the_whole_batch() -> None:
    model = net()
    for batch in some(ElasticBatches(NUM_SAMPLES, GLOBAL_BATCH).iterate(0, 1)):
        model.zero_grad()
        losses_of(model, batch.indices).mean().backward()  # type: ignore[no-untyped-call]
        wanted = gradients(model)
        model.zero_grad()
        for part in accumulate_padded(model, batch, SIZE):
            weights = torch.tensor(part.row_weights, dtype=torch.float64)
            (losses_of(model, part.indices) @ weights).backward()  # type: ignore[no-untyped-call]
        for one, other in zip(gradients(model), some(wanted), strict=True):
            torch.testing.assert_close(one, other)


def test_a_compiled_model_is_compiled_once_however_short_a_pass_is() -> None:
    compiled: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(len(inputs))
        return graph.forward

    def train(passes: Callable[..., Any]) -> int:
        compiled.clear()
        torch._dynamo.reset()
        model = torch.compile(net(), backend=count)
        shapes: set[int] = set()
        for batch in ElasticBatches(NUM_SAMPLES, GLOBAL_BATCH).iterate(0, 1):
            for part in passes(model, batch, SIZE):
                shapes.add(len(part.indices))
                losses_of(model, part.indices).sum().backward()  # type: ignore[no-untyped-call]
        assert len(shapes) == (1 if passes is accumulate_padded else 2)
        return len(compiled)

    assert train(accumulate_padded) == 1
    assert train(accumulate) > 1, "the case can fail"


@pytest.mark.parametrize("passes", [accumulate, accumulate_padded])
@pytest.mark.parametrize("kind", [int, torch.tensor], ids=["int", "tensor"])
def test_tokens_weigh_alike_in_one_process(passes: Any, kind: Any) -> None:
    model = net()
    (batch, *_) = ElasticBatches(NUM_SAMPLES, GLOBAL_BATCH).iterate(0, 1)
    parts = some(passes(model, batch, SIZE, tokens=kind(50)))
    if passes is accumulate:
        assert [part.weight for part in parts] == [1 / 50] * 6
    else:
        assert [weight for part in parts for weight in part.row_weights] == [1 / 50] * 16 + [0.0] * 2
    parts = list(passes(model, batch, SIZE, tokens=0))
    assert every(not (part.weight if passes is accumulate else any(part.row_weights)) for part in parts)


@pytest.mark.parametrize("passes", [accumulate, accumulate_padded])
def test_what_cannot_be_counted_is_refused(passes: Any) -> None:
    model, plan = net(), ElasticBatches(NUM_SAMPLES, GLOBAL_BATCH)
    with pytest.raises(ValueError, match="tokens is -1; it is the number of tokens in this rank's samples, at least 0"):
        next(passes(model, plan.batch(1, 0, 1), SIZE, tokens=-1))
    with pytest.raises(ValueError, match=r"divided over 4 ranks, but torch\.distributed has 1; tokens can only"):
        next(passes(model, plan.batch(1, 0, 4), SIZE, tokens=3))
    with pytest.raises(ValueError, match="size is 0; a micro-batch holds at least one sample"):
        next(passes(model, plan.batch(1, 0, 1), 0))


def test_a_gradient_scaler_scales_a_step_of_several_passes_or_skips_it() -> None:
    model, scaled = net(), net()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, scaled)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    for batch in some(ElasticBatches(NUM_SAMPLES, GLOBAL_BATCH).iterate(0, 1)):
        overflows = batch.step == 2
        for optimizer in optimizers:
            optimizer.zero_grad()
        for number, part in enumerate(accumulate(scaled, batch, SIZE)):
            loss = losses_of(scaled, part.indices).mean() * part.weight
            blow_up = float("inf") if overflows and number == 1 else 1.0
            scaler.scale(loss * blow_up).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizers[1])
        before = [parameter.clone() for parameter in scaled.parameters()]
        scaler.step(optimizers[1])
        scaler.update()
        assert every(map(torch.equal, before, scaled.parameters())) is overflows
        if not overflows:
            losses_of(model, batch.indices).mean().backward()  # type: ignore[no-untyped-call]
            optimizers[0].step()
        for one, other in zip(model.parameters(), scaled.parameters(), strict=True):
            torch.testing.assert_close(one, other)
    assert scaler.get_scale() == 2.0**11  # doubled, halved, doubled
