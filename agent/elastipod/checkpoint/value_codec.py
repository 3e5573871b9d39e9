"""Plain values of the state (options of optimizers, schedules, random states) as JSON that preserves their types."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch

from elastipod.value_words import kind_of

_TUPLE, _PAIRS, _COUNTER, _TENSOR = "__tuple__", "__pairs__", "__counter__", "__tensor__"
_MAX_ELEMENTS = 64  # of a tensor in the text; larger ones have chunks of their own


def encode_value(value: object, name: str) -> str:
    """Encode a value as JSON: None, bool, int, float, str; lists, tuples, dictionaries, Counters and small tensors of these.

    Raises ValueError, naming the place, for anything else.
    """
    return json.dumps(_encoded(value, name), separators=(",", ":"))


def decode_value(text: str) -> Any:
    """Decode a value. Raises ValueError for text that `encode_value` did not write."""
    return _decoded(json.loads(text))


def _encoded(value: object, name: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [_encoded(each, f"{name}[{number}]") for number, each in enumerate(value)]
    if isinstance(value, tuple):
        return {_TUPLE: [_encoded(each, f"{name}[{number}]") for number, each in enumerate(value)]}
    if isinstance(value, dict):
        if isinstance(value, Counter) or not all(type(key) is str and not key.startswith("__") for key in value):
            pairs = [[_encoded(key, name), _encoded(each, f"{name}[{key!r}]")] for key, each in value.items()]
            return {_COUNTER if isinstance(value, Counter) else _PAIRS: pairs}
        return {key: _encoded(each, f"{name}.{key}") for key, each in value.items()}
    if isinstance(value, torch.Tensor) and value.numel() <= _MAX_ELEMENTS:
        if value.layout is not torch.strided or value.is_meta:
            raise ValueError(f"{name} is a tensor without numbers of its own ({value.layout}, {value.device})")
        numbers = torch.view_as_real(value.detach().resolve_conj()) if value.is_complex() else value.detach()
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape), numbers.flatten().tolist()]}
    if isinstance(value, str):
        return str.__str__(value)  # a string enum's own __str__ gives its name
    if isinstance(value, (bool, int, float)):  # subclasses such as NumPy's floats
        return _encoded(next(kind for kind in (bool, int, float) if isinstance(value, kind))(value), name)
    if isinstance(value, torch.Tensor):
        raise ValueError(
            f"{name} is a tensor of {value.numel()} elements; here a tensor of at most {_MAX_ELEMENTS} can be saved"
        )
    raise ValueError(f"{name} is {kind_of(value)}; only tensors and plain values can be saved")


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (kind, content), *_ = value.items()
        if kind == _TUPLE:
            return tuple(_decoded(each) for each in content)
        if kind in (_PAIRS, _COUNTER):
            pairs = {_decoded(key): _decoded(each) for key, each in content}
            return Counter(pairs) if kind == _COUNTER else pairs
        if kind == _TENSOR:
            return _tensor(*content)
    return {key: _decoded(each) for key, each in value.items()}


def _tensor(dtype: str, shape: list[int], numbers: list[Any]) -> torch.Tensor:
    wanted: torch.dtype = getattr(torch, dtype)
    if not wanted.is_complex:
        return torch.tensor(numbers, dtype=wanted, device="cpu").reshape(shape)
    pairs = torch.tensor(numbers, dtype=wanted.to_real(), device="cpu").reshape(*shape, 2)
    return torch.view_as_complex(pairs)
