"""Read values that anyone may have written: a value of an unexpected type counts as absent. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Body = Mapping[str, Any]
# No real pod is nested half as deep. Values beyond Python's recursion limit can be neither copied nor sent.
MAX_DEPTH = 100
# Most values are dicts and lists; to ask an abstract class of each takes many times longer.
MAPPINGS = (dict, Mapping)
NESTED = (dict, list, tuple, Mapping)


def mapping(found: Any) -> Body:
    """Give an object; an empty one for anything else."""
    return found if isinstance(found, MAPPINGS) else {}


def mappings(found: Any) -> list[Body]:
    """Give the objects in a list; none for anything else."""
    if not isinstance(found, list) and (not isinstance(found, Sequence) or isinstance(found, str | bytes)):
        return []
    return [one for one in found if isinstance(one, MAPPINGS)]


def text(found: Any) -> str:
    """Give a text; an empty one for anything else."""
    return found if isinstance(found, str) else ""


def texts(found: Any) -> dict[str, str]:
    """Give the entries of labels or annotations that are texts."""
    return {key: value for key, value in mapping(found).items() if isinstance(value, str)}


def labels_of(body: Any) -> dict[str, str]:
    """Give the labels of an object."""
    return texts(mapping(mapping(body).get("metadata")).get("labels"))


def annotations_of(body: Any) -> dict[str, str]:
    """Give the annotations of an object."""
    return texts(mapping(mapping(body).get("metadata")).get("annotations"))


def uid_of(body: Any) -> str:
    """Give the UID of an object; empty if it has none."""
    return text(mapping(mapping(body).get("metadata")).get("uid"))


def name_of(body: Any) -> str:
    """Give the name of an object; empty if it has none."""
    return text(mapping(mapping(body).get("metadata")).get("name"))


def condition_of(body: Any, kind: str) -> Body:
    """Give the condition of an object with this type; an empty one if it has none."""
    conditions = mappings(mapping(mapping(body).get("status")).get("conditions"))
    return next((one for one in conditions if one.get("type") == kind), {})


def finalizers_of(body: Body) -> list[str]:
    """Give the finalizers of an object."""
    found = mapping(body.get("metadata")).get("finalizers")
    return [one for one in found if isinstance(one, str)] if isinstance(found, list | tuple) else []


def is_within_depth(value: Any, levels: int) -> bool:
    """Whether a value has at most this many levels."""
    layer = [value]
    for _ in range(levels):
        layer = [inner for one in layer for inner in (one.values() if isinstance(one, MAPPINGS) else one)]
        layer = [one for one in layer if not isinstance(one, str) and isinstance(one, NESTED)]
        if not layer:
            return True
    return False


def shortened(found: Any, limit: int = 300) -> str:
    """Give a foreign value as one line of at most `limit` characters."""
    line = " ".join(str(found if isinstance(found, str | int | float) else "?")[: 10 * limit].split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
