"""Reading a checkpoint in memory of which each node has a part: what travels between three ranks, and what damage is found on the way.

Rank 0 has the image of one saved rank, rank 1 that of the other, and rank 2 has no memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.free_ports import free_port
from tests.unit.checkpoint.save_plans import make_save_plan
from tests.unit.in_memory.forked_ranks import run_ranks, world

from elastipod.checkpoint import chunk_read, image, image_source
from elastipod.checkpoint.communicator import Communicator
from elastipod.checkpoint.image import MappedImage
from elastipod.checkpoint.image_header import ImageHeader, image_name
from elastipod.checkpoint.image_inventory import ImageInventory, NodeImages, list_local_images, merge_inventories
from elastipod.checkpoint.image_source import ImageSource
from elastipod.checkpoint.load_plan import LoadTarget
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.memory_directory import MemoryDirectory
from elastipod.checkpoint.open_images import open_images
from elastipod.checkpoint.save_plan import Chunk, LocalState, SavePlan
from elastipod.checkpoint.value_codec import encode_value
from elastipod.json_records import decode, encode

SMALL = 64  # bytes that share a checksum here
RANKS = 3
ROWS = {"w": (30, 20), "v": (5, 9)}  # of each saved rank; a row has 4 numbers
OF = CheckpointId(7, 1)


@pytest.fixture(autouse=True, scope="module")
def small_checksum_blocks() -> object:
    with pytest.MonkeyPatch.context() as patched:
        for module in (image, image_source, chunk_read):
            patched.setattr(module, "CHECKSUM_BLOCK", SMALL)
        yield


def content(key: str) -> torch.Tensor:
    rows = sum(ROWS[key])
    return torch.arange(4.0 * rows).reshape(rows, 4) + (1000 if key == "v" else 0)


def parts_of(saved_rank: int) -> list[Chunk]:
    found: list[Chunk] = []
    for key, rows in ROWS.items():
        start, number = sum(rows[:saved_rank]), rows[saved_rank]
        found.append(Chunk(key, (key,), "float32", (sum(rows), 4), (start, 0), (number, 4), 16 * number))
    return found


def save(directory: MemoryDirectory, nodes: list[str], saved_rank: int, *, damages: int | None) -> None:
    """Keep one image. damages: the byte that is changed after it has been summed."""
    plan = plan_of(nodes)
    positions, size = plan.layout(saved_rank)
    with MappedImage.create(directory.path / f"{image_name(1, saved_rank, 0)}.bin", size) as made:
        for number, at in positions.items():
            chunk = plan.chunks[number]
            first = chunk.offsets[0]
            made.chunk_tensor(chunk, at).copy_(content(chunk.key)[first : first + chunk.sizes[0]])
        sums = made.sums((plan.chunks[number], at) for number, at in positions.items())
        if damages is not None:
            made.bytes[damages] += 1
    values = {"epoch": encode_value(3, "epoch")}
    directory.store_plan(plan)
    directory.publish(ImageHeader(OF, saved_rank, 0, 2, plan.digest, size, sums, None, values, {"by": saved_rank}))


def plan_of(nodes: list[str]) -> SavePlan:
    states = [LocalState(node, tuple(parts_of(saved_rank)), ()) for saved_rank, node in enumerate(nodes)]
    return make_save_plan(states, is_in_memory=True)


class Reader:
    """One present rank with the images that its node has, opened."""

    def __init__(self, root: Path, rank: int, damages: dict[int, int]) -> None:
        self.rank, self.comm = rank, Communicator()
        self.comm.connect("images")
        directories = [MemoryDirectory(root / f"n{each}", "job") for each in range(2)]
        directory = directories[rank] if rank < 2 else None
        if directory is not None:
            save(directory, [each.node() for each in directories], rank, damages=damages.get(rank))
        told = self.comm.all_reduce(lambda: encode(list_local_images(directory)), lambda answers: answers)
        inventory: ImageInventory = merge_inventories([decode(NodeImages, each) for each in told])
        found = open_images(directory, inventory, OF, self.comm)
        assert found is not None
        self.images: ImageSource = found

    def read(self, targets: dict[str, list[LoadTarget]]) -> list[list[Any]]:
        """Fill targets by the name of their tensor and the place of their chunk; give what was found damaged."""
        wanted: dict[Any, list[LoadTarget]] = {}
        for key, of_ranks in targets.items():
            for saved_rank, target in enumerate(of_ranks):
                chunk = next(each for each in parts_of(saved_rank) if each.key == key)
                wanted[chunk.index] = [target]
        plans = []

        def plan() -> dict[int, list[Any]]:
            plans.append(self.images.plan_reads(wanted))
            return plans[0].requested_ranges()

        requested = self.comm.all_to_all(plan)
        bad = self.images.fill(plans[0], requested, self.comm)
        return sorted([each.saved_rank, each.node == self.images._inventory.nodes[each.saved_rank]] for each in bad)


def whole(dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], dict[str, list[LoadTarget]]]:
    """Give empty tensors for all of the state, and the targets that fill them."""
    tensors = {key: torch.zeros(content(key).shape, dtype=dtype) for key in ROWS}
    targets = {
        key: [
            LoadTarget((0, 0), (number, 4), tensors[key][sum(ROWS[key][:rank]) :][:number])
            for rank, number in enumerate(ROWS[key])
        ]
        for key in ROWS
    }
    return tensors, targets


def run_readers(root: Path, body: Callable[[Reader], Any], damages: dict[int, int] | None = None) -> list[Any]:
    port = free_port()

    def rank_body(rank: int) -> Any:
        with world(rank, RANKS, port):
            reader = Reader(root, rank, damages or {})
            try:
                return body(reader)
            finally:
                reader.images.close().join()

    return run_ranks(RANKS, rank_body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["straight into the tensor", "by a buffer"])
def test_every_rank_gets_all_of_the_state_from_where_it_is(tmp_path: Path, dtype: torch.dtype) -> None:
    def body(reader: Reader) -> Any:
        tensors, targets = whole(dtype)
        bad = reader.read(targets)
        is_right = [torch.equal(tensors[key], content(key).to(dtype)) for key in ROWS]
        return [bad, is_right, reader.images.value("epoch"), reader.images.extra, sorted(reader.images._opened)]

    found = run_readers(tmp_path, body)
    assert found == [[[], [True, True], 3, {"by": 0}, here] for here in ([0], [1], [])]


def test_a_few_rows_of_a_chunk_are_read_with_the_blocks_that_they_lie_in_and_no_others(tmp_path: Path) -> None:
    """Four rows share a checksum. A byte behind those blocks is wrong, and nobody notices."""

    def body(reader: Reader) -> Any:
        rows = torch.zeros(6, 4)
        chunk = parts_of(1)[0]
        wanted = {chunk.index: [LoadTarget((3, 0), (6, 4), rows)]}
        ranges = reader.images.plan_reads(wanted).requested_ranges()
        nothing = LoadTarget((0, 0), (0, 4), torch.zeros(0, 4))
        bad = reader.read({"w": [nothing, LoadTarget((3, 0), (6, 4), rows)]})
        return [bad, torch.equal(rows, content("w")[ROWS["w"][0] + 3 :][:6]), ranges]

    number = next(at for at, chunk in enumerate(plan_of(["a", "b"]).chunks) if chunk == parts_of(1)[0])
    pieces = [[number, 0, SMALL], [number, SMALL, 2 * SMALL], [number, 2 * SMALL, 3 * SMALL]]
    first, second, third = run_readers(tmp_path, body, {1: 3 * SMALL + 1})
    assert first == [[], True, {"1": pieces}]
    assert second == [[], True, {}]
    assert third == [[], True, {"1": pieces}]


@pytest.mark.parametrize("damages", [{1: 5}, {0: 16 * 30 - 1}, {0: 0, 1: 0}])
def test_all_ranks_learn_whose_image_is_damaged_wherever_it_was_read(tmp_path: Path, damages: dict[int, int]) -> None:
    def body(reader: Reader) -> Any:
        if reader.rank == 2:
            return reader.read(whole(torch.float64)[1])
        here, there = reader.rank, 1 - reader.rank
        _, targets = whole(torch.float32)
        # The two that have an image read that of the other.
        kept = {key: [target for target in of_ranks] for key, of_ranks in targets.items()}
        for of_ranks in kept.values():
            of_ranks[here] = LoadTarget((0, 0), (0, 4), torch.zeros(0, 4))
            assert of_ranks[there].tensor.numel()
        return reader.read(kept)

    assert run_readers(tmp_path, body, damages) == [[[rank, True] for rank in damages]] * RANKS
