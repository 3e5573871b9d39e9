"""Write the API reference from the CRD's schema."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from elastipod_operator.api.base import SHORT_NAMES
from elastipod_operator.core.names import API_VERSION, KIND

Schema = dict[str, Any]

_HEAD = f"""<!-- Generated from the models in operator/elastipod_operator/api by `make generate`; edits are lost. -->
# {KIND} ({API_VERSION})

Short names: {", ".join(f"`{name}`" for name in SHORT_NAMES)}. The same text is shown by `kubectl explain hpjob.spec --recursive`.
A field written as `null` counts as absent. Fields of the pod template are those of a Pod and are not repeated here.
"""


def render(schema: Schema) -> str:
    """Give the reference as Markdown: one table for each object of spec and status, parents before children."""
    sections = [*_sections("spec", schema["properties"]["spec"]), *_sections("status", schema["properties"]["status"])]
    checks = "".join(f"\nRefused: {_sentence(rule)}.\n" for rule in schema["x-kubernetes-validations"])
    return _HEAD + checks + "".join(f"\n{section}" for section in sections)


def _sections(path: str, schema: Schema) -> Iterator[str]:
    rows = [_row(name, field, name in schema.get("required", ())) for name, field in schema["properties"].items()]
    checks = [f"\n- {_sentence(rule)}" for rule in _rules(schema)]
    yield "".join(
        [
            f"## {path}\n\n{schema.get('description', '')}\n\n",
            "| field | type | default | meaning |\n|---|---|---|---|\n",
            *rows,
            *(["\nRejected with one of these messages:\n", *checks, "\n"] if checks else []),
        ]
    )
    for name, field in schema["properties"].items():
        is_list = field["type"] == "array"
        inner = field["items"] if is_list else field
        if name != "template" and inner.get("properties"):
            inner = {"description": field.get("description", ""), **inner}
            yield from _sections(f"{path}.{name}{'[]' if is_list else ''}", inner)


def _rules(schema: Schema) -> Iterator[Schema]:
    """Give the rules of an object, including those of fields without a section of their own."""
    yield from schema.get("x-kubernetes-validations", ())
    for field in schema["properties"].values():
        if "properties" not in field:
            yield from field.get("x-kubernetes-validations", ())


def _row(name: str, field: Schema, is_required: bool) -> str:
    default = json.dumps(field["default"]) if "default" in field else "required" if is_required else ""
    return f"| `{name}` | {_type(field)} | {default} | {field.get('description', '').replace('|', chr(92) + '|')} |\n"


def _type(field: Schema) -> str:
    if "enum" in field:
        return _choice(field["enum"])
    if field.get("pattern", "").startswith("^("):
        return _choice(field["pattern"].removeprefix("^(").removesuffix(")$").split("|"))
    if field["type"] == "array":
        return f"list of {_type(field['items'])}"
    if "additionalProperties" in field:
        return f"map to {_type(field['additionalProperties'])}"
    bounds = [f"{sign} {field[key]}" for key, sign in (("minimum", ">="), ("maximum", "<=")) if _is_telling(field, key)]
    return ", ".join([field["format"] if field.get("format") == "date-time" else field["type"], *bounds])


def _choice(values: Iterable[str]) -> str:
    return " \\| ".join(f"`{value}`" for value in values)


def _is_telling(field: Schema, key: str) -> bool:
    return key in field and abs(field[key]) < 2**31 - 1


def _sentence(rule: Schema) -> str:
    text: str = rule.get("message") or rule["messageExpression"].partition(".format(")[0].strip("'")
    return text.replace("%d", "N")
