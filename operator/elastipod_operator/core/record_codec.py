"""Encode and decode the state record according to the declarations in `record.py`. Long texts are compressed."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import MISSING, is_dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from types import UnionType
from typing import Any, Union, get_args, get_origin

from .names import PodId
from .pod_runs import MAX_PODS, decode_pods, encode_pods
from .reasons import AnyReason, as_reason
from .record import Record
from .record_schema import StoredField, stored_fields

VERSION = 1
MAX_BYTES = 16 * 1024
"""The maximum size of a record."""
PACK_BEYOND = 4 * 1024
PACKED = "z:"
# A user may write anything into the annotation; the operator writes no record that unpacks to more.
MAX_UNPACKED = 8 << 20
NO_INCARNATION = -1
# Far enough from the limits of datetime to add or subtract the longest wait.
VALID_YEARS = range(1970, 3000)
MILLISECOND = timedelta(milliseconds=1)

Convert = Callable[[Any], Any]


class RecordError(ValueError):
    """The annotation contains something that this version cannot read."""


class NewerRecordError(RecordError):
    """A later version of the operator wrote the record, so this one must leave the job alone. owner: UID of that job."""

    owner: str = ""


def encode(record: Record) -> str:
    """Give the annotation's text, deterministic for equal records."""
    body: dict[str, Any] = {"v": VERSION, "incarnations": encode_pods(_extra_incarnations(record))}
    for key, group in _groups().items():
        if group[0].storage.is_required or any(getattr(record, f.name) != f.default for f in group):
            row = _row(record, group)
            body[key] = row[0] if group[0].storage.index is None else row
    for found in _keyed_fields_of_parts():
        part = getattr(record, found[0])
        if part is not None and getattr(part, found[1].name) != found[1].default:
            body[found[1].storage.key] = _encoder(found[1].type)(getattr(part, found[1].name))
    text = json.dumps(body, separators=(",", ":"), sort_keys=True)
    if len(text) <= PACK_BEYOND:
        return text
    return PACKED + base64.b85encode(zlib.compress(text.encode(), 9)).decode()


def decode(text: str) -> Record:
    """Read an annotation written by encode(). Raises RecordError with what is wrong with it."""
    try:
        body = json.loads(unpacked(text) if text.startswith(PACKED) else text)
        if isinstance(body["v"], int) and body["v"] > VERSION:
            newer = NewerRecordError(
                f"the state record has version {body['v']}; this operator reads version {VERSION} and does not manage the job"
            )
            newer.owner = str(body.get("uid", ""))
            raise newer
        if body["v"] != VERSION:
            raise RecordError(f"the state record has version {body['v']}; this operator reads version {VERSION}")
        return _record(body)
    except RecordError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise RecordError(f"the state record cannot be read: {type(error).__name__}: {error}") from error


def _record(body: dict[str, Any]) -> Record:
    values: dict[str, Any] = {}
    for key, group in _groups().items():
        if group[0].storage.is_required or key in body:
            found = body[key]
            values.update(_read_row(iter([found] if group[0].storage.index is None else found), group, body))
    from_members = {member.slot: member.incarnation for member in values["members"]}
    others = {pod.slot: pod.incarnation for pod in decode_pods(body["incarnations"])}
    known = {slot: number for slot, number in {**from_members, **others}.items() if number != NO_INCARNATION}
    return Record(**values, incarnations=known)


def _extra_incarnations(record: Record) -> list[PodId]:
    """Give the incarnations that do not follow from the members; NO_INCARNATION for members whose incarnation is not recorded."""
    known = {member.slot: member.incarnation for member in record.members}
    extra = [PodId(s.spec, s.ordinal, i) for s, i in record.incarnations.items() if known.get(s) != i]
    return sorted([*extra, *(PodId(s.spec, s.ordinal, NO_INCARNATION) for s in known if s not in record.incarnations)])


@lru_cache(maxsize=1)
def _groups() -> dict[str, tuple[StoredField, ...]]:
    """Give the record's fields by key, those that share a key in the order of their index."""
    groups: dict[str, list[StoredField]] = {}
    for found in stored_fields(Record):
        if not found.storage.is_derived:
            groups.setdefault(found.storage.key, []).append(found)
    return {key: tuple(sorted(group, key=lambda f: f.storage.index or 0)) for key, group in groups.items()}


@lru_cache(maxsize=1)
def _keyed_fields_of_parts() -> tuple[tuple[str, StoredField], ...]:
    """Give the fields of the record's parts that have a key of their own, each with the name of the record's field."""
    parts = ((f.name, f.part) for f in stored_fields(Record) if f.part is not None)
    return tuple((name, f) for name, part in parts for f in stored_fields(part) if f.storage.key)


def _row(value: Any, listed: tuple[StoredField, ...]) -> list[Any]:
    """Give the JSON list of some fields of a value."""
    row: list[Any] = []
    for found in listed:
        before = getattr(value, found.name)
        if found.storage.max_length is not None:
            before = before[: found.storage.max_length]
        after = _encoder(found.type)(before)
        if not found.storage.is_inline:
            row.append(after)
        elif after is not None:
            row += after
    return row


def _read_row(left: Iterator[Any], listed: tuple[StoredField, ...], body: dict[str, Any]) -> dict[str, Any]:
    """Read a JSON list that `_row()` wrote. Entries that a later version appended are ignored."""
    values: dict[str, Any] = {}
    for found in listed:
        if found.storage.is_inline:
            values[found.name] = _read_inline(left, found, body)
            continue
        raw = next(left, MISSING)
        if raw is not MISSING:
            values[found.name] = _decode(raw, found.type, body, found.storage.max_pods or MAX_PODS)
        elif not found.storage.is_later:
            raise ValueError(f"{found.name} is missing")
    return values


def _read_inline(left: Iterator[Any], found: StoredField, body: dict[str, Any]) -> Any:
    part: Any = found.part or found.type
    if not is_dataclass(part):
        return part(**_read_row(left, stored_fields(part), body))
    values = list(left)
    return _decode(values, part, body) if values or found.default is not None else None


def _own_fields(part: Any) -> tuple[StoredField, ...]:
    return tuple(f for f in stored_fields(part) if not f.storage.key)


@lru_cache
def _encoder(type_: Any) -> Convert:
    """Give what turns a value of this type into JSON."""
    if type_ == AnyReason:
        return str
    origin, arguments = get_origin(type_), get_args(type_)
    if origin in (UnionType, Union):
        inner = _encoder(arguments[0])
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        if arguments == (PodId, ...):
            return encode_pods
        if arguments[1] is ...:
            one = _encoder(arguments[0])
            return lambda values: [one(value) for value in values]
        several = tuple(_encoder(argument) for argument in arguments)
        return lambda values: [convert(value) for convert, value in zip(several, values, strict=True)]
    if type_ is datetime:
        return format_time
    if type_ is timedelta:
        return lambda span: span // MILLISECOND
    if issubclass(type_, StrEnum):
        return lambda member: member.value
    if type_ is PodId:
        return list
    if is_dataclass(type_):
        listed = _own_fields(type_)
        return lambda value: _row(value, listed)
    return lambda value: value


def _is_part(type_: Any) -> bool:
    return is_dataclass(type_)


def _decode(raw: Any, type_: Any, body: dict[str, Any], max_pods: int = MAX_PODS) -> Any:
    """Read a value of this type from JSON."""
    if type_ == AnyReason:
        return as_reason(str(raw))
    origin, arguments = get_origin(type_), get_args(type_)
    if origin in (UnionType, Union):
        if arguments[0] is datetime:
            return parse_time(raw)
        return None if raw is None and not _is_part(arguments[0]) else _decode(raw, arguments[0], body)
    if origin is tuple:
        if arguments == (PodId, ...):
            return decode_pods(raw, max_pods)
        if arguments[1] is ...:
            return tuple(_decode(one, arguments[0], body) for one in raw)
        found = list(raw)[: len(arguments)]
        return tuple(_decode(one, argument, body) for argument, one in zip(arguments, found, strict=True))
    if type_ is datetime:
        return parse_required_time(raw)
    if type_ is timedelta:
        return int(raw) * MILLISECOND
    if _is_part(type_):
        own = {
            f.name: _decode(body[f.storage.key], f.type, body) for f in stored_fields(type_) if f.storage.key in body
        }
        return type_(**_read_row(iter(raw), _own_fields(type_), body), **own)
    return type_(raw)


def unpacked(text: str) -> str:
    """Give the JSON text of a record that is packed. Raises RecordError."""
    try:
        unpacker = zlib.decompressobj()
        raw = unpacker.decompress(base64.b85decode(text[len(PACKED) :]), MAX_UNPACKED)
    except (zlib.error, binascii.Error) as error:
        raise RecordError(f"the state record cannot be unpacked: {error}") from error
    if not unpacker.eof:
        raise RecordError(f"the state record is cut off, or unpacks to more than {MAX_UNPACKED} bytes")
    return raw.decode()


def format_time(at: datetime | None) -> str | None:
    """Write a time, to the millisecond."""
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z") if at else None


def parse_time(text: str | None) -> datetime | None:
    """Read a time; one without a zone is UTC. Raises RecordError for one that is too far away to calculate with."""
    at = datetime.fromisoformat(text.replace("Z", "+00:00")) if text else None
    if at is not None and at.year not in VALID_YEARS:
        raise RecordError(f"the time {text} is out of range")
    return at.replace(tzinfo=UTC) if at is not None and at.tzinfo is None else at


def parse_required_time(text: str | None) -> datetime:
    """Read a time that must be there. Raises RecordError."""
    at = parse_time(text)
    if at is None:
        raise RecordError("a time is missing")
    return at
