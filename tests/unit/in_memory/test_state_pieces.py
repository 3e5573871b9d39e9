"""How the state is divided among donors: every byte once, evenly."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.nonempty import every
from torch import nn

from elastipod.in_memory.members import Members, TensorShape
from elastipod.in_memory.state_transfer import pieces, put_back

SIZES = st.lists(st.integers(0, 300), max_size=20)


@given(
    SIZES,
    st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True),
    st.integers(8, 100),
    st.sampled_from([1, 30, 1000]),
)
def test_every_byte_travels_once_and_donors_share_the_work(
    lengths: list[int], donors: list[int], size: int, alone: int
) -> None:
    shapes = [TensorShape(f"t{at}", "uint8", (length,)) for at, length in enumerate(lengths)]
    found = list(pieces(shapes, donors, size, alone))
    for shape in shapes:
        spans = [span for piece in found for span in piece.spans if span.key == shape.key]
        assert [byte for span in spans for byte in range(span.start, span.stop)] == list(range(shape.num_bytes))
    assert {piece.donor for piece in found} <= set(donors)
    if any(lengths):
        assert every(0 < sum(span.stop - span.start for span in piece.spans) <= size for piece in found)
    sent = Counter(dict.fromkeys(donors, 0))
    for piece in found:
        num_bytes = [span.stop - span.start for span in piece.spans]
        assert len(num_bytes) == 1 or max(num_bytes) < alone, "what is large is not copied"
        sent[piece.donor] += sum(num_bytes)
    assert max(sent.values()) - min(sent.values()) <= size


def test_an_image_is_put_back_into_live_tensors_and_into_new_ones_where_there_are_none() -> None:
    """An optimizer has no state before its first step, or none any more."""

    def built() -> Members:
        torch.manual_seed(1)
        model = nn.Linear(3, 2)
        return Members({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)})

    trained, fresh, told = built(), built(), list[int]()
    trained.model(torch.ones(1, 3)).sum().backward()
    optimizer: Any = dict(trained.items())["optimizer"]
    optimizer.step()
    image = trained.content().copied(lambda: None)
    live = fresh.content().tensors
    found = put_back(fresh, image, lambda: told.append(1))
    assert found.tensors.keys() == image.tensors.keys() > live.keys()
    assert every(torch.equal(found.tensors[key], each) for key, each in image.tensors.items())
    assert every(found.tensors[key].data_ptr() == each.data_ptr() for key, each in live.items()), "in place"
    assert len(told) == len(image.tensors)
