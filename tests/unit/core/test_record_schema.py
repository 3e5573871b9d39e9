"""Each field of the record is declared so that the codec and the clock rules can follow the declaration."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, get_args

import pytest
from tests.nonempty import some

from elastipod_operator.core.record import Record
from elastipod_operator.core.record_schema import Stored, StoredField, TimeRule, stored_fields, timed_fields


def all_fields(part: Any = Record) -> list[tuple[Any, StoredField]]:
    """Give every field of the record and of its parts, with its class."""
    own = [(part, f) for f in stored_fields(part)]
    return own + [pair for _, f in own if f.part is not None for pair in all_fields(f.part)]


FIELDS = [pytest.param(part, f, id=f"{part.__name__}.{f.name}") for part, f in all_fields()]


@pytest.mark.parametrize(("part", "declared"), FIELDS)
def test_every_time_says_how_a_wrong_clock_is_corrected(part: Any, declared: StoredField) -> None:
    is_time = datetime in (declared.type, *get_args(declared.type))
    assert (declared.storage.time_rule is not None) is is_time
    names = [f.name for f in stored_fields(part) if f.storage.time_rule is TimeRule.PAST]
    assert (declared.storage.follows in names) is (declared.storage.time_rule is TimeRule.FOLLOWS)


@pytest.mark.parametrize("declared", [f for part, f in all_fields() if part is Record], ids=lambda f: f.name)
def test_every_field_of_the_record_has_a_key_and_a_default(declared: StoredField) -> None:
    assert declared.storage.key
    assert declared.default == getattr(Record(), declared.name)


def test_fields_that_share_a_key_are_numbered() -> None:
    groups: dict[str, list[StoredField]] = {}
    for declared in stored_fields(Record):
        groups.setdefault(declared.storage.key, []).append(declared)
    for key, group in some(groups.items()):
        indexes = [f.storage.index for f in group]
        assert indexes in ([None], [*range(len(group))]), key
        assert len({f.storage.is_required for f in group}) == 1, key
        assert not any(f.storage.is_inline for f in group[:-1]), key


def test_the_fields_of_a_part_are_found_with_what_they_hold() -> None:
    @dataclass(frozen=True)
    class Part:
        number: int
        text: Annotated[str, Stored(max_length=3)] = "a"

    number, text = stored_fields(Part)
    assert (number.name, number.type, number.storage) == ("number", int, Stored())
    assert (text.type, text.default, text.storage.max_length, text.part) == (str, "a", 3, None)
    assert timed_fields(Part) == ()
