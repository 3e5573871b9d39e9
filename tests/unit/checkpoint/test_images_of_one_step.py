"""The images of one checkpoint: what each rank tells of its node's, what is made of all answers, and who reads what from whom."""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.checkpoint.save_plans import make_save_plan

from elastipod.checkpoint import image_source
from elastipod.checkpoint.chunk_read import ChunkRead
from elastipod.checkpoint.communicator import Communicator
from elastipod.checkpoint.image import MappedImage
from elastipod.checkpoint.image_header import ImageHeader, image_name
from elastipod.checkpoint.image_inventory import ImageInfo, ImageInventory, list_local_images, merge_inventories
from elastipod.checkpoint.image_source import ImageSource, OpenImage, _digest, disagreeing_ranks
from elastipod.checkpoint.load_plan import LoadTarget
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.memory_directory import MemoryDirectory
from elastipod.checkpoint.open_images import _common, _LocalImages, open_images
from elastipod.checkpoint.save_plan import Chunk, LocalState, SavePlan
from elastipod.json_records import encode

OF = CheckpointId(7, 2)
NODES = ("a", "b", "c")


def chunk(key: str, part: int | None = None) -> Chunk:
    """A tensor of 8 bytes, or one of three parts of a tensor of 24."""
    shape, offset = ((8,), 0) if part is None else ((24,), 8 * part)
    return Chunk(key, (key,), "uint8", shape, (offset,), (8,), 8)


def plan_of(nodes: tuple[str, ...] = NODES) -> SavePlan:
    """All hold `all`, `more` and `buffer`; the first two hold `two`; each has a part of `own`."""
    states = []
    for rank, node in enumerate(nodes):
        held = [chunk("own", rank), chunk("all"), *([chunk("two")] if rank < 2 else []), chunk("more"), chunk("buffer")]
        states.append(LocalState(node, tuple(held), ()))
    return make_save_plan(states, is_in_memory=True)


def source_of(plan: SavePlan, opened: dict[int, OpenImage], nodes: tuple[str, ...] = NODES, **more: Any) -> ImageSource:
    found = tuple(ImageInfo(node, OF, rank, 1, plan.digest) for rank, node in enumerate(NODES))
    return ImageSource(plan, found, ImageInventory(nodes, found), opened, {"v": '"x"'}, {"e": 1}, **more)


def number_of(plan: SavePlan, key: str, offset: int = 0) -> int:
    return next(number for number, each in enumerate(plan.chunks) if (each.key, each.offsets) == (key, (offset,)))


def test_replicas_tell_a_digest_of_each_group_of_ranks() -> None:
    plan = plan_of()
    image = MappedImage.create(None, 8)
    opened = {
        rank: OpenImage(image, {}, {number: [number, rank] for number in range(len(plan.chunks))}) for rank in (2, 0)
    }
    every, more, two, buffer = (number_of(plan, key) for key in ("all", "more", "two", "buffer"))

    def told(rank: int, *numbers: int) -> str:
        return _digest([[number, rank] for number in sorted(numbers)])

    source = source_of(plan, opened)
    groups = sorted([[every, more], [two]])  # in the order in which chunks are numbered
    of_all, of_two = groups.index([every, more]), groups.index([two])
    rank_0 = {of_all: told(0, every, more), of_two: told(0, two)}
    assert source.digests({"buffer"}) == [
        *(["a", 0, group, rank_0[group]] for group in (0, 1)),
        ["a", 2, of_all, told(2, every, more)],
    ]
    assert source.digests({"buffer", "all", "more", "two"}) == []
    assert ["a", 2, of_all, told(2, every, more, buffer)] in source.digests(set())


def test_what_differs_from_most_replicas_is_left_out_on_every_node_that_has_it() -> None:
    plan = plan_of()
    found = (
        *(ImageInfo(node, OF, rank, 1, plan.digest) for rank, node in enumerate(NODES)),
        ImageInfo("a", OF, 2, 1, plan.digest),  # a copy of rank 2's
    )
    source = ImageSource(plan, found, ImageInventory(NODES, found), {}, {}, {})
    answers = [
        [["a", 0, 0, "x"], ["a", 0, 1, "y"], ["a", 2, 0, "z"]],
        [["b", 1, 0, "x"], ["b", 1, 1, "y"]],
        [["c", 2, 0, "z"]],
    ]
    assert source.disagreeing_images(answers) == {found[2], found[3]}
    answers[1][1][3] = "other"
    assert source.disagreeing_images(answers) == set(found)
    assert source.disagreeing_images([[], []]) == set()


@pytest.mark.parametrize(
    ("votes", "left_out"),
    [
        ({0: "a"}, set()),
        ({0: "a", 1: "b"}, {0, 1}),
        ({0: "a", 1: "b", 2: "a"}, {1}),
        ({0: "a", 1: "b", 2: "a", 3: "b"}, {0, 1, 2, 3}),
        ({0: "b", 1: "a", 2: "a", 3: "a"}, {0}),
    ],
)
def test_more_than_half_of_the_replicas_are_a_majority(votes: dict[int, str], left_out: set[int]) -> None:
    assert disagreeing_ranks(votes) == left_out


def test_what_a_source_says_of_itself() -> None:
    source = source_of(plan_of(), {}, wants_durable=True)
    assert (source.world_size, source.extra, source.wants_durable) == (3, {"e": 1}, True)
    assert source.names() == [image_name(2, rank, 1) for rank in range(3)]
    assert (source.has_value("v"), source.has_value("w"), source.value("v")) == (True, False, "x")
    assert source_of(plan_of(), {}).wants_durable is False
    assert sorted(source.metadata.state_dict_metadata) == ["all", "buffer", "more", "own", "two"]


def test_sums_that_a_header_lacks_are_zero() -> None:
    plan = plan_of()
    header = ImageHeader(OF, 2, 1, 3, plan.digest, 256, "00000000000000ff" + "0000000000000102", None, {}, {})
    image = MappedImage.create(None, 256)
    found = OpenImage.of(header, image, plan)
    positions = plan.layout(2)[0]
    assert (found.image, found.positions) == (image, positions)
    assert found.sums == dict(zip(positions, ([255], [258], [0], [0]), strict=True))


def test_a_part_that_others_have_is_asked_of_different_ranks() -> None:
    """There are two present ranks on node b; rank 0, which is on a node without images, asks."""
    plan = plan_of()
    source = source_of(plan, {}, nodes=("", "b", "c", "b", "a"))
    every, own = number_of(plan, "all"), number_of(plan, "own", 8)
    assert source._donor(own) == (1, 3)[own % 2]
    assert source._donor(every) == (4, 1, 3, 2)[every % 4]
    source._rank = 1
    assert source._donor(every) == (4, 1, 3, 2)[(every + 1) % 4]
    assert [source._saved_by(every, node) for node in ("a", "b", "c", "d")] == [0, 1, 2, None]
    target = LoadTarget((2,), (3,), torch.zeros(3, dtype=torch.uint8))
    nothing = LoadTarget((0,), (0,), torch.zeros(0, dtype=torch.uint8))
    wanted = {chunk("own", 1).index: [target, target], chunk("all").index: [nothing]}
    planned = source.plan_reads(wanted)
    donor = source._donor(own)
    assert (planned.local, planned.requested_ranges()) == ([], {donor: [[own, 0, 8]] * 2})
    here = source_of(plan, {}).plan_reads(wanted)
    assert here.local == [(0, every, nothing)]
    assert here.requested_ranges() == {1: [[own, 0, 8]] * 2}


def test_ranges_are_sent_behind_the_sums_of_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_source, "CHECKSUM_BLOCK", 4)
    plan = plan_of()
    positions, size = plan.layout(0)
    image = MappedImage.create(None, size)
    for number, at in positions.items():
        image.bytes[at : at + 8] = torch.arange(8) + 10 * number
    sums = {number: [2**64 - 1 - number, number] for number in positions}
    source = source_of(plan, {0: OpenImage(image, positions, sums)})
    every, own = number_of(plan, "all"), number_of(plan, "own")
    told, *raws = source._bytes_to_send([(every, 4, 7), (own, 0, 8)])
    assert bytes(told.tolist()) == struct.pack("<3Q", every, 2**64 - 1 - own, own)
    assert [raw.tolist() for raw in raws] == [
        [10 * every + at for at in range(4, 7)], [10 * own + at for at in range(8)],
    ]  # fmt: skip


def test_what_arrives_is_compared_with_the_sums_that_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from elastipod.checkpoint import chunk_read

    monkeypatch.setattr(chunk_read, "CHECKSUM_BLOCK", 8)
    plan = plan_of()
    source = source_of(plan, {})
    wanted = [torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)]
    numbers = [number_of(plan, "own", 8), number_of(plan, "all")]
    reads = [
        ChunkRead(number, 0, 8, plan.chunks[number], LoadTarget((0,), (8,), into), False)
        for number, into in zip(numbers, wanted, strict=True)
    ]
    bad: set[tuple[str, int]] = set()
    buffers = source._receive_buffers(1, reads, bad)
    sums, on_sums = next(buffers)
    assert (sums.numel(), on_sums) == (16, None)
    sent = [torch.arange(8, dtype=torch.uint8) + 200, torch.arange(8, dtype=torch.uint8)]
    words = [int.from_bytes(bytes(each.tolist()), "little") for each in sent]
    sums.copy_(torch.frombuffer(bytearray(struct.pack("<2Q", words[0], words[1] + 1)), dtype=torch.uint8))
    for content, (buffer, on_block) in zip(sent, buffers, strict=True):
        assert on_block is not None
        on_block(buffer.copy_(content))
    assert bad == {("b", 1)}
    assert [each.tolist() for each in wanted] == [sent[0].tolist(), [0] * 8]


@pytest.mark.parametrize(
    ("cpus", "on_node", "threads"), [(16, 1, 4), (4, 1, 4), (3, 1, 3), (8, 3, 2), (1, 1, 1), (2, 3, 1)]
)
def test_ranks_of_a_node_share_its_processors(
    monkeypatch: pytest.MonkeyPatch, cpus: int, on_node: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", {0: range(cpus)}.__getitem__)
    assert source_of(plan_of(), {}, nodes=("a",) * on_node + ("b",) * 2)._num_copy_threads() == threads


# -- opening -----------------------------------------------------------------------------------------------------------


def saved(root: Path, *, wants_durable: bool = False) -> tuple[MemoryDirectory, SavePlan, list[ImageInfo]]:
    """Two ranks' images of the same node."""
    directory = MemoryDirectory(root, "job")
    node = directory.node()
    states = [LocalState(node, (chunk("own", rank),), ()) for rank in range(2)]
    plan = make_save_plan(states, is_in_memory=True)
    directory.store_plan(plan)
    for rank in (1, 0):
        own = {"common": f'"{rank}"', f"of{rank}": "1"}
        header = ImageHeader(
            OF, rank, 0, 2, plan.digest, 64, "0" * 16, None, own, {"by": rank}, wants_durable and rank == 1
        )
        MappedImage.create(directory.path / f"{header.name}.bin", 64).close()
        directory.publish(header)
    return directory, plan, sorted(list_local_images(directory).found, key=lambda each: each.saved_rank)


def test_the_first_rank_of_a_node_tells_values_and_plan(tmp_path: Path) -> None:
    directory, plan, found = saved(tmp_path, wants_durable=True)
    inventory = merge_inventories([list_local_images(directory)])
    own = _LocalImages(directory, inventory, found)
    assert own.open() == {
        "missing": [],
        "values": [[0, {"common": '"0"', "of0": "1"}, {"by": 0}], [1, {"of1": "1"}, {}]],
        "plan": plan.to_json(),
        "wants_durable": True,
    }
    assert sorted(own.opened(plan)) == [0, 1]
    own.close()
    assert [image.bytes.numel() for _, image in own._open] == [0, 0]
    second = ImageInventory(("x", inventory.nodes[0]), inventory.found)
    assert _LocalImages(directory, second, found).open() == {
        "missing": [], "values": [], "plan": None, "wants_durable": False,
    }, "there is nothing on rank 0's node"  # fmt: skip
    assert _LocalImages(None, inventory, found).open() == {
        "missing": [], "values": [], "plan": None, "wants_durable": False,
    }  # fmt: skip


def test_another_rank_of_a_node_tells_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _, found = saved(tmp_path)
    node = directory.node()
    inventory = ImageInventory((node, node), tuple(found))
    own = _LocalImages(directory, inventory, found)
    own._is_first = own._tells_plan = False
    assert own.open() == {"missing": [], "values": [], "plan": None, "wants_durable": False}
    own.close()
    first = _LocalImages(directory, inventory, found)
    assert (first._is_first, first._tells_plan) == (True, True)
    elsewhere = [ImageInfo("x", OF, 3, 0, found[0].plan), *found]
    second = _LocalImages(directory, inventory, elsewhere)
    assert (second._is_first, second._tells_plan) == (True, False), "the plan is told where the first image is"


def test_missing_and_damaged_images_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory, _, found = saved(tmp_path)
    inventory = merge_inventories([list_local_images(directory)])
    broken = directory.path / f"{found[0].name}.bin"
    os.truncate(broken, 10)
    own = _LocalImages(directory, inventory, found)
    with caplog.at_level(logging.WARNING):
        told = own.open()
    own.close()
    assert (told["missing"], told["values"]) == ([encode(found[0])], [[1, {"common": '"1"', "of1": "1"}, {"by": 1}]])
    assert caplog.messages == [f"skipping a damaged image: {broken} cannot be read: it is cut short"]
    (directory.path / f"{found[1].name}.json").unlink()
    assert _LocalImages(directory, inventory, found[1:]).open()["missing"] == [encode(found[1])]


def test_the_answers_of_all_ranks_become_one() -> None:
    nothing: dict[str, Any] = {"missing": [], "values": [], "plan": None, "wants_durable": False}
    first = {"missing": [["x"]], "values": [[2, {"a": "2", "b": "2"}, {"by": 2}]], "plan": None, "wants_durable": False}
    second = {
        "missing": [["y"]],
        "values": [[1, {"a": "1"}, {"by": 1}], [10, {"a": "10", "c": "10"}, {}]],
        "plan": "p",
        "wants_durable": True,
    }
    assert _common([nothing, first, second, {**nothing, "plan": "q"}]) == {
        "missing": [["x"], ["y"]], "plan": "p", "values": {"a": "1", "b": "2", "c": "10"}, "extra": {"by": 1},
        "wants_durable": True,
    }  # fmt: skip
    assert _common([nothing]) == {"missing": [], "plan": None, "values": {}, "extra": {}, "wants_durable": False}


def test_images_are_opened_with_the_plan_of_a_node_that_has_it(tmp_path: Path) -> None:
    """The node of the first image is not there any more, and its plan neither."""
    directory, plan, found = saved(tmp_path, wants_durable=True)
    gone = ImageInfo("gone", OF, 0, 0, plan.digest)
    inventory = ImageInventory((directory.node(),), (gone, *found))
    images = open_images(directory, inventory, OF, Communicator())
    assert images is not None
    assert (images.extra, images.wants_durable, images.world_size) == ({"by": 0}, True, 2)
    assert (images.value("common"), images.value("of1")) == ("0", 1)
    assert images.names() == [found[0].name, found[1].name]
    assert images._inventory == ImageInventory((directory.node(),), tuple(found))
    images.close().join()
    assert open_images(directory, inventory.without({found[1]}), OF, Communicator()) is None, "half of the state"
    assert open_images(directory, inventory, CheckpointId(8, 2), Communicator()) is None
    assert open_images(None, inventory, OF, Communicator()) is None
