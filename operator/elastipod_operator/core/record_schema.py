"""How each field of the state record is stored, declared beside its type with `Stored`.

`record_codec` and `clock_skew` follow these declarations, so a new field of the record is one line in `record.py`.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints


class TimeRule(StrEnum):
    """How to correct a stored time that is in the future because of the clock of an earlier operator."""

    # A past event: never later than now.
    PAST = "past"
    # A deadline or the end of a wait: moves together with the time that `follows` names.
    FOLLOWS = "follows"
    # The end of a back-off: never further away than the job's longest back-off.
    BACK_OFF = "back-off"


@dataclass(frozen=True, slots=True)
class Stored:
    """How a field is stored: `field: Annotated[int, Stored("ceiling")] = 0`. A part's field without it is stored plainly."""

    # Its key in the record's JSON object. The fields of a part need none: they form a list in their order.
    key: str = ""
    # Its position in the list under `key`, if several fields share a key.
    index: int | None = None
    # The key is always written; others are left out while all their fields have their defaults.
    is_required: bool = False
    # Added to a list after the first release, so earlier records end before it.
    is_later: bool = False
    # A part whose values are in the list itself. Only a named tuple may be followed by further fields.
    is_inline: bool = False
    # `record_codec` has special code for it.
    is_derived: bool = False
    # Longer texts are cut to this many characters.
    max_length: int | None = None
    # The maximum number of pods that are read.
    max_pods: int | None = None
    # Every time needs one.
    time_rule: TimeRule | None = None
    # With TimeRule.FOLLOWS: the field whose time this one moves with.
    follows: str = ""


@dataclass(frozen=True, slots=True)
class StoredField:
    """A field with its resolved type. part: the dataclass that it holds one, at most one, or several of; None for others."""

    name: str
    type: Any
    part: type[Any] | None
    default: Any
    storage: Stored


@lru_cache
def stored_fields(part: Any) -> tuple[StoredField, ...]:
    """Give the fields of the record, of a part of it, or of a named tuple, in the order of their declaration."""
    types = get_type_hints(part, include_extras=True)
    defaults = {f.name: _default_of(f) for f in fields(part)} if is_dataclass(part) else {}
    return tuple(_stored_field(name, type_, defaults.get(name, MISSING)) for name, type_ in types.items())


@lru_cache
def timed_fields(part: Any) -> tuple[StoredField, ...]:
    """Give the fields that are times or have parts with times."""
    return tuple(
        f
        for f in stored_fields(part)
        if f.storage.time_rule is not None or (f.part is not None and timed_fields(f.part))
    )


def _stored_field(name: str, type_: Any, default: Any) -> StoredField:
    storage = Stored()
    if get_origin(type_) is Annotated:
        type_, storage = get_args(type_)
    return StoredField(name, type_, _part_of(type_), default, storage)


def _part_of(type_: Any) -> type[Any] | None:
    """Give the dataclass of a type such as `Part`, `Part | None` or `tuple[Part, ...]`; None for other types."""
    if get_origin(type_) in (UnionType, Union, tuple):
        type_ = get_args(type_)[0]
    return type_ if isinstance(type_, type) and is_dataclass(type_) else None


def _default_of(declared: Field[Any]) -> Any:
    return declared.default_factory() if declared.default_factory is not MISSING else declared.default
