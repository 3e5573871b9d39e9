"""The text of an offer, and the largest and smallest that is taken."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elastipod.in_memory.offer_wire import MAX_OFFER_BYTES, BadOffer, RankData, RankOffer, decode_offer, encode_offer
from elastipod.in_memory.offers import Offer

OFFER = RankOffer(
    Offer(frozenset({9, 4}), 7, True, {6: frozenset({5, 2}), 5: frozenset()}), 3, 8, RankData("a0", {7: 84})
)
TEXT = (
    '{"v": 3, "parts": [4, 9], "completed": 7, "is_prepared": true, "images": {"6": [2, 5], "5": []}, "origin": 3, '
    '"followed": 8, "plan": "a0", "samples": {"7": 84}}'
)
NEWCOMER = {
    "v": 3, "parts": [], "completed": None, "is_prepared": False, "images": {}, "origin": 0, "followed": None, "plan": "",
    "samples": {},
}  # fmt: skip


def test_an_offer_is_this_text() -> None:
    assert encode_offer(OFFER) == TEXT
    assert decode_offer(TEXT) == OFFER
    assert encode_offer(RankOffer(Offer(), 0)) == json.dumps(NEWCOMER)
    assert decode_offer(json.dumps(NEWCOMER)) == RankOffer(Offer(), 0)


@pytest.mark.parametrize(
    "changed",
    [
        {"parts": list(range(4096))},
        {"images": {str(step): [] for step in range(16)}},
        {"samples": {str(step): 0 for step in range(18)}},
        {"completed": 0, "origin": (1 << 62) - 1},
    ],
    ids=["parts", "images", "samples", "numbers"],
)
def test_the_largest_offers_are_taken(changed: dict[str, Any]) -> None:
    found = decode_offer(json.dumps({**NEWCOMER, **changed}))
    assert json.loads(encode_offer(found)) == {**NEWCOMER, **changed}


def test_an_offer_may_have_so_many_bytes_and_no_more() -> None:
    text = json.dumps(NEWCOMER)
    assert decode_offer(text + " " * (MAX_OFFER_BYTES - len(text))) == RankOffer(Offer(), 0)
    with pytest.raises(BadOffer, match=r"^an offer has 65537 bytes; at most 65536 are taken$"):
        decode_offer(text + " " * (MAX_OFFER_BYTES - len(text) + 1))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"v": 1}, "an offer has version 1; all ranks need the same version of elastipod"),
        ({"parts": list(range(4097))}, "an offer's parts are no list of at most 4096"),
        ({"parts": {}}, "an offer's parts are no list of at most 4096"),
        ({"parts": [True]}, "an offer has 'True' where a count belongs"),
        ({"parts": [-1]}, "an offer has '-1' where a count belongs"),
        ({"completed": 1.0}, "an offer has '1.0' where a count belongs"),
        ({"followed": -1}, "an offer has '-1' where a count belongs"),
        ({"completed": "7" * 50}, f"an offer has '{'7' * 40}' where a count belongs"),
        ({"origin": 1 << 62}, "an offer has '4611686018427387904' where a count belongs"),
        ({"origin": None}, "an offer has 'None' where a count belongs"),
        ({"images": {str(step): [] for step in range(17)}}, "an offer names more than 16 images"),
        ({"images": []}, "an offer names more than 16 images"),
        ({"samples": {str(step): 0 for step in range(19)}}, "an offer names the samples of more than 18 steps"),
        ({"samples": []}, "an offer names the samples of more than 18 steps"),
        ({"samples": {"1": -1}}, "an offer has '-1' where a count belongs"),
        ({"images": {"-1": []}}, "an offer has '-1' where a count belongs"),
        ({"images": {"1": 2}}, "an offer's parts are no list of at most 4096"),
        ({"images": {"x": []}}, "a rank sent no offer: ValueError(\"invalid literal for int() with base 10: 'x'\")"),
    ],
)
def test_what_is_no_offer_is_refused_with_the_field(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(BadOffer) as caught:
        decode_offer(json.dumps({**NEWCOMER, **changed}))
    assert str(caught.value) == said


@pytest.mark.parametrize(("text", "kind"), [("[]", "TypeError"), ("{}", "KeyError('v')"), ("", "JSONDecodeError")])
def test_what_has_no_fields_is_no_offer(text: str, kind: str) -> None:
    with pytest.raises(BadOffer) as caught:
        decode_offer(text)
    assert str(caught.value).startswith(f"a rank sent no offer: {kind}")
