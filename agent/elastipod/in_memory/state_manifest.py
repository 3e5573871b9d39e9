"""How a donor describes its state to those who are filled from it: JSON, checked field by field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from elastipod.errors import ElastipodError
from elastipod.in_memory.members import Content, Members, TensorShape, digests_by_key


class BadManifest(ElastipodError):
    """A donor described its state in a way that this rank does not understand."""


@dataclass(frozen=True, slots=True)
class StateManifest:
    """A state without the content of its tensors.

    digests: of the tensors that a follower may have already. uncompared: digests of those that replicas need not have in common, such
    as buffers, which no later comparison covers.
    """

    shapes: Sequence[TensorShape]
    values: str
    digests: Mapping[str, str]
    uncompared: Mapping[str, str]


def describe(members: Members, content: Content, digests: Mapping[str, str]) -> str:
    """Give the JSON text of a `StateManifest`. digests: as there."""
    shapes = [[each.key, each.dtype, list(each.sizes)] for each in content.shapes()]
    uncompared = digests_by_key(members.uncompared(content.tensors))
    return json.dumps(
        {"v": 3, "tensors": shapes, "values": content.values, "digests": dict(digests), "uncompared": uncompared}
    )


def read_manifest(text: str) -> StateManifest:
    """Read what a donor told. Raises BadManifest for anything else."""
    try:
        found = json.loads(text)
        if found["v"] != 3:
            raise BadManifest(f"a donor's state has version {found['v']!r}; all ranks need the same elastipod")
        shapes = [
            TensorShape(str(key), _dtype(dtype), tuple(map(int, sizes))) for key, dtype, sizes in found["tensors"]
        ]
        uncompared = read_digests(found["uncompared"], {each.key for each in shapes})
        return StateManifest(shapes, str(found["values"]), read_digests(found["digests"]), uncompared)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise BadManifest(f"a donor's description of its state cannot be read: {error!r}") from error


def read_digests(found: Mapping[object, object], known: set[str] | None = None) -> dict[str, str]:
    """Give digests by key as another rank told them. Raises BadManifest where there may be only known keys, and is another."""
    digests = {str(key): str(value) for key, value in found.items()}
    if known is not None and not digests.keys() <= known:
        raise BadManifest("a donor gives digests of tensors that it does not describe")
    return digests


def _dtype(name: object) -> str:
    if not isinstance(getattr(torch, str(name), None), torch.dtype):
        raise BadManifest(f"{str(name)[:40]!r} is no type of a tensor")
    return str(name)
