"""Records as JSON: strict, with one error that names the field, and the same record again after writing and reading."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastipod.json_records import (
    INLINE,
    OMIT_EMPTY,
    JsonError,
    Key,
    ValueCodec,
    decode,
    encode,
    json_record,
    json_row,
    parse,
)


@json_row
@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: float


class Hex(ValueCodec[int]):
    def encode(self, value: int) -> str:
        return f"{value:x}"

    def decode(self, data: Any) -> int:
        return int(data, 16)


@dataclass(frozen=True, slots=True)
class Drawing:
    at: Annotated[Point, INLINE]
    name: str
    is_closed: bool | None
    points: tuple[Point, ...]
    ends: tuple[Point, int] | None = None
    path: tuple[str | int, ...] = ()
    color: Annotated[int, Hex(), Key("rgb")] = 0
    notes: Annotated[Mapping[str, list[str]], OMIT_EMPTY] = field(default_factory=dict)
    extra: Any = None


POINTS = st.builds(Point, st.integers(), st.floats(allow_nan=False))
DRAWINGS = st.builds(
    Drawing,
    at=POINTS,
    name=st.text(),
    is_closed=st.none() | st.booleans(),
    points=st.lists(POINTS, max_size=3).map(tuple),
    ends=st.none() | st.tuples(POINTS, st.integers()),
    path=st.lists(st.text() | st.integers(), max_size=3).map(tuple),
    color=st.integers(0, 1 << 24),
    notes=st.dictionaries(st.text(), st.lists(st.text(), max_size=2), max_size=2),
    extra=st.none() | st.lists(st.integers(), max_size=2),
)
WRITTEN = {"x": 1, "y": 0.5, "name": "n", "is_closed": None, "points": [[2, 3]]}


@given(DRAWINGS)
def test_what_is_written_is_read_again(drawing: Drawing) -> None:
    assert parse(Drawing, json.dumps(encode(drawing))) == drawing


def test_keys_have_the_order_of_the_fields_and_empty_notes_are_left_out() -> None:
    drawing = Drawing(Point(1, 0.5), "n", None, (Point(2, 3),))
    assert list(encode(drawing)) == ["x", "y", "name", "is_closed", "points", "ends", "path", "rgb", "extra"]
    assert decode(Drawing, WRITTEN) == drawing


def test_keys_of_a_later_version_are_ignored() -> None:
    assert decode(Drawing, {**WRITTEN, "layer": 3}) == decode(Drawing, WRITTEN)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        pytest.param({"x": "1"}, "x is '1', not a whole number", id="inline"),
        pytest.param({"x": True}, "x is True, not a whole number", id="true is no number"),
        pytest.param({"name": 5}, "name is 5, not a text", id="text"),
        pytest.param({"name": None}, "name is null, not a text", id="null"),
        pytest.param({"is_closed": 0}, "is_closed is 0, not true or false", id="a number is no truth"),
        pytest.param({"points": {}}, "points is an object, not a list", id="list"),
        pytest.param({"points": [[1, 2], [1]]}, "points.1 is a list of 1, not a list of 2", id="row"),
        pytest.param({"points": [[1, "2"]]}, "points.0.y is '2', not a number", id="in a row"),
        pytest.param({"ends": [[1, 2], 3, 4]}, "ends is a list of 3, not a list of 2", id="tuple"),
        pytest.param({"ends": [[1, 2], "3"]}, "ends.1 is '3', not a whole number", id="in a tuple"),
        pytest.param({"path": ["a", 1.5]}, "path.1 is 1.5, not a text or a whole number", id="either"),
        pytest.param({"rgb": "green"}, "rgb cannot be read: invalid literal", id="own codec"),
        pytest.param({"notes": {"a": ["b", 1]}}, "notes.a.1 is 1, not a text", id="mapping"),
        pytest.param({"name": ["x" * 999]}, "name is a list of 1, not a text", id="a list for a text"),
        pytest.param({"x": "x" * 999}, r"x is 'x{56}\.\.\., not", id="much text is shortened"),
    ],
)
def test_an_error_names_the_field_and_what_it_is(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(JsonError, match=f"^{told}"):
        decode(Drawing, {**WRITTEN, **changes})


@pytest.mark.parametrize("key", WRITTEN)
def test_a_field_without_a_default_must_be_there(key: str) -> None:
    with pytest.raises(JsonError, match=f"^{key} is missing$"):
        decode(Drawing, {name: value for name, value in WRITTEN.items() if name != key})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param("[]", "^the record is a list of 0, not an object$", id="another value"),
        pytest.param("{", "^the record is not JSON: ", id="torn"),
        pytest.param("[" * 200_000, "^the record is nested too deeply$", id="deep"),
    ],
)
def test_a_text_that_is_no_record_is_refused(text: str, told: str) -> None:
    with pytest.raises(JsonError, match=told):
        parse(Drawing, text)


def test_a_class_whose_fields_have_no_form_in_json_is_refused() -> None:
    with pytest.raises(TypeError, match="has no form in JSON"):
        encode(Unwritable({1}))
    with pytest.raises(TypeError, match="has no form in JSON"):  # where it is declared
        json_record(Unwritable)


@dataclass
class Unwritable:
    numbers: set[int]
