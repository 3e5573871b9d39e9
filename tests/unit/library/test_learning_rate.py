"""Learning rates of jobs whose batch grows and shrinks."""

from __future__ import annotations

import json
from copy import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from elastipod.batches.learning_rate import BatchScaledRate, rate_factor
from elastipod.errors import DataError


@pytest.mark.parametrize(
    ("rule", "factor"),
    [
        pytest.param("constant", 1.0, id="constant: whatever the batch"),
        pytest.param("linear", 4.0, id="linear: four times the batch, four times the rate"),
        pytest.param("square-root", 2.0, id="square root: four times the batch, twice the rate"),
    ],
)
def test_a_rule_scales_by_the_batch(rule: str, factor: float) -> None:
    assert rate_factor(rule, 256, 64) == factor  # type: ignore[arg-type]
    assert rate_factor(rule, 64, 256) == 1 / factor  # type: ignore[arg-type]


def test_a_resize_ramps_from_the_old_factor_to_the_new() -> None:
    rate = BatchScaledRate("linear", 64, warm_up_steps=4)
    rate.resized(0, 64)
    assert [rate.factor(step) for step in (0, 9)] == [1, 1]
    rate.resized(10, 192)
    assert [rate.factor(step) for step in range(9, 16)] == [1, 1, 1.5, 2, 2.5, 3, 3]


def test_a_resize_during_a_ramp_begins_where_that_one_is() -> None:
    rate = BatchScaledRate("linear", 64, warm_up_steps=4)
    rate.resized(0, 64)
    rate.resized(10, 192)
    rate.resized(12, 64)
    assert [rate.factor(step) for step in range(12, 17)] == [2, 1.75, 1.5, 1.25, 1]


def test_without_a_warm_up_the_new_factor_counts_at_once() -> None:
    rate = BatchScaledRate("square-root", 16)
    rate.resized(0, 16)
    rate.resized(7, 64)
    assert [rate.factor(step) for step in (0, 7)] == [2, 2]


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_the_first_step_after_a_restart_has_the_new_rate(lr: float | torch.Tensor) -> None:
    """Each generation makes its schedule, loads, says its batch and applies."""
    states: dict[str, Any] = {}
    for step, batch in ((0, 512), (5, 64)):
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=copy(lr))
        rate = BatchScaledRate("linear", 64)
        schedule = LambdaLR(optimizer, rate.factor)
        if states:
            optimizer.load_state_dict(states["optimizer"])
            schedule.load_state_dict(states["schedule"])
            rate.load_state_dict(states["rate"])
        rate.resized(step, batch)
        rate.apply(schedule)
        assert [float(each) for each in schedule.get_last_lr()] == [0.5 * batch / 64]
        assert float(optimizer.param_groups[0]["lr"]) == 0.5 * batch / 64
        for _ in range(5):
            optimizer.step()
            schedule.step()
        states = {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(), "rate": rate.state_dict()}


@given(
    resizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 512)), min_size=1, max_size=6),
    warm_up=st.integers(0, 15),
)
def test_a_restart_at_any_point_changes_no_factor(resizes: list[tuple[int, int]], warm_up: int) -> None:
    """Each generation loads the state from JSON; the other rate lives through all of them."""
    lived = BatchScaledRate("linear", 32, warm_up_steps=warm_up)
    step, state = 0, None
    for steps, batch in resizes:
        restarted = BatchScaledRate("linear", 32, warm_up_steps=warm_up)
        if state:
            restarted.load_state_dict(json.loads(state))
        for rate in (lived, restarted):
            rate.resized(step, batch)
        assert [lived.factor(step + n) for n in range(20)] == [restarted.factor(step + n) for n in range(20)]
        state = json.dumps(restarted.state_dict())
        step += steps


def test_bad_input_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="rule is 'cubic'; there are constant, linear, square-root"):
        BatchScaledRate("cubic", 64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="both must be at least 1"):
        rate_factor("linear", 0, 64)
    with pytest.raises(ValueError, match="warm_up_steps is -1"):
        BatchScaledRate("linear", 64, warm_up_steps=-1)
    with pytest.raises(DataError, match="no state of a BatchScaledRate: KeyError"):
        BatchScaledRate("linear", 64).load_state_dict({"since": 1})
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(
        TypeError, match="rate of a CosineAnnealingLR cannot be scaled; write the schedule as a function"
    ):
        BatchScaledRate.apply(CosineAnnealingLR(optimizer, 10))  # type: ignore[arg-type]
    assert optimizer.param_groups[0]["lr"] == 1


def test_a_rate_that_a_compiled_optimizer_refers_to_is_changed_in_place() -> None:
    rate_tensor = torch.tensor(0.5)
    groups: list[dict[str, Any]] = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate_tensor}]
    optimizer = torch.optim.AdamW([*groups, {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.25}])
    rate = BatchScaledRate("linear", 64)
    schedule = LambdaLR(optimizer, [rate.factor, lambda step: 2 * rate.factor(step)])
    held = optimizer.param_groups[0]["lr"]
    rate.resized(0, 128)
    rate.apply(schedule)
    assert optimizer.param_groups[0]["lr"] is held
    assert (float(held), optimizer.param_groups[1]["lr"]) == (1.0, 1.0)
    assert [float(each) for each in schedule.get_last_lr()] == [1.0, 1.0]
