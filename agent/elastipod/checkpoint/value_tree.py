"""Taking the tensors out of a nested state, and putting them back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from elastipod.errors import CheckpointError

_SLOT = "__tensor_of_state__"


def split_tensors(value: object, key: str, tensors: dict[str, torch.Tensor]) -> object:
    """Return the value with a slot in place of each tensor, which goes into ``tensors`` under its path from ``key``.

    Raises CheckpointError where two tensors have paths of the same text: one of them would be lost.
    """
    if isinstance(value, torch.Tensor):
        if key in tensors:
            raise CheckpointError(
                f"two tensors of the state have the key {key}; a key is the path of names and numbers with dots between them: "
                "rename one"
            )
        tensors[key] = value.detach()
        return {_SLOT: key}
    if isinstance(value, Mapping):
        return {name: split_tensors(each, f"{key}.{name}", tensors) for name, each in value.items()}
    if type(value) is list:
        return [split_tensors(each, f"{key}.{number}", tensors) for number, each in enumerate(value)]
    if type(value) is tuple:
        return tuple(split_tensors(each, f"{key}.{number}", tensors) for number, each in enumerate(value))
    return value


def join_tensors(value: object, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value with the tensors in their slots."""
    if isinstance(value, dict):
        if value.keys() == {_SLOT}:
            return tensors[value[_SLOT]]
        return {name: join_tensors(each, tensors) for name, each in value.items()}
    if isinstance(value, list):
        return [join_tensors(each, tensors) for each in value]
    if isinstance(value, tuple):
        return tuple(join_tensors(each, tensors) for each in value)
    return value
