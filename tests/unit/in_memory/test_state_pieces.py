"""How the state is divided among donors: every byte once, evenly."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from tests.nonempty import every

from elastipod.in_memory.members import TensorShape
from elastipod.in_memory.state_transfer import pieces

SIZES = st.lists(st.integers(0, 300), max_size=20)


@given(SIZES, st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), st.integers(8, 100))
def test_every_byte_travels_once_and_donors_share_the_work(lengths: list[int], donors: list[int], size: int) -> None:
    shapes = [TensorShape(f"t{at}", "uint8", (length,)) for at, length in enumerate(lengths)]
    found = list(pieces(shapes, donors, size))
    for shape in shapes:
        spans = [span for piece in found for span in piece.spans if span.key == shape.key]
        assert [byte for span in spans for byte in range(span.start, span.stop)] == list(range(shape.num_bytes))
    assert {piece.donor for piece in found} <= set(donors)
    if any(lengths):
        assert every(0 < sum(span.stop - span.start for span in piece.spans) <= size for piece in found)
    counts = Counter(piece.donor for piece in found)
    assert max(counts.values(), default=0) - min((counts[donor] for donor in donors), default=0) <= 1
