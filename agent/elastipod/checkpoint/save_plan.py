"""Which rank copies and writes which part of the state: decided alike on every rank, from what all of them hold. No torch.

A *chunk* is a box of one tensor, as one rank holds it. Tensors that several ranks hold alike (DDP, the replicas of HSDP)
are divided between them. With memory images every node copies all that its ranks hold, once per node, so that a node's
memory serves all of its ranks; files are written once over all nodes, by ranks that copied them anyway.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elastipod.checkpoint.chunk import Chunk as Chunk
from elastipod.checkpoint.chunk import Path
from elastipod.checkpoint.chunk import Place as Place
from elastipod.checkpoint.chunk_table import (
    Chunks,
    Sets,
    SetsMaker,
    Tensor,
    packed_numbers,
    runs,
    unpacked_numbers,
    unrun,
)

ALIGNMENT = 64  # bytes; chunks of an image begin at multiples of it

Value = tuple[str, Path]  # key and path of a plain value


@dataclass(frozen=True, slots=True)
class Form:
    """What ranks usually have in common: the tensors of which they hold one box each, and plain values."""

    tensors: tuple[Tensor, ...]
    values: tuple[Value, ...]

    def to_json(self) -> str:
        return json.dumps({"tensors": [each.as_json() for each in self.tensors], "values": self.values})

    @classmethod
    def from_json(cls, text: str) -> Form:
        data = json.loads(text)
        return cls(
            tuple(map(Tensor.from_json, data["tensors"])),
            tuple((str(key), tuple(path)) for key, path in data["values"]),
        )


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank holds, in numbers. node: identity of the memory that it shares with others; boxes: offsets and sizes, tensor

    by tensor of its form; own_values: those that bear its number.
    """

    node: str
    form: str  # its digest
    boxes: array[int]
    own_values: tuple[Value, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "node": self.node,
            "form": self.form,
            "boxes": packed_numbers(self.boxes),
            "own_values": self.own_values,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Holding:
        values = tuple((str(key), tuple(path)) for key, path in data["own_values"])
        return cls(str(data["node"]), str(data["form"]), unpacked_numbers("q", data["boxes"]), values)


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds. node: identity of the memory that it shares with others; values: keys and paths of plain values."""

    node: str
    chunks: tuple[Chunk, ...]
    values: tuple[Value, ...]

    def in_numbers(self, rank: int) -> tuple[Holding, Form]:
        """Tell what is this rank's alone from what others are likely to have too."""
        own = tuple(value for value in self.values if value[1][-1:] == (str(rank),))
        form = Form(tuple(map(Tensor.of, self.chunks)), tuple(value for value in self.values if value not in own))
        boxes = array("q", [number for chunk in self.chunks for number in (*chunk.offsets, *chunk.sizes)])
        return Holding(self.node, digest_of(form.to_json()), boxes, own), form


@dataclass(frozen=True, slots=True)
class Plan:
    """The division of one state over one world.

    copiers: by chunk, the ranks that copy it to host memory, one on each node that holds it; writers: by chunk, the one of
    them that writes it to durable storage. values: keys and paths of plain values, and the lowest rank that has each.
    """

    chunks: Chunks
    copiers: Sets
    writers: array[int]
    values: tuple[tuple[str, Path, int], ...]
    nodes: tuple[str, ...]  # by rank
    digest: str = field(default="", compare=False)

    @property
    def world_size(self) -> int:
        return len(self.nodes)

    def layout(self, rank: int) -> tuple[dict[int, int], int]:
        """Give where a rank's chunks lie in its image: number of the chunk -> first byte; and the bytes of the image."""
        positions: dict[int, int] = {}
        end = 0
        for number in self.copiers.with_rank(rank):
            positions[number] = end
            end += -(-self.chunks[number].num_bytes // ALIGNMENT) * ALIGNMENT
        return positions, end

    def image_sizes(self) -> list[int]:
        """Give the bytes of every rank's image, by rank."""
        of_kinds = [0] * len(self.copiers.kinds)
        for kind, num_bytes in zip(self.copiers.kind_of, self.chunks.byte_sizes(), strict=True):
            of_kinds[kind] += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        sizes = [0] * self.world_size
        for copiers, of_kind in zip(self.copiers.kinds, of_kinds, strict=True):
            for rank in copiers:
                sizes[rank] += of_kind
        return sizes

    def written_by(self, rank: int) -> list[int]:
        """Give the numbers of the chunks that a rank writes to durable storage."""
        return [number for number, writer in enumerate(self.writers) if writer == rank]

    def values_of(self, rank: int) -> list[str]:
        """Give the keys of the plain values that a rank writes to durable storage."""
        return [key for key, _, writer in self.values if writer == rank]

    def is_covered_by(self, ranks: Iterable[int]) -> bool:
        """Tell whether the images of these ranks hold all of the state."""
        there = set(ranks)
        return all(not there.isdisjoint(copiers) for copiers in self.copiers.kinds)

    def exposed(self) -> set[int]:
        """Give the ranks whose images hold something that no other node has: what a lost node would take along."""
        return {
            copiers[0]
            for copiers in self.copiers.kinds
            if len({self.nodes[rank] for rank in copiers}) == 1 < len(set(self.nodes))
        }

    def to_json(self) -> str:
        return json.dumps(
            {
                "tensors": [tensor.as_json() for tensor in self.chunks.tensors],
                "divisions": [packed_numbers(boxes) for boxes in self.chunks.divisions],
                "division_of": self.chunks.division_of,
                "copiers": self.copiers.kinds,
                "copied_by": packed_numbers(self.copiers.kind_of),
                "writers": packed_numbers(self.writers),
                "values": self.values,
                "nodes": runs(self.nodes),
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan. Raises ValueError, KeyError or TypeError when it is none."""
        data = json.loads(text)
        divisions = [unpacked_numbers("q", boxes) for boxes in data["divisions"]]
        tensors = tuple(map(Tensor.from_json, data["tensors"]))
        return cls(
            Chunks(tensors, divisions, data["division_of"]),
            Sets(tuple(map(tuple, data["copiers"])), unpacked_numbers("i", data["copied_by"])),
            unpacked_numbers("i", data["writers"]),
            tuple((key, tuple(path), rank) for key, path, rank in data["values"]),
            unrun(data["nodes"]),
            digest_of(text),
        )


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def make_plan(held: Sequence[Held], *, is_in_memory: bool) -> Plan:
    """Divide the state. held: by rank. As `plan_of`."""
    told = [own.in_numbers(rank) for rank, own in enumerate(held)]
    forms = {holding.form: form for holding, form in told}
    return plan_of([holding for holding, _ in told], forms, is_in_memory=is_in_memory)


def plan_of(held: Sequence[Holding], forms: Mapping[str, Form], *, is_in_memory: bool) -> Plan:
    """Divide the state. held: by rank. forms: by digest. is_in_memory: whether each node keeps all that it holds.

    Raises ValueError, naming the tensor, when ranks hold different tensors under one name.
    """
    tensors, patterns = _patterns(held, forms)
    divisions: dict[
        tuple[object, ...], tuple[int, list[tuple[int, list[int]]]]
    ] = {}  # by pattern: number, as `_divided`
    boxes_of: list[array[int]] = []
    division_of: list[int] = []
    copied, written = [0] * len(held), [0] * len(held)
    copiers, writers = SetsMaker(), array("i")
    for tensor, (ranks, boxes) in zip(tensors, patterns, strict=True):
        pattern = (len(tensor.shape), tuple(ranks), boxes)
        if pattern not in divisions:
            cut, holders = _divided(tensor, ranks, boxes)
            divisions[pattern] = len(boxes_of), holders
            boxes_of.append(cut)
        number, holders = divisions[pattern]
        division_of.append(number)
        for items, holding in holders:
            num_bytes = tensor.item_bytes * items
            chosen = _one_per_node(holding, held, copied) if is_in_memory and len(holding) > 1 else holding
            writer = min(chosen, key=lambda rank: (written[rank], rank)) if len(chosen) > 1 else chosen[0]
            chosen = chosen if is_in_memory else [writer]
            written[writer] += num_bytes
            for rank in chosen:
                copied[rank] += num_bytes
            copiers.add(tuple(chosen))
            writers.append(writer)
    values: dict[str, tuple[str, Path, int]] = {}
    for form, rank in {own.form: rank for rank, own in reversed([*enumerate(held)])}.items():
        for key, path in forms[form].values:
            values[key] = min(values.get(key, (key, path, rank)), (key, path, rank), key=lambda value: value[2])
    for rank, own in enumerate(held):
        values |= {key: (key, path, rank) for key, path in own.own_values if key not in values}
    nodes = tuple(own.node for own in held)
    plan = Plan(Chunks(tensors, boxes_of, division_of), copiers.made(), writers, tuple(values.values()), nodes)
    return replace(plan, digest=digest_of(plan.to_json()))


def _patterns(
    held: Sequence[Holding], forms: Mapping[str, Form]
) -> tuple[tuple[Tensor, ...], list[tuple[Sequence[int], bytes]]]:
    """Give all tensors, and for each the ranks that hold a box of it, with these boxes side by side in bytes."""
    of_form: dict[str, list[tuple[str, int, int]]] = {}  # keys, and where their boxes lie, in bytes
    tensors: dict[str, Tensor] = {}
    for name, form in forms.items():
        end = 0
        spans: list[tuple[str, int, int]] = []
        for tensor in form.tensors:
            known = tensors.setdefault(tensor.key, tensor)
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                raise ValueError(f"the ranks hold different tensors under the name {tensor.key}")
            start, end = end, end + 16 * len(tensor.shape)
            spans.append((tensor.key, start, end))
        of_form[name] = spans
    found: dict[str, tuple[list[int], list[bytes]]] = {key: ([], []) for key in tensors}
    for rank, own in enumerate(held):
        data = own.boxes.tobytes()
        for key, start, end in of_form[own.form]:
            ranks, boxes = found[key]
            ranks.append(rank)
            boxes.append(data[start:end])
    everyone = range(len(held))
    return tuple(tensors.values()), [
        (everyone if len(ranks) == len(held) else ranks, b"".join(boxes)) for ranks, boxes in found.values()
    ]


def _divided(tensor: Tensor, ranks: Sequence[int], boxes: bytes) -> tuple[array[int], list[tuple[int, list[int]]]]:
    """Give the different boxes of a tensor, side by side, and for each how many numbers it holds and who holds it."""
    dims = len(tensor.shape)
    width = 16 * dims
    holders: dict[bytes, list[int]] = {}
    for place, rank in enumerate(ranks):
        holders.setdefault(boxes[place * width : (place + 1) * width], []).append(rank)
    if len({box[: width // 2] for box in holders}) < len(holders):
        raise ValueError(f"the ranks hold different tensors under the name {tensor.key}")
    cut = array("q")
    cut.frombytes(b"".join(holders))
    items = [math.prod(cut[2 * dims * box + dims : 2 * dims * (box + 1)]) for box in range(len(holders))]
    return cut, list(zip(items, holders.values(), strict=True))


def _one_per_node(ranks: Sequence[int], held: Sequence[Holding], copied: Sequence[int]) -> list[int]:
    """Choose on each node the rank that copies least so far."""
    chosen: dict[str, int] = {}
    for rank in ranks:
        other = chosen.get(held[rank].node)
        if other is None or copied[rank] < copied[other]:
            chosen[held[rank].node] = rank
    return sorted(chosen.values())


def partners(nodes: Sequence[str], domains: Sequence[str]) -> dict[int, int]:
    """Choose for each rank the rank on another node that keeps a copy of its image; empty where there is one node only.

    nodes, domains: by rank; domains name what fails together (a rack, a zone), empty where unknown. The copy goes half-way
    round the ring of nodes, further on to the first node of another domain where there is one, and is spread over that
    node's ranks.
    """
    ring = list(dict.fromkeys(nodes))
    members = {node: [rank for rank, own in enumerate(nodes) if own == node] for node in ring}
    chosen: dict[int, int] = {}
    for place, node in enumerate(ring):
        others = [ring[(place + len(ring) // 2 + step) % len(ring)] for step in range(len(ring))]
        others = [other for other in others if other != node]
        if not others:
            return {}
        domain = domains[members[node][0]]
        away = [other for other in others if domain and domains[members[other][0]] not in ("", domain)]
        keepers = members[(away or others)[0]]
        for number, rank in enumerate(members[node]):
            chosen[rank] = keepers[number % len(keepers)]
    return chosen


def num_bytes(sizes: Sequence[int], item_bytes: int) -> int:
    return math.prod(sizes) * item_bytes
