"""Which rank stages and writes which chunk of the state; computed on rank 0 from what all ranks hold. No torch.

Tensors that several ranks hold alike (DDP, the replicas of HSDP) are divided between them. With memory images every node
stages all that its ranks hold, once per node, so that the memory of a node serves all of its ranks. Files are written once
over all nodes, by ranks that staged the chunks anyway.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastipod.checkpoint.chunk import Chunk as Chunk
from elastipod.checkpoint.chunk import ChunkIndex as ChunkIndex
from elastipod.checkpoint.chunk import StatePath
from elastipod.checkpoint.chunk_table import (
    ChunkTable,
    PackedInt32,
    PackedInt64,
    RankSets,
    RankSetsBuilder,
    StringRuns,
    TensorSpec,
)
from elastipod.json_records import JsonError, encode, json_record, parse

ALIGNMENT = 64  # bytes; chunks in an image start at multiples of it

Value = tuple[str, StatePath]  # key and path of a plain value


@json_record
@dataclass(frozen=True, slots=True)
class StateSchema:
    """What ranks usually have in common: the tensors of which they hold one chunk each, and plain values."""

    tensors: tuple[TensorSpec, ...]
    values: tuple[Value, ...]

    def to_json(self) -> str:
        return json.dumps(encode(self))

    @classmethod
    def from_json(cls, text: str) -> StateSchema:
        """Parse a schema. Raises JsonError."""
        return parse(cls, text)


@json_record
@dataclass(frozen=True, slots=True)
class PackedLocalState:
    """What one rank holds, in compact form. node: identity of the memory that it shares with others.

    schema: its digest; boxes: offsets and sizes, tensor by tensor of the schema; own_values: values that bear the rank's number.
    """

    node: str
    schema: str  # its digest
    boxes: PackedInt64
    own_values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class LocalState:
    """What one rank holds. node: identity of the memory that it shares with others; values: keys and paths of plain values."""

    node: str
    chunks: tuple[Chunk, ...]
    values: tuple[Value, ...]

    def pack(self, rank: int) -> tuple[PackedLocalState, StateSchema]:
        """Separate what only this rank has from what others are likely to have too."""
        own = tuple(value for value in self.values if value[1][-1:] == (str(rank),))
        schema = StateSchema(
            tuple(map(TensorSpec.of, self.chunks)), tuple(value for value in self.values if value not in own)
        )
        boxes = array("q", [number for chunk in self.chunks for number in (*chunk.offsets, *chunk.sizes)])
        return PackedLocalState(self.node, text_digest(schema.to_json()), boxes, own), schema


@json_record
@dataclass(frozen=True, slots=True)
class _PlanFile:
    """What the file of a plan holds, in its order, by the keys that it always had."""

    tensors: tuple[TensorSpec, ...]
    divisions: tuple[PackedInt64, ...]
    division_of: tuple[int, ...]
    copiers: tuple[tuple[int, ...], ...]
    copied_by: PackedInt32
    writers: PackedInt32
    values: tuple[tuple[str, StatePath, int], ...]
    nodes: StringRuns


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The division of one state over one world.

    stagers: by chunk, the ranks that copy it to host memory, one on each node that holds it; writers: by chunk, the stager that
    writes it to durable storage. values: key and path of each plain value, and the lowest rank that has it. In a plan of
    `divide_images`, stagers are all ranks whose node has an image with the chunk, and rank 0 writes all values.
    """

    chunks: ChunkTable
    stagers: RankSets
    writers: array[int]
    values: tuple[tuple[str, StatePath, int], ...]
    nodes: tuple[str, ...]  # by rank
    digest: str = field(default="", compare=False)

    @property
    def world_size(self) -> int:
        return len(self.nodes)

    def layout(self, rank: int) -> tuple[dict[int, int], int]:
        """Return where a rank's chunks are in its image, as first byte by chunk number, and the size of the image."""
        positions: dict[int, int] = {}
        end = 0
        for number in self.stagers.with_rank(rank):
            positions[number] = end
            end += -(-self.chunks[number].num_bytes // ALIGNMENT) * ALIGNMENT
        return positions, end

    def image_sizes(self) -> list[int]:
        """Return the bytes of every rank's image, by rank."""
        of_kinds = [0] * len(self.stagers.sets)
        for kind, num_bytes in zip(self.stagers.set_of, self.chunks.byte_sizes(), strict=True):
            of_kinds[kind] += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        sizes = [0] * self.world_size
        for stagers, of_kind in zip(self.stagers.sets, of_kinds, strict=True):
            for rank in stagers:
                sizes[rank] += of_kind
        return sizes

    def written_by(self, rank: int) -> list[int]:
        """Return the numbers of the chunks that a rank writes to durable storage."""
        return [number for number, writer in enumerate(self.writers) if writer == rank]

    def values_of(self, rank: int) -> list[str]:
        """Return the keys of the plain values that a rank writes to durable storage."""
        return [key for key, _, writer in self.values if writer == rank]

    def is_covered_by(self, ranks: Iterable[int]) -> bool:
        """Return whether the images of these ranks hold the whole state."""
        there = set(ranks)
        return all(not there.isdisjoint(stagers) for stagers in self.stagers.sets)

    def unreplicated_ranks(self) -> set[int]:
        """Return the ranks whose images hold something that no other node has."""
        return {
            stagers[0]
            for stagers in self.stagers.sets
            if len({self.nodes[rank] for rank in stagers}) == 1 < len(set(self.nodes))
        }

    def to_json(self) -> str:
        chunks, stagers = self.chunks, self.stagers
        content = _PlanFile(
            tuple(chunks.tensors), tuple(chunks.shardings), tuple(chunks.sharding_of),
            stagers.sets, stagers.set_of, self.writers, self.values, self.nodes,
        )  # fmt: skip
        return json.dumps(encode(content), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> SavePlan:
        """Parse a plan. Raises JsonError for anything else."""
        found = parse(_PlanFile, text)
        if not all(0 <= number < len(found.divisions) for number in found.division_of):
            raise JsonError(f"names a number beyond the {len(found.divisions)} divisions", ("division_of",))
        if len(found.division_of) != len(found.tensors):
            raise JsonError(f"has {len(found.division_of)} entries for {len(found.tensors)} tensors", ("division_of",))
        return cls(
            ChunkTable(found.tensors, found.divisions, found.division_of),
            RankSets(found.copiers, found.copied_by),
            found.writers,
            found.values,
            found.nodes,
            text_digest(text),
        )


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def divide_state(
    states: Sequence[PackedLocalState], schemas: Mapping[str, StateSchema], *, is_in_memory: bool
) -> SavePlan:
    """Divide the state. states: by rank. schemas: by digest. is_in_memory: whether each node stages all that it holds.

    Raises ValueError, naming the tensor, when ranks hold different tensors under one name.
    """
    tensors, patterns = _patterns(states, schemas)
    shardings: dict[
        tuple[object, ...], tuple[int, list[tuple[int, list[int]]]]
    ] = {}  # by pattern: number, as `_divide_tensor`
    boxes_of: list[array[int]] = []
    sharding_of: list[int] = []
    copied, written = [0] * len(states), [0] * len(states)
    stagers, writers = RankSetsBuilder(), array("i")
    for tensor, (ranks, boxes) in zip(tensors, patterns, strict=True):
        pattern = (len(tensor.shape), tuple(ranks), boxes)
        if pattern not in shardings:
            cut, holders = _divide_tensor(tensor, ranks, boxes)
            shardings[pattern] = len(boxes_of), holders
            boxes_of.append(cut)
        number, holders = shardings[pattern]
        sharding_of.append(number)
        for items, holding in holders:
            num_bytes = tensor.item_bytes * items
            chosen = _one_per_node(holding, states, copied) if is_in_memory and len(holding) > 1 else holding
            writer = min(chosen, key=lambda rank: (written[rank], rank)) if len(chosen) > 1 else chosen[0]
            chosen = chosen if is_in_memory else [writer]
            written[writer] += num_bytes
            for rank in chosen:
                copied[rank] += num_bytes
            stagers.add(tuple(chosen))
            writers.append(writer)
    values: dict[str, tuple[str, StatePath, int]] = {}
    for schema, rank in {own.schema: rank for rank, own in reversed([*enumerate(states)])}.items():
        for key, path in schemas[schema].values:
            values[key] = min(values.get(key, (key, path, rank)), (key, path, rank), key=lambda value: value[2])
    for rank, own in enumerate(states):
        values |= {key: (key, path, rank) for key, path in own.own_values if key not in values}
    nodes = tuple(own.node for own in states)
    plan = SavePlan(ChunkTable(tensors, boxes_of, sharding_of), stagers.build(), writers, tuple(values.values()), nodes)
    return replace(plan, digest=text_digest(plan.to_json()))


def divide_images(
    plan: SavePlan, holders: Mapping[int, Iterable[str]], nodes: Sequence[str], known_values: Container[str]
) -> SavePlan:
    """Divide a saved state, which images hold, over the ranks of the present world.

    plan: that of the save. holders: by rank of the save, the nodes that have its image; together they have every chunk. nodes: by
    present rank. known_values: keys of the plain values that are still there.
    """
    ranks_on: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_on.setdefault(node, []).append(rank)
    sets = [
        tuple(sorted({rank for saved in stagers for node in holders.get(saved, ()) for rank in ranks_on[node]}))
        for stagers in plan.stagers.sets
    ]
    written = [0] * len(nodes)
    writers = array("i")
    for kind, num_bytes in zip(plan.stagers.set_of, plan.chunks.byte_sizes(), strict=True):
        writer = min(sets[kind], key=lambda rank: (written[rank], rank))
        written[writer] += num_bytes
        writers.append(writer)
    values = tuple((key, path, 0) for key, path, _ in plan.values if key in known_values)
    return SavePlan(plan.chunks, RankSets(tuple(sets), plan.stagers.set_of), writers, values, tuple(nodes))


def _patterns(
    states: Sequence[PackedLocalState], schemas: Mapping[str, StateSchema]
) -> tuple[tuple[TensorSpec, ...], list[tuple[Sequence[int], bytes]]]:
    """Return all tensors, and for each the ranks that hold a chunk of it, with their boxes concatenated as bytes."""
    of_schema: dict[str, list[tuple[str, int, int]]] = {}  # keys, and where their boxes lie, in bytes
    tensors: dict[str, TensorSpec] = {}
    for name, schema in schemas.items():
        end = 0
        spans: list[tuple[str, int, int]] = []
        for tensor in schema.tensors:
            known = tensors.setdefault(tensor.key, tensor)
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                raise ValueError(f"the ranks hold different tensors under the name {tensor.key}")
            start, end = end, end + 16 * len(tensor.shape)
            spans.append((tensor.key, start, end))
        of_schema[name] = spans
    found: dict[str, tuple[list[int], list[bytes]]] = {key: ([], []) for key in tensors}
    for rank, own in enumerate(states):
        data = own.boxes.tobytes()
        for key, start, end in of_schema[own.schema]:
            ranks, boxes = found[key]
            ranks.append(rank)
            boxes.append(data[start:end])
    everyone = range(len(states))
    return tuple(tensors.values()), [
        (everyone if len(ranks) == len(states) else ranks, b"".join(boxes)) for ranks, boxes in found.values()
    ]


def _divide_tensor(
    tensor: TensorSpec, ranks: Sequence[int], boxes: bytes
) -> tuple[array[int], list[tuple[int, list[int]]]]:
    """Return the distinct boxes of a tensor, concatenated, and for each its number of elements and the ranks that hold it."""
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


def _one_per_node(ranks: Sequence[int], states: Sequence[PackedLocalState], copied: Sequence[int]) -> list[int]:
    """Choose on each node the rank that stages least so far."""
    chosen: dict[str, int] = {}
    for rank in ranks:
        other = chosen.get(states[rank].node)
        if other is None or copied[rank] < copied[other]:
            chosen[states[rank].node] = rank
    return sorted(chosen.values())


def choose_copy_holders(nodes: Sequence[str], domains: Sequence[str]) -> dict[int, int]:
    """Choose for each rank the rank on another node that holds a copy of its image; empty if there is one node only.

    nodes, domains: by rank; a domain names what fails together (a rack, a zone), empty if unknown. The copy goes half-way round
    the ring of nodes, then on to the first node of another domain if there is one, and is spread over that node's ranks.
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
        holders = members[(away or others)[0]]
        for number, rank in enumerate(members[node]):
            chosen[rank] = holders[number % len(holders)]
    return chosen


def num_bytes(sizes: Sequence[int], item_bytes: int) -> int:
    return math.prod(sizes) * item_bytes
