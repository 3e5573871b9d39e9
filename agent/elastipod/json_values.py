"""Values as JSON: plain ones, lists and mappings, read strictly. `json_records` builds records from them. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_MAX_QUOTED = 60  # characters of what others wrote that an error repeats


class JsonError(ValueError):
    """JSON that does not describe a record. The text names the field, says what it is and what it should be."""

    def __init__(self, problem: str, path: tuple[str, ...] = ()) -> None:
        super().__init__(f"{'.'.join(map(_shortened, path)) or 'the record'} {problem}")
        self.problem, self.path = problem, path

    def below(self, name: object) -> JsonError:
        """Give the same error as that of a field or an item of ``name``."""
        return JsonError(self.problem, (str(name), *self.path))


def parse_json(text: str) -> Any:
    """Give the JSON value of a text. Raises JsonError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise JsonError("is nested too deeply") from None
    except ValueError as error:
        raise JsonError(f"is not JSON: {error}") from error


def parse_finite_json(text: str | bytes) -> Any:
    """Give the JSON value of a text that others will read. Raises ValueError for numbers that JSON lacks, and RecursionError.

    Python reads and writes NaN and infinities, and other parsers, and strict ones in Python, refuse the whole text that has one.
    """
    return json.loads(text, parse_constant=_no_number, parse_float=_finite)


def _no_number(name: str) -> object:
    raise ValueError(f"{name} is not a JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{_shortened(text)} is too large for a number")
    return value


@dataclass(frozen=True, slots=True)
class Codec:
    """How values of one type are written and read. encode_value: None where a value is its own JSON value."""

    encode_value: Callable[[Any], Any] | None
    decode: Callable[[Any], Any]

    def encode(self, value: Any) -> Any:
        return value if self.encode_value is None else self.encode_value(value)


PLAIN: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((float, int), "a number"),
    bool: ((bool,), "true or false"),
    str: ((str,), "a text"),
}


def any_codec() -> Codec:
    """Give the codec of what is JSON already."""
    return Codec(None, lambda data: data)


def plain_codec(kinds: Sequence[Any]) -> Codec:
    """Give the codec of values of some plain types."""
    allowed = frozenset(each for kind in kinds for each in PLAIN[kind][0])
    wanted = " or ".join(PLAIN[kind][1] for kind in kinds)

    def read(data: Any) -> Any:
        if type(data) not in allowed:  # bool is a subclass of int, and no number
            raise JsonError(f"is {described(data)}, not {wanted}")
        return data

    return Codec(None, read)


def own_codec(encode: Callable[[Any], Any], read: Callable[[Any], Any]) -> Codec:
    """Give the codec of two functions; what the second raises is told as the field's error."""

    def checked(data: Any) -> Any:
        try:
            return read(data)
        except JsonError:
            raise
        except (ValueError, TypeError) as error:
            raise JsonError(f"cannot be read: {error}") from error

    return Codec(encode, checked)


def optional_codec(codec: Codec) -> Codec:
    """Give the codec of values that may be None."""

    def encode(value: Any) -> Any:
        return None if value is None else codec.encode(value)

    def read(data: Any) -> Any:
        return None if data is None else codec.decode(data)

    return Codec(None if codec.encode_value is None else encode, read)


def list_codec(item: Codec, make: Callable[[list[Any]], Any]) -> Codec:
    """Give the codec of a list of any length, which ``make`` turns into the field's type."""

    def read(data: Any) -> Any:
        if not isinstance(data, (list, tuple)):
            raise JsonError(f"is {described(data)}, not a list")
        return make([_decode_item(item, each, place) for place, each in enumerate(data)])

    return Codec(None if item.encode_value is None else lambda values: [item.encode(each) for each in values], read)


def tuple_codec(items: Sequence[Codec]) -> Codec:
    """Give the codec of a tuple of a fixed length."""

    def read(data: Any) -> Any:
        if not isinstance(data, (list, tuple)) or len(data) != len(items):
            raise JsonError(f"is {described(data)}, not a list of {len(items)}")
        return tuple(
            _decode_item(item, each, place) for place, (item, each) in enumerate(zip(items, data, strict=True))
        )

    if all(item.encode_value is None for item in items):
        return Codec(None, read)
    return Codec(lambda values: [item.encode(each) for item, each in zip(items, values, strict=True)], read)


def mapping_codec(item: Codec) -> Codec:
    """Give the codec of a mapping from text."""

    def read(data: Any) -> Any:
        if not isinstance(data, dict):
            raise JsonError(f"is {described(data)}, not an object")
        return {name: _decode_item(item, each, name) for name, each in data.items()}

    return Codec(lambda values: {name: item.encode(each) for name, each in values.items()}, read)


def _decode_item(item: Codec, data: Any, place: object) -> Any:
    try:
        return item.decode(data)
    except JsonError as error:
        raise error.below(place) from error.__cause__


def described(data: Any) -> str:
    if isinstance(data, (list, dict)):
        return f"a list of {len(data)}" if isinstance(data, list) else "an object"
    return "null" if data is None else _shortened(repr(data))


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_QUOTED else f"{text[: _MAX_QUOTED - 3]}..."
