"""Reading from images: any box of any chunk gets to its place, every byte of it is verified, and no more than is needed is read."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.nonempty import every
from tests.unit.checkpoint.save_plans import make_save_plan

from elastipod.checkpoint import chunk_read, image, image_source, mapped_memory
from elastipod.checkpoint.chunk_read import chunk_reads, copy_and_verify, verify_stream
from elastipod.checkpoint.communicator import Communicator
from elastipod.checkpoint.image import MappedImage, checksum
from elastipod.checkpoint.image_header import ImageHeader
from elastipod.checkpoint.image_inventory import ImageInfo, ImageInventory, list_local_images, merge_inventories
from elastipod.checkpoint.image_source import ImageSource, disagreeing_ranks
from elastipod.checkpoint.load_plan import LoadTarget
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.memory_directory import MemoryDirectory
from elastipod.checkpoint.open_images import open_images
from elastipod.checkpoint.save_plan import Chunk, LocalState

SMALL = 64  # bytes of a stretch here


@pytest.fixture(autouse=True, scope="module")
def small_checksum_blocks() -> object:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(image, "CHECKSUM_BLOCK", SMALL)
        patched.setattr(image_source, "CHECKSUM_BLOCK", SMALL)
        patched.setattr(chunk_read, "CHECKSUM_BLOCK", SMALL)
        yield


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Chunk, torch.Tensor, LoadTarget, torch.Tensor]:
    """Give a chunk with its bytes, a part of it, and what the part's tensor must hold afterwards."""
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.uint8]))
    sizes = tuple(draw(st.lists(st.integers(1, 24), max_size=3)))
    starts = tuple(draw(st.integers(0, size - 1)) for size in sizes)
    lengths = tuple(draw(st.integers(1, size - start)) for size, start in zip(sizes, starts, strict=True))
    if draw(st.booleans()):  # as sharding over the first dimension has it
        starts, lengths = (*starts[:1], *(0 for _ in sizes[1:])), (*lengths[:1], *sizes[1:])
    content = torch.arange(math.prod(sizes), dtype=torch.float64).remainder(251).to(dtype).reshape(sizes)
    wanted = content
    for dim, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        wanted = wanted.narrow(dim, start, length)
    way = draw(st.sampled_from(["as it is", "elsewhere in memory", "strided", "another type"]))
    target_dtype = torch.float16 if way == "another type" else dtype
    before = draw(st.integers(0, 9)) if way == "elsewhere in memory" else 0
    room = torch.zeros(before + math.prod(lengths), dtype=target_dtype)
    target = room[before:].reshape(lengths)
    if way == "strided" and lengths:
        target = torch.zeros((*lengths[:-1], 2 * lengths[-1]), dtype=target_dtype)[..., ::2]
    name = str(dtype).removeprefix("torch.")
    chunk = Chunk("w", ("w",), name, sizes, (0,) * len(sizes), sizes, content.numel() * content.element_size())
    return chunk, content.reshape(-1).view(torch.uint8), LoadTarget(starts, lengths, target), wanted.to(target_dtype)


def sums_of(raw: torch.Tensor) -> list[int]:
    return [checksum(raw[at : at + SMALL]) for at in range(0, len(raw), SMALL)]


@given(boxes(), st.data())
def test_a_part_is_copied_and_a_wrong_sum_is_seen(
    box: tuple[Chunk, torch.Tensor, LoadTarget, torch.Tensor], data: st.DataObject
) -> None:
    chunk, raw, part, wanted = box
    sums = sums_of(raw)
    assert copy_and_verify(raw, chunk, part, sums)
    assert torch.equal(part.tensor, wanted)
    first, last = part.byte_range(chunk)
    damaged = data.draw(st.integers(0, len(sums) - 1))
    sums[damaged] += 1
    is_needed = first // SMALL <= damaged <= (last - 1) // SMALL
    assert copy_and_verify(raw, chunk, part, sums) is not is_needed, "what is not needed is not looked at"


@given(boxes(), st.integers(1, 9), st.booleans())
def test_a_part_comes_from_another_rank(
    box: tuple[Chunk, torch.Tensor, LoadTarget, torch.Tensor], block: int, is_damaged: bool
) -> None:
    chunk, raw, part, wanted = box
    sums = sums_of(raw)
    said: list[bool] = []
    needed: set[int] = set()
    for piece in chunk_reads(0, chunk, part):
        checksum_blocks = range(piece.start // SMALL, -(-piece.end // SMALL))
        assert piece.start % SMALL == 0
        assert needed.isdisjoint(checksum_blocks), "nothing travels twice"
        needed.update(checksum_blocks)
        room = piece.buffer()
        assert (room.numel(), len(checksum_blocks)) == (piece.end - piece.start, piece.num_checksum_blocks)
        expected = [sums[each] + is_damaged for each in checksum_blocks]

        def at_end(is_right: bool, piece: chunk_read.ChunkRead = piece) -> None:
            said.append(is_right)
            piece.copy_from_buffer()

        arrived = verify_stream(piece.end - piece.start, lambda expected=expected: expected, at_end)  # type: ignore[misc]
        for start in range(piece.start, piece.end, 8 * block):
            here = room[start - piece.start : min(start + 8 * block, piece.end) - piece.start]
            arrived(here.copy_(raw[start : start + here.numel()]))
    assert torch.equal(part.tensor, wanted)
    assert said == [not is_damaged] * len(said)
    first, last = part.byte_range(chunk)
    assert needed == set(range(first // SMALL, (last - 1) // SMALL + 1))


@pytest.mark.parametrize("large_pages", ["given", "refused", "slow", "unknown"])
def test_an_image_can_be_written_and_read_whatever_pages_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large_pages: str
) -> None:
    asked: list[int] = []

    def collapse(self: mapped_memory.MappedMemory, start: int, length: int) -> bool:
        asked.append(start)
        return large_pages != "refused"

    monkeypatch.setattr(mapped_memory, "large_page_bytes", lambda: 0 if large_pages == "unknown" else 8192)
    monkeypatch.setattr(mapped_memory.MappedMemory, "collapse", collapse)
    monkeypatch.setattr(mapped_memory, "_PAGES_PER_CALL", 2)
    monkeypatch.setattr(mapped_memory, "_MAX_S_PER_PAGE", -1.0 if large_pages == "slow" else 60.0)
    size = 5 * 8192 + 100
    with MappedImage.create(tmp_path / "image", size) as made:
        assert not made.bytes.any()
        made.bytes.copy_(torch.arange(size) % 251)
    assert asked == {"given": [0, 16384, 32768], "refused": [0], "slow": [0], "unknown": []}[large_pages]
    assert os.stat(tmp_path / "image").st_blocks * 512 >= size, "a full file system has said so by now"
    with MappedImage.open(tmp_path / "image", size) as found:
        assert torch.equal(found.bytes, (torch.arange(size) % 251).to(torch.uint8))
        assert large_pages == "unknown" or found.bytes.data_ptr() % 8192 == 0


def test_memory_lives_as_long_as_what_uses_it(tmp_path: Path) -> None:
    part = MappedImage.create(tmp_path / "image", 1 << 16).bytes[100:200]
    assert part.fill_(7).sum() == 700
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    del part
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(
    ("there", "here", "asked"),
    [
        pytest.param([("a", 0), ("b", 1), ("a", 1), ("b", 0)], [0, 1], {}, id="a node that keeps copies asks nobody"),
        pytest.param([("a", 0), ("b", 1)], [0], {1: 1}, id="what is elsewhere is asked for there"),
        pytest.param([("b", 1), ("b", 0)], [], {1: 2}, id="a node without memory asks for all"),
    ],
)
def test_what_the_node_has_does_not_travel(
    there: list[tuple[str, int]], here: list[int], asked: dict[int, int]
) -> None:
    chunks = [Chunk("w", ("w",), "float32", (8, 4), (4 * half, 0), (4, 4), 64) for half in range(2)]
    plan = make_save_plan(
        [LocalState(node, (own,), ()) for node, own in zip("ab", chunks, strict=True)], is_in_memory=True
    )
    found = tuple(ImageInfo(node, CheckpointId(1, 1), rank, 0, plan.digest) for node, rank in there)
    images = ImageSource(plan, found, ImageInventory(("a", "b"), found), {}, {}, {})
    wanted = {chunk.index: [LoadTarget((0, 0), (4, 4), torch.zeros(4, 4))] for chunk in chunks}
    read_plan = images.plan_reads(wanted)
    assert [saved_rank for saved_rank, _, _ in read_plan.local] == here
    assert {donor: len(pieces) for donor, pieces in read_plan.requests.items()} == asked


def test_another_step_that_took_an_images_place_meanwhile_is_not_read_for_it(tmp_path: Path) -> None:
    """As a replaced generation may do that has not noticed yet."""
    directory = MemoryDirectory(tmp_path, "job")
    chunk = Chunk("w", ("w",), "uint8", (8,), (0,), (8,), 8)
    plan = make_save_plan([LocalState(directory.node(), (chunk,), ())], is_in_memory=True)
    header = ImageHeader(CheckpointId(1, 1), 0, 0, 1, plan.digest, 8, "0" * 16, None, {}, {})
    directory.store_plan(plan)
    directory.publish(header)
    MappedImage.create(directory.path / f"{header.name}.bin", 8).close()
    inventory = merge_inventories([list_local_images(directory)])
    images = open_images(directory, inventory, header.id, Communicator())
    assert images is not None
    images.close().join()
    directory.publish(replace(header, id=CheckpointId(2, 1)))
    assert open_images(directory, inventory, header.id, Communicator()) is None


@given(st.dictionaries(st.integers(0, 9), st.sampled_from("abc"), min_size=1))
def test_replicas_agree_by_majority_or_not_at_all(votes: dict[int, str]) -> None:
    left_out = disagreeing_ranks(votes)
    kept = {vote for rank, vote in votes.items() if rank not in left_out}
    assert len(kept) <= 1
    if kept:
        assert 2 * (len(votes) - len(left_out)) > len(votes)
        assert not any(votes[rank] in kept for rank in left_out)
    else:
        assert every(2 * list(votes.values()).count(vote) <= len(votes) for vote in votes.values())
