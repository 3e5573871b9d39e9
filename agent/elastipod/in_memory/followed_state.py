"""What of a state can be followed: the parameters in the order of the model, each with what optimizers keep for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from elastipod.checkpoint.value_codec import decode_value, encode_value
from elastipod.in_memory.follow_wire import FollowingEnded
from elastipod.in_memory.members import Members, TensorShape, empty_like_shape

PARAMETER = -1  # in the place of an optimizer's number


class FollowedState:
    """One rank's parameters and optimizers. A slot is a parameter's number."""

    def __init__(self, members: Members) -> None:
        """Raises FollowingEnded for members whose steps cannot be repeated from gradients alone."""
        self.optimizers: list[torch.optim.Optimizer] = members.of_type(torch.optim.Optimizer)
        if members.of_type(torch.amp.GradScaler) or not self.optimizers:
            raise FollowingEnded("only optimizers without a GradScaler can be followed")
        named = dict(members.model.named_parameters())
        self.parameters = list(named.values())
        self._counted_beside = [_counted_beside(each) for each in self.optimizers]
        slots = {id(each): slot for slot, each in enumerate(self.parameters)}
        built = [[name, str(each.dtype), list(each.shape)] for name, each in named.items()]
        trained = [
            [type(one).__name__, *([slots.get(id(each)) for each in group["params"]] for group in one.param_groups)]
            for one in self.optimizers
        ]
        self.layout = hashlib.sha256(json.dumps([built, trained]).encode()).hexdigest()

    def options(self) -> str:
        """Give the options of all groups of parameters, such as learning rates. Raises ValueError for what is no plain value."""
        groups = [[{**group, "params": None} for group in each.param_groups] for each in self.optimizers]
        return encode_value(groups, "options")

    def copied(self, slot: int) -> tuple[list[Any], list[torch.Tensor]]:
        """Give a copy of a slot in host memory: its description as JSON has it, and its tensors. Raises FollowingEnded."""
        parameter = self.parameters[slot]
        entries: list[tuple[int, str, Any]] = [(PARAMETER, "", parameter)]
        for number, optimizer in enumerate(self.optimizers):
            kept = optimizer.state.get(parameter, {})
            entries += [(number, name, value) for name, value in kept.items() if value is not None]
        if not all(isinstance(value, torch.Tensor) for *_, value in entries):
            raise FollowingEnded("an optimizer keeps something that is no tensor with a parameter")
        shapes = [[number, name, str(one.dtype).removeprefix("torch."), [*one.shape]] for number, name, one in entries]
        return [slot, shapes], [one.detach().to("cpu", copy=True).contiguous() for *_, one in entries]

    def places(self, told: list[Any]) -> list[torch.Tensor]:
        """Give the live tensors of a slot that was described, made where there are none."""
        slot, shapes = told
        parameter, found = self.parameters[slot], []
        for number, name, dtype, sizes in shapes:
            if number != PARAMETER:
                is_beside = sizes or id(parameter) in self._counted_beside[number]
                device = parameter.device if is_beside else torch.device("cpu")
                shape = TensorShape(name, dtype, tuple(sizes))
                self.optimizers[number].state[parameter][name] = empty_like_shape(shape, device)
            found.append(parameter.detach() if number == PARAMETER else self.optimizers[number].state[parameter][name])
        return found

    def step(self, options: str | None, gradients: Mapping[int, torch.Tensor]) -> None:
        """Repeat a step with the gradients of those parameters that are here. options: where they have changed."""
        for optimizer, groups in zip(self.optimizers, decode_value(options) if options else (), strict=False):
            for group, changed in zip(optimizer.param_groups, groups, strict=True):
                group.update({name: value for name, value in changed.items() if name != "params"})
        for slot, gradient in gradients.items():
            self.parameters[slot].grad = gradient
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def _counted_beside(optimizer: torch.optim.Optimizer) -> set[int]:
    """Give the ids of the parameters whose steps are counted on their own device: kernels of the optimizer read the counters there."""
    groups = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    return {id(parameter) for group in groups for parameter in group["params"]}
