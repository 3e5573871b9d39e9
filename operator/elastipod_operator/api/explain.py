"""Turn validation errors of pydantic into one sentence that names the field, its value and what it must be."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_ABOUT_FIELD = "field_error"
_ABOUT_VALUE = "value_error"

_REQUIREMENTS: Mapping[str, str] = {
    "int_type": "it must be a whole number",
    "int_parsing": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "float_type": "it must be a number",
    "float_parsing": "it must be a number",
    "bool_type": "it must be true or false",
    "bool_parsing": "it must be true or false",
    "string_type": "it must be a string; put it in quotes",
    "dict_type": "it must be a mapping",
    "model_type": "it must be a mapping",
    "model_attributes_type": "it must be a mapping",
    "tuple_type": "it must be a list",
    "greater_than_equal": "it must be at least {ge}",
    "less_than_equal": "it must be at most {le}",
    "string_too_short": "it must not be empty",
    "string_too_long": "it must be at most {max_length} characters long",
    "too_short": "it must have at least {min_length} entry",
    "too_long": "it must have at most {max_length} entries",
    "enum": "it must be {expected}",
    "literal_error": "it must be {expected}",
    "datetime_from_date_parsing": "it must be a time such as 2026-01-31T12:00:00Z",
    "datetime_parsing": "it must be a time such as 2026-01-31T12:00:00Z",
}


def field_error(message: str) -> PydanticCustomError:
    """Give the error of a rule over several fields of one model; `message` begins with the name of one of them."""
    return PydanticCustomError(_ABOUT_FIELD, "{text}", {"text": message})


def value_error(demand: str) -> PydanticCustomError:
    """Give the error of a rule on one value; `demand` says what it must be."""
    return PydanticCustomError(_ABOUT_VALUE, "{text}", {"text": demand})


def explain(error: ValidationError) -> str:
    """Give one sentence for the user: field path, value, what to do.

    Further errors are only counted; they are reported after the first is fixed. Never empty.
    """
    details = _without_echoes(error.errors(include_url=False))
    sentence = _sentence(details[0])
    others = len(details) - 1
    return f"{sentence} (and {others} more)" if others else sentence


def _without_echoes(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Drop "too short" for a list with invalid entries, because pydantic counts only the valid ones."""
    wrong = [detail["loc"] for detail in details if detail["type"] != "too_short"]
    return [
        detail
        for detail in details
        if detail["type"] != "too_short" or not any(loc[: len(detail["loc"])] == detail["loc"] for loc in wrong)
    ]


def _sentence(detail: ErrorDetails) -> str:
    path, kind = _path(detail["loc"]), detail["type"]
    context = cast("Mapping[str, Any]", detail.get("ctx", {}))
    if kind == _ABOUT_FIELD:
        return f"{path}.{context['text']}" if path else str(context["text"])
    if kind == "missing":
        return f"{path} is missing; add it"
    demand = context["text"] if kind == _ABOUT_VALUE else _REQUIREMENTS.get(kind, detail["msg"]).format(**context)
    return f"{path or 'the object'} is {_shown(detail['input'])}; {demand}"


def _path(loc: Sequence[int | str]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return "".join(parts).removeprefix(".")


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
