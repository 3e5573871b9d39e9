"""Offers on the wire: what one rank sends, the others read; nothing else gets through."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastipod.in_memory.offer_wire import MAX_OFFER_BYTES, BadOffer, RankData, RankOffer, decode_offer, encode_offer
from elastipod.in_memory.offers import Offer

COUNTS = st.integers(0, 1 << 40)
PARTS = st.frozensets(st.integers(0, 50), max_size=8)


@given(
    PARTS,
    st.none() | COUNTS,
    st.booleans(),
    st.dictionaries(COUNTS, PARTS, max_size=4),
    COUNTS,
    st.none() | COUNTS,
    st.builds(RankData, st.text(max_size=8), st.dictionaries(COUNTS, COUNTS, max_size=6)),
)
def test_an_offer_arrives_as_it_was_sent(
    parts: frozenset[int],
    completed: int | None,
    is_prepared: bool,
    images: dict[int, frozenset[int]],
    origin: int,
    followed: int | None,
    data: RankData,
) -> None:
    offer = RankOffer(Offer(parts, completed, is_prepared, images), origin, followed, data)
    assert decode_offer(encode_offer(offer)) == offer


GOOD = json.loads(encode_offer(RankOffer(Offer(frozenset({0}), 3), 1)))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("[]", id="no object"),
        pytest.param("{}", id="no fields"),
        pytest.param("[" * 5000, id="nested too deeply"),
        pytest.param(" " * (MAX_OFFER_BYTES + 1), id="too long"),
        *(
            pytest.param(json.dumps({**GOOD, name: value}), id=f"{name} is {value!r}"[:40])
            for name, value in [
                ("v", 1),
                ("parts", 7),
                ("parts", [-1]),
                ("parts", [True]),
                ("parts", [0] * 5000),
                ("completed", "3"),
                ("completed", -1),
                ("images", [1]),
                ("images", {"x": [0]}),
                ("images", {str(step): [0] for step in range(17)}),
                ("samples", {"x": 0}),
                ("followed", "3"),
                ("origin", None),
                ("origin", 1 << 63),
            ]
        ),
    ],
)
def test_whatever_is_no_offer_is_refused_with_a_sentence(text: Any) -> None:
    with pytest.raises(BadOffer):
        decode_offer(text)
