"""Buffers that a step changes before it counts: an interrupted step leaves nothing in them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from elastipod.in_memory.members import Members
from elastipod.in_memory.step_buffers import StepBuffers


class Net(nn.Module):
    """Has statistics, kept and not, and a mask that nothing changes."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.ones(2, 2))
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = self.norm(inputs)
        return found


def values(members: Members) -> list[list[float]]:
    return [each.flatten().tolist() for each in members.model.buffers()]


def made(members: Members, buffers: StepBuffers) -> None:
    """Make a step that counts."""
    buffers.begin()
    members.model(torch.randn(4, 3))
    buffers.committed()


@pytest.fixture
def members() -> Members:
    return Members({"model": Net()})


def test_an_interrupted_step_leaves_nothing_in_statistics(members: Members) -> None:
    buffers = StepBuffers(members)
    places = [each.data_ptr() for each in members.model.buffers()]
    for is_committed in (False, True, False, False, True):
        before = values(members)
        buffers.begin()
        members.model(torch.randn(4, 3))
        after = values(members)
        assert after != before
        if is_committed:
            buffers.committed()
        buffers.restore()
        assert values(members) == (after if is_committed else before)
    assert [each.data_ptr() for each in members.model.buffers()] == places


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_step_that_is_completed_after_its_world_has_its_own_statistics_again(
    members: Members, steps_before: int
) -> None:
    buffers = StepBuffers(members)
    for _ in range(steps_before):
        made(members, buffers)
    before = values(members)
    buffers.begin()
    members.model(torch.randn(4, 3))
    after = values(members)
    for _ in range(2):
        buffers.restore()
        assert values(members) == before
    for _ in range(2):
        buffers.redo()
        assert values(members) == after


def test_what_the_first_step_did_not_change_is_copied_no_more(members: Members) -> None:
    buffers = StepBuffers(members)
    made(members, buffers)
    members.model.get_buffer("mask").fill_(2.0)
    buffers.begin()
    members.model.get_buffer("mask").fill_(3.0)
    members.model(torch.randn(4, 3))
    buffers.restore()
    assert members.model.get_buffer("mask").tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert members.model.get_buffer("calls").tolist() == [1.0]


def test_a_model_without_changing_buffers_is_looked_through_in_the_first_step_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A walk through a thousand modules takes milliseconds."""
    members = Members({"model": nn.Linear(3, 3)})
    buffers = StepBuffers(members)
    made(members, buffers)
    monkeypatch.setattr(nn.Module, "named_modules", lambda *_, **__: pytest.fail("looked through"))
    made(members, buffers)


def test_changing_buffers_are_copied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator, each copy of its own would be a kernel of its own: some for every layer, at every step."""
    members = Members({"model": nn.Sequential(*[nn.BatchNorm1d(3) for _ in range(20)])})
    buffers = StepBuffers(members)
    made(members, buffers)
    monkeypatch.setattr(torch.Tensor, "clone", lambda *_: pytest.fail("copied alone"))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: pytest.fail("copied alone"))
    made(members, buffers)


def test_two_models_may_share_a_buffer(members: Members) -> None:
    model: Any = members.model
    other = nn.BatchNorm1d(3)
    other.running_mean = model.norm.running_mean
    both = Members({"model": model, "other": other})
    buffers = StepBuffers(both)
    for _ in range(2):
        before = values(both)
        buffers.begin()
        model(torch.randn(4, 3))
        other(torch.randn(4, 3))
        buffers.restore()
        assert values(both) == before
        assert other.running_mean is model.norm.running_mean
        made(both, buffers)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_buffers_that_cannot_be_compared_or_written_to_are_left_alone() -> None:
    model: Any = Net()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    model.register_buffer("positions", torch.zeros(1).expand(4))
    model.register_buffer("nowhere", torch.zeros(3, device="meta"))
    members = Members({"model": model})
    buffers = StepBuffers(members)
    for _ in range(2):
        buffers.begin()
        model(torch.randn(4, 3))
        calls = float(model.calls)
        buffers.restore()
        assert float(model.calls) == calls - 1
        made(members, buffers)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch 2.8 has these numbers")
def test_buffers_of_numbers_that_torch_does_not_compare_are_put_back() -> None:
    model: Any = Net()
    numbers = torch.tensor([1, 2, 3], dtype=torch.uint8)
    model.register_buffer("packed", numbers.view(torch.float4_e2m1fn_x2))
    members = Members({"model": model})
    buffers = StepBuffers(members)
    buffers.begin()
    numbers[0] += 5
    buffers.restore()
    assert numbers.tolist() == [1, 2, 3]
    made(members, buffers)


def test_a_buffer_that_the_script_replaces_at_each_step_is_put_back() -> None:
    class Replacing(Net):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            found: torch.Tensor = self.norm(inputs)
            return found

    members = Members({"model": Replacing()})
    buffers = StepBuffers(members)
    for _ in range(3):
        before = values(members)
        buffers.begin()
        members.model(torch.randn(4, 3))
        buffers.restore()
        assert values(members) == before
        made(members, buffers)


def test_a_cache_that_a_step_has_made_longer_or_taken_away_is_left_as_it_is(members: Members) -> None:
    buffers = StepBuffers(members)
    model: Any = members.model
    buffers.begin()
    model.mask, model.calls = torch.ones(3, 3), None
    model.norm(torch.randn(4, 3))
    buffers.restore()
    assert (model.mask.shape, int(model.norm.num_batches_tracked)) == ((3, 3), 0)
    for length in (4, 4, 5):
        buffers.begin()
        model.mask = torch.ones(length, length)
        buffers.committed()
    buffers.begin()
    model.mask = None
    buffers.committed()
    buffers.begin()
    model.norm(torch.randn(4, 3))
    buffers.restore()
    assert model.mask is None


def test_a_model_that_was_let_go_is_held_by_nobody(members: Members) -> None:
    """A sharded state is built anew in each world: with the former one still there, it would take twice the memory."""
    buffers = StepBuffers(members)
    made(members, buffers)
    buffers.begin()
    former = weakref.ref(members.model)
    members.clear()
    gc.collect()
    assert former() is None
    buffers.redo()
    buffers.restore()


def test_a_buffer_of_another_type_in_the_place_of_one_is_left_alone(members: Members) -> None:
    buffers = StepBuffers(members)
    for dtype in (torch.float64, torch.bfloat16):
        made(members, buffers)
        buffers.begin()
        members.model.calls = torch.ones(1, dtype=dtype)
        buffers.restore()
        assert members.model.get_buffer("calls").dtype is dtype
        buffers.redo()


def test_the_buffers_of_the_next_world_are_others(members: Members) -> None:
    buffers = StepBuffers(members)
    made(members, buffers)
    buffers.begin()
    buffers.forget()
    members.take({"model": Net()})
    before = values(members)
    buffers.restore()
    assert values(members) == before
    buffers.begin()
    members.model(torch.randn(4, 3))
    members.model.get_buffer("mask").fill_(2.0)
    buffers.restore()
    assert values(members) == before


@pytest.mark.filterwarnings("ignore:.*torch.jit.*", "ignore:Lazy modules")
def test_modules_of_torchscript_and_those_that_are_built_in_the_first_step_have_buffers_too() -> None:
    scripted: Any = torch.jit.script(nn.BatchNorm1d(3))
    members = Members({"model": nn.Sequential(scripted, nn.LazyBatchNorm1d())})
    buffers = StepBuffers(members)
    for _ in range(3):
        made(members, buffers)
    before = [each.tolist() for each in scripted.buffers()]
    buffers.begin()
    members.model(torch.randn(4, 3))
    buffers.restore()
    assert [each.tolist() for each in scripted.buffers()] == before
