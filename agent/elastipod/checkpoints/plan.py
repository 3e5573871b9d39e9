"""Which rank copies and writes which part of the state: decided alike on every rank, from what all of them hold. No torch.

A *chunk* is a box of one tensor, as one rank holds it. Tensors that several ranks hold alike (DDP, the replicas of HSDP)
are divided between them. With memory images every node copies all that its ranks hold, once per node, so that a node's
memory serves all of its ranks; files are written once over all nodes, by ranks that copied them anyway.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

ALIGNMENT = 64  # bytes; chunks of an image begin at multiples of it

Place = tuple[str, tuple[int, ...]]  # which chunk: the tensor's key and the offsets in it


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor. path: of the tensor in the nested state; dtype: as torch names it, such as float32; num_bytes: of the box."""

    key: str
    path: tuple[str | int, ...]
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    num_bytes: int

    @property
    def place(self) -> Place:
        return self.key, self.offsets

    def as_json(self) -> list[Any]:
        return [self.key, self.path, self.dtype, self.shape, self.offsets, self.sizes, self.num_bytes]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Chunk:
        key, path, dtype, shape, offsets, sizes, num_bytes = data
        return cls(str(key), tuple(path), str(dtype), tuple(shape), tuple(offsets), tuple(sizes), int(num_bytes))


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds. node: identity of the memory that it shares with others; values: keys and paths of plain values."""

    node: str
    chunks: tuple[Chunk, ...]
    values: tuple[tuple[str, tuple[str | int, ...]], ...]

    def as_json(self) -> dict[str, Any]:
        return {"node": self.node, "chunks": [chunk.as_json() for chunk in self.chunks], "values": self.values}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Held:
        return cls(
            str(data["node"]),
            tuple(map(Chunk.from_json, data["chunks"])),
            tuple((str(key), tuple(path)) for key, path in data["values"]),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The division of one state over one world.

    copiers: by chunk, the ranks that copy it to host memory, one on each node that holds it; writers: by chunk, the one of
    them that writes it to durable storage. values: keys and paths of plain values, and the lowest rank that has each.
    """

    chunks: tuple[Chunk, ...]
    copiers: tuple[tuple[int, ...], ...]
    writers: tuple[int, ...]
    values: tuple[tuple[str, tuple[str | int, ...], int], ...]
    nodes: tuple[str, ...]  # by rank
    digest: str = field(default="", compare=False)

    @property
    def world_size(self) -> int:
        return len(self.nodes)

    def layout(self, rank: int) -> tuple[dict[int, int], int]:
        """Give where a rank's chunks lie in its image: number of the chunk -> first byte; and the bytes of the image."""
        positions: dict[int, int] = {}
        end = 0
        for number, copiers in enumerate(self.copiers):
            if rank in copiers:
                positions[number] = end
                end += -(-self.chunks[number].num_bytes // ALIGNMENT) * ALIGNMENT
        return positions, end

    def written_by(self, rank: int) -> list[int]:
        """Give the numbers of the chunks that a rank writes to durable storage."""
        return [number for number, writer in enumerate(self.writers) if writer == rank]

    def values_of(self, rank: int) -> list[str]:
        """Give the keys of the plain values that a rank writes to durable storage."""
        return [key for key, _, writer in self.values if writer == rank]

    def is_covered_by(self, ranks: Iterable[int]) -> bool:
        """Tell whether the images of these ranks hold all of the state."""
        there = set(ranks)
        return all(not there.isdisjoint(copiers) for copiers in self.copiers)

    def exposed(self) -> set[int]:
        """Give the ranks whose images hold something that no other node has: what a lost node would take along."""
        return {
            copiers[0]
            for copiers in self.copiers
            if len({self.nodes[rank] for rank in copiers}) == 1 < len(set(self.nodes))
        }

    def to_json(self) -> str:
        return json.dumps(
            {
                "chunks": [chunk.as_json() for chunk in self.chunks],
                "copiers": self.copiers,
                "writers": self.writers,
                "values": self.values,
                "nodes": self.nodes,
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan. Raises ValueError, KeyError or TypeError when it is none."""
        data = json.loads(text)
        return cls(
            tuple(map(Chunk.from_json, data["chunks"])),
            tuple(map(tuple, data["copiers"])),
            tuple(data["writers"]),
            tuple((key, tuple(path), rank) for key, path, rank in data["values"]),
            tuple(data["nodes"]),
            digest_of(text),
        )


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def make_plan(held: Sequence[Held], *, is_in_memory: bool) -> Plan:
    """Divide the state. held: by rank, the same on every rank. is_in_memory: whether each node keeps all that it holds.

    Raises ValueError, naming the tensor, when ranks hold different tensors under one name.
    """
    holders: dict[Place, list[int]] = {}
    chunks: dict[Place, Chunk] = {}
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, own in enumerate(held):
        for chunk in own.chunks:
            known = shapes.setdefault(chunk.key, (chunk.dtype, chunk.shape))
            if known != (chunk.dtype, chunk.shape) or chunks.setdefault(chunk.place, chunk).sizes != chunk.sizes:
                raise ValueError(f"the ranks hold different tensors under the name {chunk.key}")
            holders.setdefault(chunk.place, []).append(rank)
    copied, written = [0] * len(held), [0] * len(held)
    copiers: list[tuple[int, ...]] = []
    writers: list[int] = []
    for place, chunk in chunks.items():
        chosen = _one_per_node(holders[place], held, copied) if is_in_memory else holders[place]
        writer = min(chosen, key=lambda rank: (written[rank], rank))
        chosen = chosen if is_in_memory else [writer]
        written[writer] += chunk.num_bytes
        for rank in chosen:
            copied[rank] += chunk.num_bytes
        copiers.append(tuple(chosen))
        writers.append(writer)
    values: dict[str, tuple[str, tuple[str | int, ...], int]] = {}
    for rank, own in enumerate(held):
        for key, path in own.values:
            values.setdefault(key, (key, path, rank))
    nodes = tuple(own.node for own in held)
    plan = Plan(tuple(chunks.values()), tuple(copiers), tuple(writers), tuple(values.values()), nodes)
    return replace(plan, digest=digest_of(plan.to_json()))


def _one_per_node(ranks: Sequence[int], held: Sequence[Held], copied: Sequence[int]) -> list[int]:
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
