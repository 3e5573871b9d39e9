"""What of a state is followed: its layout, the slots of its parameters, and steps that are repeated from gradients."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import torch
from torch import nn

from elastipod.checkpoint.value_codec import decode_value
from elastipod.in_memory.follow_wire import FollowingEnded
from elastipod.in_memory.followed_state import PARAMETER, FollowedState
from elastipod.in_memory.members import Members


def state(*, lr: float = 0.5, momentum: float = 0.5) -> Any:
    """Give the followed state of a model whose bias has an optimizer of its own."""
    torch.manual_seed(1)
    model = nn.Linear(2, 1)
    optimizers = {
        "first": torch.optim.SGD([model.weight], lr=lr, momentum=momentum),
        "second": torch.optim.AdamW([model.bias], lr=0.25),
    }
    return FollowedState(Members({"model": model, **optimizers}))


def gradients() -> dict[int, torch.Tensor]:
    return {0: torch.tensor([[1.0, 2.0]]), 1: torch.tensor([4.0])}


def test_the_layout_is_a_digest_of_all_names_types_shapes_and_optimizers() -> None:
    built = [["weight", "torch.float32", [1, 2]], ["bias", "torch.float32", [1]]]
    trained = [["SGD", [0]], ["AdamW", [1]]]
    assert state().layout == hashlib.sha256(json.dumps([built, trained]).encode()).hexdigest()


@pytest.mark.parametrize("has_scaler", [True, False])
def test_what_gradients_alone_do_not_repeat_is_refused(has_scaler: bool) -> None:
    model = nn.Linear(1, 1)
    members: dict[str, Any] = {"model": model}
    if has_scaler:
        members |= {"optimizer": torch.optim.SGD(model.parameters()), "scaler": torch.amp.GradScaler("cpu")}
    with pytest.raises(FollowingEnded, match=r"^only optimizers without a GradScaler can be followed$"):
        FollowedState(Members(members))


@pytest.mark.parametrize("option", ["fused", "capturable", None])
def test_steps_are_counted_where_the_optimizer_reads_the_counter(option: str | None) -> None:
    """A kernel that was given the address of a counter on the host would break the device's context, and with it the process."""
    model = nn.Linear(2, 1, device="meta")
    optimizer = torch.optim.AdamW(model.parameters())
    if option:
        optimizer.param_groups[0][option] = True
    told = [0, [[PARAMETER, "", "float32", [1, 2]], [0, "step", "float32", []], [0, "exp_avg", "float32", [1, 2]]]]
    found = [each.device.type for each in FollowedState(Members((model, optimizer))).places(told)]
    assert found == ["meta", "meta" if option else "cpu", "meta"]


def test_options_are_those_of_all_groups_without_their_parameters() -> None:
    (first,), (second,) = decode_value(state().options())
    assert (first["params"], first["lr"], first["momentum"]) == (None, 0.5, 0.5)
    assert (second["params"], second["lr"]) == (None, 0.25)


def test_a_slot_is_the_parameter_and_what_its_optimizer_keeps_for_it() -> None:
    one = state()
    assert one.copied(0)[0] == [0, [[PARAMETER, "", "float32", [1, 2]]]], "it has not run yet"
    one.step(None, gradients())
    told, copies = one.copied(0)
    weight = one.parameters[0]
    assert told == [0, [[PARAMETER, "", "float32", [1, 2]], [0, "momentum_buffer", "float32", [1, 2]]]]
    assert [each.tolist() for each in copies] == [weight.tolist(), [[1.0, 2.0]]]
    assert copies[0].data_ptr() != weight.data_ptr()
    assert not copies[0].requires_grad
    told, copies = one.copied(1)
    assert told == [
        1,
        [
            [PARAMETER, "", "float32", [1]],
            [1, "step", "float32", []],
            [1, "exp_avg", "float32", [1]],
            [1, "exp_avg_sq", "float32", [1]],
        ],
    ]
    assert copies[1].tolist() == 1.0


def test_what_an_optimizer_keeps_must_be_tensors_or_nothing() -> None:
    one = state(momentum=0.0)
    one.step(None, gradients())
    assert one.copied(0)[0] == [0, [[PARAMETER, "", "float32", [1, 2]]]], "its momentum is None"
    one.optimizers[0].state[one.parameters[0]]["own"] = 3
    with pytest.raises(FollowingEnded, match=r"^an optimizer keeps something that is no tensor with a parameter$"):
        one.copied(0)


def test_a_slot_that_was_described_has_places_to_be_filled() -> None:
    one, other = state(), state()
    one.step(None, gradients())
    for slot in (0, 1):
        told, copies = one.copied(slot)
        places = other.places(json.loads(json.dumps(told)))
        assert places[0].data_ptr() == other.parameters[slot].data_ptr()
        assert [(place.dtype, place.shape) for place in places] == [(each.dtype, each.shape) for each in copies]
        for place, each in zip(places, copies, strict=True):
            place.copy_(each)
    for each in (one, other):
        each.step(None, gradients())
    assert [each.tolist() for each in one.parameters] == [each.tolist() for each in other.parameters]
    assert one.copied(1)[0] == other.copied(1)[0]


def test_tensors_lie_with_their_parameter_and_counters_on_the_host() -> None:
    model = nn.Linear(2, 1, device="meta")
    one = FollowedState(Members((model, torch.optim.SGD(model.parameters()))))
    places = one.places([0, [[PARAMETER, "", "float32", [1, 2]], [0, "m", "float64", [3]], [0, "step", "int64", []]]])
    assert [(each.device.type, each.dtype, tuple(each.shape)) for each in places] == [
        ("meta", torch.float32, (1, 2)), ("meta", torch.float64, (3,)), ("cpu", torch.int64, ()),
    ]  # fmt: skip
    assert not places[0].requires_grad


def test_a_step_is_repeated_with_the_options_that_have_changed() -> None:
    one, lead = state(lr=0.5, momentum=0.0), state(lr=0.125, momentum=0.0)
    before = one.parameters[0].detach().clone()
    one.step(lead.options(), {0: torch.tensor([[1.0, 2.0]])})
    assert one.parameters[0].tolist() == (before - 0.125 * torch.tensor([[1.0, 2.0]])).tolist()
    assert one.optimizers[0].param_groups[0]["params"] == [one.parameters[0]], "they stay its own"
    assert [each.grad for each in one.parameters] == [None, None]
    one.step(None, {0: torch.tensor([[0.0, 8.0]])})
    assert one.parameters[0].tolist() == (before - 0.125 * torch.tensor([[1.0, 10.0]])).tolist()


class Trained:
    """A training of which one optimizer has two groups, with a frozen parameter and one that never has a gradient."""

    def __init__(self, lr: float, decay: float) -> None:
        torch.manual_seed(1)
        self.model = nn.ModuleDict(
            {name: nn.Linear(2, 1, bias=False) for name in ("first", "second", "frozen", "unused")}
        )
        self.model["frozen"].requires_grad_(False)
        first, second, _, unused = self.model.parameters()
        groups: list[dict[str, Any]] = [
            {"params": [first], "lr": 0.5},
            {"params": [second, unused], "lr": lr, "weight_decay": decay},
        ]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        self.state = FollowedState(Members((self.model, self.optimizer)))

    def values(self) -> list[list[float]]:
        return [each.flatten().tolist() for each in self.state.parameters]


def test_each_group_of_an_optimizer_has_its_own_options_and_what_has_no_gradient_stays() -> None:
    lead, follower = Trained(0.25, 0.5), Trained(1.0, 0.0)
    before = lead.values()
    given = {0: torch.tensor([[1.0, 2.0]]), 1: torch.tensor([[4.0, 8.0]])}
    for slot, gradient in given.items():
        lead.state.parameters[slot].grad = gradient.clone()
    lead.optimizer.step()
    follower.state.step(lead.state.options(), given)
    assert [group["lr"] for group in follower.optimizer.param_groups] == [0.5, 0.25]
    assert [group["weight_decay"] for group in follower.optimizer.param_groups] == [0.0, 0.5]
    assert follower.values() == lead.values()
    assert [new == old for new, old in zip(follower.values(), before, strict=True)] == [False, False, True, True]
    for slot, names in enumerate((["step", "exp_avg", "exp_avg_sq"], ["step", "exp_avg", "exp_avg_sq"], [], [])):
        (_, shapes), _ = follower.state.copied(slot)
        assert [name for number, name, *_ in shapes if number != PARAMETER] == names
