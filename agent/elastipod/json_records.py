"""Dataclasses as JSON: how the library writes its records into files and messages, and reads them back. No torch.

A record is an object with a key for each field, in the order of the fields, or with `json_row` a list of the fields' values.
Reading is strict: nothing is converted, and a value of another type than its field's raises `JsonError`, which names the field.
Keys that the class does not have are ignored, so that a later version can add some; a field that has a default may be absent.

Fields are int, float, bool, str, Any (JSON as it is), ``X | None``, ``X | Y`` of plain types, tuples, lists, sequences, mappings
from str, and records. `Annotated` says more: `INLINE`, `OMIT_EMPTY`, `Key`, or an object of class `ValueCodec`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from elastipod.json_values import (
    PLAIN,
    Codec,
    any_codec,
    described,
    list_codec,
    mapping_codec,
    optional_codec,
    own_codec,
    parse_json,
    plain_codec,
    tuple_codec,
)
from elastipod.json_values import JsonError as JsonError

T = TypeVar("T")


class ValueCodec(Generic[T]):
    """How values of one annotated type are written, where their type alone does not say it."""

    def encode(self, value: T) -> Any:
        """Give the JSON value."""
        raise NotImplementedError

    def decode(self, data: Any) -> T:
        """Give the value. Raises ValueError for anything that `encode` does not write."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Key:
    """The key of a field in JSON, where it is not the field's name."""

    name: str


@dataclass(frozen=True, slots=True)
class _Inline:
    pass


@dataclass(frozen=True, slots=True)
class _OmitEmpty:
    pass


INLINE = _Inline()  # the fields of this record stand in its place
OMIT_EMPTY = _OmitEmpty()  # an empty value is not written; the field has a default


def json_record(kind: type[T]) -> type[T]:
    """Make what reads and writes records of this class now, when its module is imported, and not at their first use.

    So workers that are forked from one process find it there. Raises TypeError for a field that has no form in JSON.
    """
    wanted: Any = kind
    _record_codec(wanted)
    return kind


def json_row(kind: type[T]) -> type[T]:
    """As `json_record`, for records that are written as lists of their values: for those of which there are many."""
    kind.__json_row__ = True  # type: ignore[attr-defined]
    return json_record(kind)


def encode(record: Any) -> Any:
    """Give a record as a JSON value."""
    kind: Any = type(record)
    return _record_codec(kind).encode(record)


def decode(kind: type[T], data: Any) -> T:
    """Give the record that a JSON value describes. Raises JsonError."""
    wanted: Any = kind
    found: T = _record_codec(wanted).decode(data)
    return found


def parse(kind: type[T], text: str) -> T:
    """Give the record that a text describes; the caller limits its length. Raises JsonError."""
    return decode(kind, parse_json(text))


@dataclass(frozen=True, slots=True)
class _FieldCodec:
    """One field. inline: of a record whose fields stand in its place."""

    name: str
    key: str
    codec: Codec | None
    inline: _RecordCodec | None
    has_default: bool
    omits_empty: bool


class _RecordCodec:
    """Writes and reads the records of one class."""

    def __init__(self, kind: type[Any]) -> None:
        self._kind = kind
        hints = get_type_hints(kind, include_extras=True)
        self.fields = [_field_codec(field, hints[field.name]) for field in fields(kind) if field.init]
        self.width: int = sum(field.inline.width if field.inline else 1 for field in self.fields)
        self._is_row = getattr(kind, "__json_row__", False)

    def encode(self, record: Any) -> Any:
        return self.encode_row(record) if self._is_row else self.encode_object(record)

    def decode(self, data: Any) -> Any:
        if not self._is_row:
            return self.decode_object(data)
        if not isinstance(data, (list, tuple)) or len(data) != self.width:
            raise JsonError(f"is {described(data)}, not a list of {self.width}")
        return self.decode_row(iter(data))

    def encode_object(self, record: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for field in self.fields:
            value = getattr(record, field.name)
            if field.inline is not None:
                found.update(field.inline.encode_object(value))
            elif field.codec is not None and (value or not field.omits_empty):
                found[field.key] = field.codec.encode(value)
        return found

    def encode_row(self, record: Any) -> list[Any]:
        found: list[Any] = []
        for field in self.fields:
            value = getattr(record, field.name)
            if field.inline is not None:
                found += field.inline.encode_row(value)
            elif field.codec is not None:
                found.append(field.codec.encode(value))
        return found

    def decode_object(self, data: Any) -> Any:
        if not isinstance(data, dict):
            raise JsonError(f"is {described(data)}, not an object")
        found: dict[str, Any] = {}
        for field in self.fields:
            if field.inline is not None:
                found[field.name] = field.inline.decode_object(data)
            elif field.key in data:
                found[field.name] = _decode_field(field, data[field.key])
            elif not field.has_default:
                raise JsonError("is missing", (field.key,))
        return self._kind(**found)

    def decode_row(self, values: Iterator[Any]) -> Any:
        return self._kind(
            **{
                field.name: field.inline.decode_row(values) if field.inline else _decode_field(field, next(values))
                for field in self.fields
            }
        )


def _decode_field(field: _FieldCodec, data: Any) -> Any:
    assert field.codec is not None
    try:
        return field.codec.decode(data)
    except JsonError as error:
        raise error.below(field.key) from error.__cause__


@cache
def _record_codec(kind: Any) -> _RecordCodec:
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise TypeError(f"{kind} has no form in JSON; it is no dataclass")
    return _RecordCodec(kind)


def _field_codec(field: Field[Any], hint: Any) -> _FieldCodec:
    notes = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    is_inline = INLINE in notes
    return _FieldCodec(
        field.name,
        next((note.name for note in notes if isinstance(note, Key)), field.name),
        None if is_inline else _codec_of(hint),
        _record_codec(get_args(hint)[0]) if is_inline else None,
        field.default is not MISSING or field.default_factory is not MISSING,
        OMIT_EMPTY in notes,
    )


def _codec_of(hint: Any) -> Codec:
    """Give the codec of a type. Raises TypeError for one that has none: a mistake in the class, not in the data."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        own = next((note for note in arguments[1:] if isinstance(note, ValueCodec)), None)
        return _codec_of(arguments[0]) if own is None else own_codec(own.encode, own.decode)
    if hint is Any:
        return any_codec()
    if hint in PLAIN:
        return plain_codec((hint,))
    if origin in (Union, types.UnionType):
        return _union_codec(arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple_codec([_codec_of(each) for each in arguments])
    if origin in (tuple, list, Sequence):
        return list_codec(_codec_of(arguments[0]), list if origin is list else tuple)
    if origin in (dict, Mapping) and arguments[0] is str:
        return mapping_codec(_codec_of(arguments[1]))
    record = _record_codec(hint)
    return Codec(record.encode, record.decode)


def _union_codec(kinds: Sequence[Any]) -> Codec:
    others = [each for each in kinds if each is not type(None)]
    codec = _codec_of(others[0]) if len(others) == 1 else plain_codec(others)
    return codec if len(others) == len(kinds) else optional_codec(codec)
