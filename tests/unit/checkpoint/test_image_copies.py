"""The copies of images on other nodes: who holds whose, in three ranks with a node each, and what becomes of one that cannot be held."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.free_ports import free_port
from tests.unit.checkpoint.save_plans import make_save_plan
from tests.unit.in_memory.forked_ranks import run_ranks, world

from elastipod.checkpoint import image_copies
from elastipod.checkpoint.communicator import Communicator
from elastipod.checkpoint.image import MappedImage
from elastipod.checkpoint.image_copies import ImageCopies
from elastipod.checkpoint.image_header import ImageHeader
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.memory_directory import MemoryDirectory
from elastipod.checkpoint.save_plan import Chunk, LocalState, SavePlan

LENGTHS = (40, 20, 10)  # of each rank's shard, so that no image is as long as another
RANKS = len(LENGTHS)
HOLDER_OF = {0: 1, 1: 2, 2: 0}


def plan_of(lengths: tuple[int, ...], *, alike: int = 0, nodes: str = "abc") -> SavePlan:
    """Cut a tensor over three ranks. alike: elements of a tensor that all of them hold. nodes: their names, by rank."""
    total, start, states = sum(lengths), 0, []
    for rank, length in enumerate(lengths):
        chunks = [Chunk("w", ("w",), "float32", (total,), (start,), (length,), 4 * length)] if length else []
        chunks += [Chunk("b", ("b",), "float32", (alike,), (0,), (alike,), 4 * alike)] if alike else []
        states.append(LocalState(nodes[rank], tuple(chunks), ()))
        start += length
    return make_save_plan(states, is_in_memory=True)


class Node:
    """One rank with memory of its own; `save` exchanges images of which each byte tells the rank and the step."""

    def __init__(self, root: Path, rank: int, comm: Communicator) -> None:
        self.rank, self.comm = rank, comm
        self.directory = MemoryDirectory(root / f"n{rank}", "job")
        self.copies = ImageCopies(self.directory)

    def save(self, step: int, plan: SavePlan) -> None:
        positions, size = plan.layout(self.rank)
        with MappedImage.create(None, size) as image:
            image.bytes.fill_(10 * step + self.rank)
            sums = image.sums((plan.chunks[number], at) for number, at in positions.items())
            header = ImageHeader(
                CheckpointId(step, 1), self.rank, 0, RANKS, plan.digest, size, sums, None, {}, {"step": step}
            )
            holders = self.copies.holders(plan, [""] * RANKS)
            self.copies.exchange_images(plan, holders, image, header, self.comm)

    def found(self) -> list[Any]:
        """What a later process finds here: of each image the rank, the step, the length, the bytes that occur in it, and its plan."""
        images: list[Any] = []
        for header in self.directory.headers():
            plan = self.directory.plan(header.plan)
            assert plan is not None
            positions, _ = plan.layout(header.rank)
            with self.directory.open(header) as image:
                assert image.sums((plan.chunks[number], at) for number, at in positions.items()) == header.sums
                images.append(
                    [header.rank, header.id.step, header.size, sorted(set(image.bytes[: header.size].tolist()))]
                )
                assert header.extra == {"step": header.id.step}
        return images


def run_nodes(root: Path, body: Callable[[Node], Any]) -> list[Any]:
    port = free_port()

    def rank_body(rank: int) -> Any:
        with world(rank, RANKS, port):
            comm = Communicator()
            comm.connect("copies")
            return body(Node(root, rank, comm))

    return run_ranks(RANKS, rank_body)


def test_each_node_holds_the_newest_image_of_another_in_the_same_memory(tmp_path: Path) -> None:
    plan = plan_of(LENGTHS)

    def body(node: Node) -> Any:
        seen: list[Any] = []
        for step in (1, 2):
            node.save(step, plan)
            (name,) = node.copies.names()
            seen.append([node.found(), sorted(node.copies.held_by.items())])
            seen[-1].append(os.stat(node.directory.path / f"{name}.bin").st_ino)
        node.copies.close()
        return [*seen, node.copies.names(), len(node.found())]

    sizes = plan.image_sizes()
    assert len(set(sizes)) == RANKS
    for rank, (first, second, names, left) in enumerate(run_nodes(tmp_path, body)):
        (source,) = [each for each, holder in HOLDER_OF.items() if holder == rank]
        for step, (found, held_by, _) in ((1, first), (2, second)):
            assert found == [[source, step, sizes[source], [10 * step + source]]]
            assert dict(held_by) == HOLDER_OF
        assert first[2] == second[2], "the memory is used again"
        assert (names, left) == ([], 1), "the image outlives the process that holds it"


def test_copies_of_what_is_withdrawn_are_withdrawn_and_their_memory_is_used_again(tmp_path: Path) -> None:
    plan = plan_of(LENGTHS)

    def body(node: Node) -> Any:
        node.save(1, plan)
        found: list[Any] = []
        for step in (2, 1):
            node.copies.withdraw_where(lambda header, step=step: header.id.step >= step)  # type: ignore[misc]
            found.append([len(node.found()), len(node.copies.names())])
        node.save(2, plan)
        return [*found, [each[1] for each in node.found()]]

    assert run_nodes(tmp_path, body) == [[[1, 1], [0, 1], [2]]] * RANKS


def test_a_node_holds_the_images_of_all_ranks_of_another(tmp_path: Path) -> None:
    """Of the second checkpoint one image is as large as before and one is larger."""

    def body(node: Node) -> Any:
        for step, lengths in enumerate([LENGTHS, (40, 60, 10)], start=1):
            node.save(step, plan_of(lengths, nodes="aab"))
        return [sorted(each[:3] for each in node.found()), sorted(node.copies.held_by.items())]

    first, second, holder = run_nodes(tmp_path, body)
    sizes, held_by = plan_of((40, 60, 10), nodes="aab").image_sizes(), [[0, 2], [1, 2], [2, 0]]
    assert holder == [[[0, 2, sizes[0]], [1, 2, sizes[1]]], held_by]
    assert (first, second) == ([[[2, 2, sizes[2]]], held_by], [[], held_by])


def test_only_what_no_other_node_has_is_copied(tmp_path: Path) -> None:
    plan = plan_of((12, 0, 0), alike=8)

    def body(node: Node) -> Any:
        node.save(1, plan)
        return [node.found(), sorted(node.copies.held_by.items())]

    holds = [[0, 1, plan.image_sizes()[0], [10]]]
    assert run_nodes(tmp_path, body) == [[[], [[0, 1]]], [holds, [[0, 1]]], [[], [[0, 1]]]]


@pytest.mark.parametrize("cause", ["a limit", "a full disk"])
def test_a_node_without_room_holds_no_copy_and_the_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its copy of the step before is gone as well: it would be overwritten. What is as large as before needs no more room."""
    plan, larger = plan_of(LENGTHS), plan_of((400, 20, 10))
    caplog.set_level(logging.WARNING)

    create = MappedImage.create

    def on_a_full_disk(path: Path | None, size: int) -> MappedImage:
        if path is not None:
            raise OSError("no room")
        return create(path, size)

    def body(node: Node) -> Any:
        node.save(1, plan)
        if cause == "a limit":
            asked: list[Any] = []

            def find_shortage(demands: list[Any]) -> str | None:
                asked.extend(demands)
                return "no room" if node.rank == 1 else None

            monkeypatch.setattr(image_copies, "find_shortage", find_shortage)
        elif node.rank == 1:
            monkeypatch.setattr(MappedImage, "create", on_a_full_disk)
        node.save(2, larger)
        if cause == "a limit":
            assert [each.size for each in asked] == ([larger.image_sizes()[0]] if node.rank == 1 else [])
            replaces = [bool(each.limits) and each.replaced >= plan.image_sizes()[0] for each in asked]
            assert replaces == [True] * len(asked)
        # The image that was withdrawn does not come back by that.
        node.copies.note_durable(CheckpointId(1, 1))
        return [
            [each[:3] for each in node.found()],
            sorted(node.copies.held_by.items()),
            [each.getMessage() for each in caplog.records],
        ]

    sizes, held_by = larger.image_sizes(), [[1, 2], [2, 0]]
    says = "there is not enough memory here for a copy of rank 0's image: "
    first, second, third = run_nodes(tmp_path, body)
    assert first == [[[2, 2, sizes[2]]], held_by, []]
    assert third == [[[1, 2, sizes[1]]], held_by, []]
    assert second[:2] == [[], held_by]
    assert second[2] == [says + ("[Errno 28] no room" if cause == "a limit" else "no room")]


def test_a_copy_that_cannot_be_published_is_dropped_with_a_warning_and_counts_on_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("read-only")

    def body(node: Node) -> Any:
        if node.rank == 2:
            monkeypatch.setattr(MemoryDirectory, "publish", refuse)
        node.save(1, plan_of(LENGTHS))
        held_by = sorted(node.copies.held_by.items())
        return [len(node.found()), held_by, [each.getMessage() for each in caplog.records]]

    said = ["the copy of rank 1's image is not kept: read-only"]
    held_by = [[0, 1], [2, 0]]
    assert run_nodes(tmp_path, body) == [[1, held_by, []], [1, held_by, []], [0, held_by, said]]


def test_copies_know_of_the_durable_checkpoint_and_are_forgotten_by_theirs(tmp_path: Path) -> None:
    def body(node: Node) -> Any:
        node.save(2, plan_of(LENGTHS))
        seen: list[Any] = []
        for step, save, durable in ((3, 0, 1), (2, 5, 2), (2, 0, 3)):
            node.copies.forget(CheckpointId(step, 1), save)
            node.copies.note_durable(CheckpointId(durable, 1))
            seen += [header.durable and header.durable.step for header in node.directory.headers()]
        return seen

    assert run_nodes(tmp_path, body) == [[1, 2, 2]] * RANKS
