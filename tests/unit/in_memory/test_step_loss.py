"""What a script may set as the loss of a step, and when it is read."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy
import pytest
import torch

from elastipod.in_memory.elastic_step import ElasticStep


@pytest.fixture
def step() -> Any:
    return ElasticStep(mock.Mock(), mock.Mock())


@pytest.mark.parametrize(
    "loss",
    [
        0.5,
        torch.tensor(0.5, requires_grad=True),
        torch.tensor([[0.5]], dtype=torch.bfloat16),
        numpy.float32(0.5),
        numpy.array(0.5),
    ],
)
def test_a_number_of_any_kind_is_a_loss(step: Any, loss: Any) -> None:
    assert step.loss is None
    step.loss = loss
    assert type(step.loss) is float
    assert step.loss == 0.5
    step.loss = None
    assert step.loss is None


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("0.5", "step.loss is '0.5'; set a number, such as loss.item()"),
        ([0.5], "step.loss is [0.5]; set a number, such as loss.item()"),
        (numpy.zeros(2), "step.loss is a ndarray; set a number, such as loss.item()"),
        (torch.zeros(3), "step.loss is a Tensor of 3 elements; set a number, such as loss.mean().item()"),
    ],
)
def test_what_is_no_number_is_refused_where_it_is_set(step: Any, loss: Any, said: str) -> None:
    with pytest.raises(TypeError) as caught:
        step.loss = loss
    assert str(caught.value) == said


def test_a_loss_on_an_accelerator_is_read_once_when_it_is_asked_for(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To read it in the block would make the host wait for the device."""
    reads: list[int] = []
    kept = torch.zeros(1, device="meta", requires_grad=True)
    step.loss = kept * 2

    def item(_: torch.Tensor) -> float:
        reads.append(1)
        return 0.25

    monkeypatch.setattr(torch.Tensor, "item", item)
    assert reads == []
    assert step._loss.grad_fn is None, "the graph is free"
    assert (step.loss, step.loss, reads) == (0.25, 0.25, [1])
