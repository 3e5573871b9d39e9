"""What every rank makes of the images on all nodes: which checkpoints there are, and which of their images belong together."""

from __future__ import annotations

from elastipod.checkpoint.image_inventory import (
    ImageInfo,
    ImageInventory,
    NodeImages,
    list_local_images,
    merge_inventories,
)
from elastipod.checkpoint.manifest import CheckpointId


def checkpoint(step: int, generation: int = 1) -> CheckpointId:
    return CheckpointId(step=step, generation=generation)


def image(
    rank: int, of: CheckpointId, plan: str = "p", *, node: str = "a", durable: CheckpointId | None = None
) -> ImageInfo:
    return ImageInfo(node, of, rank, 0, plan, durable)


def inventory(*found: ImageInfo, nodes: tuple[str, ...] = ("a", "b")) -> ImageInventory:
    return ImageInventory(nodes, found)


NEW, OLD = checkpoint(8, 2), checkpoint(4)


def test_images_of_a_checkpoint_are_those_of_the_plan_that_most_have() -> None:
    images = [image(0, NEW, "x"), image(1, NEW, "y"), image(2, NEW, "y"), image(0, OLD, "x"), image(1, OLD, "x")]
    assert inventory(*images).images(NEW) == [images[1], images[2]]
    assert inventory(*images).images(OLD) == images[3:]
    assert inventory(*images).images(checkpoint(5)) == []


def test_candidates_are_of_earlier_generations_the_newest_first() -> None:
    third = checkpoint(9, 3)
    found = inventory(image(0, OLD), image(0, NEW), image(1, NEW), image(0, third))
    assert found.candidates(before=4) == sorted([OLD, NEW, third], reverse=True)
    assert found.candidates(before=3) == sorted([OLD, NEW], reverse=True)
    assert found.candidates(before=2) == [OLD]
    assert found.candidates(before=1) == []


def test_a_durable_checkpoint_that_is_gone_since_was_rolled_back_by_hand() -> None:
    older, newer = checkpoint(2), checkpoint(3)
    found = inventory(image(0, NEW, durable=older), image(1, NEW, durable=newer), image(2, NEW), image(0, OLD))
    assert found.durable_checkpoint_of(NEW) == newer
    assert found.durable_checkpoint_of(OLD) is None
    assert found.durable_was_deleted(NEW, {older})
    assert not found.durable_was_deleted(NEW, {older, newer})
    assert not found.durable_was_deleted(OLD, set()), "there was none"


def test_what_a_later_run_wrote_of_an_image_is_the_image_in_storage() -> None:
    written = checkpoint(8, 5)
    found = inventory(image(0, NEW), image(1, NEW, durable=written), image(0, OLD, durable=checkpoint(2)))
    assert (found.is_durable(NEW), found.written_as(NEW)) == (True, written)
    assert (found.is_durable(OLD), found.written_as(OLD)) == (False, OLD)
    itself = inventory(image(0, NEW, durable=NEW))
    assert (itself.is_durable(NEW), itself.written_as(NEW)) == (True, NEW)
    for other in (checkpoint(8, 1), checkpoint(9, 3), None):
        assert not inventory(image(0, NEW, durable=other)).is_durable(NEW), "another state, or another step"
        assert inventory(image(0, NEW, durable=other)).written_as(NEW) == NEW


def test_bad_images_are_left_out_and_no_others() -> None:
    images = [image(0, NEW), image(1, NEW), image(0, NEW, node="b")]
    assert inventory(*images).without({images[1]}).found == (images[0], images[2])
    assert inventory(*images).without({images[1]}).nodes == ("a", "b")


def test_inventories_of_ranks_on_one_node_are_merged_once() -> None:
    on_a, on_b = (image(0, NEW), image(1, NEW)), (image(0, NEW, node="b"),)
    merged = merge_inventories([NodeImages("a", on_a), NodeImages("b", on_b), NodeImages("a", on_a), NodeImages()])
    assert merged == ImageInventory(("a", "b", "a", ""), (*on_a, *on_b))
    assert (merged.ranks_on("a"), merged.ranks_on("b"), merged.ranks_on("c")) == ([0, 2], [1], [])
    assert list_local_images(None) == NodeImages("", ())
