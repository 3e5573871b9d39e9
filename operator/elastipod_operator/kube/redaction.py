"""Templates without the values of their variables, for annotations: a value that a user removes must not remain. Pure.

A value is replaced by a short digest. It is restored from the job's present spec or, if that was edited, from a pod that was
created with it. The digest is just long enough to distinguish two values; a longer one could confirm a guessed password.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .reading import mapping, mappings, text

DIGEST = "valueDigest"
DIGEST_CHARACTERS = 8
CONTAINERS = ("containers", "initContainers")

Template = Mapping[str, Any]
Entry = dict[str, Any]
# (kind of container, its name, name of the variable) -> values that it has or had
Values = Mapping[tuple[str, str, str], tuple[str, ...]]


def redacted(template: Any) -> Any:
    """Give a template with digests instead of the values of its variables."""
    return _with_entries(template, lambda _, entry: _redacted_entry(entry))


def restored(template: Any, values: Values) -> Any:
    """Give a redacted template with its values restored.

    If none of `values` has the digest, the variable gets the first of them; without any it is left out.
    """

    def entry_of(key: tuple[str, str, str], entry: Entry) -> Entry | None:
        if DIGEST not in entry:
            return entry
        known = values.get(key, ())
        same = next((value for value in known if _digest(value) == entry[DIGEST]), *known[:1] or (None,))
        rest = {name: value for name, value in entry.items() if name != DIGEST}
        return None if same is None else {**rest, "value": same}

    return _with_entries(template, entry_of)


def misses_values(template: Any, values: Values) -> bool:
    """Whether `restored` cannot restore every value."""
    return any(
        DIGEST in entry and all(_digest(value) != entry[DIGEST] for value in values.get(key, ()))
        for key, entry in _entries(template)
    )


def values_of(templates: Iterable[Any]) -> Values:
    """Give the values of the variables of some templates or pods, in their order."""
    found: dict[tuple[str, str, str], tuple[str, ...]] = {}
    for template in templates:
        for key, entry in _entries(template):
            if isinstance(value := entry.get("value"), str):
                found[key] = (*found.get(key, ()), value)
    return found


def _redacted_entry(entry: Entry) -> Entry:
    value = entry.get("value")
    if not isinstance(value, str):
        return entry
    return {**{name: one for name, one in entry.items() if name != "value"}, DIGEST: _digest(value)}


def _digest(value: str) -> str:
    return hashlib.sha256(b"elastipod" + value.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_CHARACTERS]


def _entries(template: Any) -> Iterable[tuple[tuple[str, str, str], Entry]]:
    spec = mapping(mapping(template).get("spec"))
    for kind in CONTAINERS:
        for container in mappings(spec.get(kind)):
            for entry in mappings(container.get("env")):
                yield (kind, text(container.get("name")), text(entry.get("name"))), dict(entry)


def _with_entries(template: Any, change: Callable[[tuple[str, str, str], Entry], Entry | None]) -> Any:
    """Give a copy of a template with each variable changed, or removed if `change` gives None."""
    spec = mapping(mapping(template).get("spec"))
    changed = {
        kind: [_with_env(container, kind, change) for container in spec[kind]]
        for kind in CONTAINERS
        if isinstance(spec.get(kind), list)
    }
    return {**template, "spec": {**spec, **changed}} if changed else template


def _with_env(container: Any, kind: str, change: Callable[[tuple[str, str, str], Entry], Entry | None]) -> Any:
    env = mapping(container).get("env")
    if not isinstance(env, list):
        return container
    name = text(container.get("name"))
    entries: list[Any] = []
    for entry in env:
        is_entry = isinstance(entry, Mapping)
        changed = change((kind, name, text(entry.get("name"))), dict(entry)) if is_entry else entry
        if changed is not None or not is_entry:
            entries.append(changed)
    return {**container, "env": entries}
