"""What two ranks send each other is divided alike on both sides, whatever its sizes, and arrives whole and in order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastipod.checkpoint import transfer_blocks
from elastipod.checkpoint.transfer_blocks import blocks_to_receive, blocks_to_send

SIZES = st.lists(st.integers(0, 60), max_size=20)


@given(SIZES, st.integers(1, 20), st.integers(0, 30), st.integers(1, 40))
def test_both_sides_have_the_same_blocks(sizes: list[int], block: int, small: int, together: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"BLOCK_BYTES": block, "SMALL_BYTES": small, "TOGETHER_BYTES": together}.items():
            patch.setattr(transfer_blocks, name, value)
        sent = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
        received = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        told: list[tuple[int, torch.Tensor]] = []
        wanted = [(each, lambda part, at=at: told.append((at, part.clone()))) for at, each in enumerate(received)]
        on_their_way = list(blocks_to_send(sent))
        arriving = list(blocks_to_receive(wanted))
        assert [len(each) for each in on_their_way] == [len(data) for data, _ in arriving]
        for data, (place, on_block) in zip(on_their_way, arriving, strict=True):
            place.copy_(data)
            assert on_block is not None
            on_block(place)
    assert all(map(torch.equal, received, sent))
    assert [at for at, _ in told] == sorted(at for at, _ in told), "in order"
    for at, whole in enumerate(sent):
        parts = [part for number, part in told if number == at]
        assert torch.equal(torch.cat([whole[:0], *parts]), whole), "each is told of what has arrived of it"


def test_neighbours_that_are_small_travel_together_and_others_alone() -> None:
    large, small = transfer_blocks.SMALL_BYTES + 1, transfer_blocks.SMALL_BYTES
    sizes = [8, 100, large, 8, *5 * [small], transfer_blocks.BLOCK_BYTES + 1]
    buffers = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    blocks = list(blocks_to_send(buffers))
    together = [8 + 3 * small, 2 * small]
    assert [len(each) for each in blocks] == [108, large, *together, transfer_blocks.BLOCK_BYTES, 1]
    assert blocks[1].data_ptr() == buffers[2].data_ptr(), "nothing is copied that travels alone"
    place, on_block = next(blocks_to_receive([(buffers[0], None)]))
    assert (place.data_ptr(), on_block) == (buffers[0].data_ptr(), None)


def test_a_block_of_buffers_that_nobody_asks_about_is_laid_into_them() -> None:
    buffers = [torch.zeros(2, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)]
    ((place, on_block),) = blocks_to_receive((each, None) for each in buffers)
    place.copy_(torch.tensor([1, 2, 3], dtype=torch.uint8))
    assert on_block is not None
    on_block(place)
    assert [each.tolist() for each in buffers] == [[1, 2], [3]]
