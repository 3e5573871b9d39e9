"""What goes into a bundle, and what is taken out of it before. Pure.

A bundle is sent to people who may not read the namespace. So values of variables, credentials in annotations and whatever looks
like a secret leave objects and texts; names and structure stay, because they explain most failures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from elastipod_operator.core.names import ANNOTATION_APPLIED, ANNOTATION_STATE
from elastipod_operator.core.record_codec import PACKED, unpacked
from elastipod_operator.kube.applied import any_applied_of
from elastipod_operator.kube.reading import mapping, mappings, name_of, text

from .mentions import boundaries
from .secret_text import COUNT_NAME, REDACTED, SECRET_NAME, redacted_text, with_short_lines

# Annotations that hold a copy of the manifest, and with it values of variables.
COPIES = ("kubectl.kubernetes.io/last-applied-configuration",)
# Fields whose entries name a secret and do not hold it.
REFERENCES = (
    "valueFrom",
    "envFrom",
    "secretKeyRef",
    "imagePullSecrets",
    "volumes",
    "secretName",
    "secret",
    "secretRef",
)
# A shorter value, such as "1", would take half of a text with it, and is no secret.
SHORTEST = 8


def redacted_object(body: Mapping[str, Any], values: Sequence[str] = ()) -> dict[str, Any]:
    """Give an object without values of variables and without what looks secret. values: as `values_of_variables` gives them."""
    found: dict[str, Any] = _without_secrets(body, values)
    meta = mapping(found.get("metadata"))
    if isinstance(meta, dict):
        meta.pop("managedFields", None)
        if isinstance(notes := meta.get("annotations"), dict):
            meta["annotations"] = {key: REDACTED if key in COPIES else value for key, value in notes.items()}
            meta["annotations"] |= _unpacked(body, notes, values)
    return found


def _unpacked(body: Mapping[str, Any], notes: Mapping[str, Any], values: Sequence[str]) -> dict[str, str]:
    """Give what the operator keeps in annotations, as text: compressed, it would hide its secrets from every pattern."""
    kept: dict[str, Any] = {}
    if ANNOTATION_APPLIED in notes:
        kept[ANNOTATION_APPLIED] = any_applied_of(body)
    if text(notes.get(ANNOTATION_STATE)).startswith(PACKED):
        with suppress(ValueError):
            kept[ANNOTATION_STATE] = None
            kept[ANNOTATION_STATE] = json.loads(unpacked(notes[ANNOTATION_STATE]))
    return {
        name: REDACTED if found is None else json.dumps(_without_secrets(found, values), ensure_ascii=False)
        for name, found in kept.items()
    }


def _without_secrets(value: Any, values: Sequence[str], key: str = "") -> Any:
    if key == "env" and isinstance(value, list):
        return [_without_value(entry) for entry in value]
    if isinstance(value, Mapping):
        return _without_named_value({name: _redacted_field(str(name), one, values) for name, one in value.items()})
    if key in ("command", "args") and isinstance(value, list):
        return _arguments(value, values)
    if isinstance(value, list):
        return [_without_secrets(inner, values) for inner in value]
    return redacted_text(_without_values(value, values)) if isinstance(value, str) else value


def _redacted_field(name: str, value: Any, values: Sequence[str]) -> Any:
    if SECRET_NAME.search(name) and name not in REFERENCES and _may_be_secret(name, value):
        return REDACTED
    return _without_secrets(value, values, name)


def _may_be_secret(name: str, value: Any) -> bool:
    """Whether a value of such a name is one; numbers are, unless they count something."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, str) or (is_number and not COUNT_NAME.search(name))


def _without_named_value(entry: dict[str, Any]) -> dict[str, Any]:
    """Redact the value of a pair such as a header: {name: X-Api-Key, value: ...}."""
    if isinstance(entry.get("value"), str) and SECRET_NAME.search(text(entry.get("name"))):
        return {**entry, "value": REDACTED}
    return entry


def _arguments(words: list[Any], values: Sequence[str]) -> list[Any]:
    """Redact words of a command line, also a secret that stands alone behind its option."""
    found: list[Any] = []
    for before, word in zip([None, *words], words, strict=False):
        is_value = (
            isinstance(before, str) and before.startswith("-") and "=" not in before and SECRET_NAME.search(before)
        )
        found.append(REDACTED if is_value and not _is_count(before, word) else _without_secrets(word, values))
    return found


def _is_count(option: Any, word: Any) -> bool:
    return COUNT_NAME.search(str(option)) is not None and str(word).isdecimal()


def _without_value(entry: Any) -> Any:
    if not isinstance(entry, Mapping):
        return REDACTED
    return {name: REDACTED if name == "value" else value for name, value in entry.items()}


def values_of_variables(bodies: Sequence[Mapping[str, Any]]) -> list[str]:
    """Give the values of all variables in the pods and templates of these objects, the longest first, to take them out elsewhere.

    Names of the objects stay, which the operator gives to pods as variables. A text may hold a value as it is, line by line, or as
    JSON writes it.
    """
    found: set[str] = set()
    names: set[str] = set()
    for body in bodies:
        _collect(body, found)
        names |= _names(body)
    forms = {form for value in found for form in (value, *value.splitlines(), json.dumps(value)[1:-1])}
    return sorted((form for form in forms - names if len(form) >= SHORTEST), key=lambda form: (-len(form), form))


def _names(body: Mapping[str, Any]) -> set[str]:
    """Give what an object is called, and where it runs."""
    meta, spec = mapping(body.get("metadata")), mapping(body.get("spec"))
    namespace, name = text(meta.get("namespace")), name_of(body)
    return {namespace, name, f"{namespace}/{name}", text(meta.get("uid")), text(spec.get("nodeName"))}


def _collect(value: Any, found: set[str]) -> None:
    if isinstance(value, Mapping):
        for entry in mappings(value.get("env")):
            if isinstance(written := entry.get("value"), str):
                found.add(written)
        for inner in value.values():
            _collect(inner, found)
    elif isinstance(value, list):
        for inner in value:
            _collect(inner, found)


def _without_values(text: str, values: Iterable[str]) -> str:
    for value in values:
        text = text.replace(value, REDACTED)
    return text


def redacted_log(log: str, values: Iterable[str]) -> str:
    """Give a log, or another text, without values of variables, without what looks like a secret, and with short lines."""
    return with_short_lines(redacted_text(_without_values(log, values)))


def lines_about(log: str, job: str, limit: int) -> str:
    """Give the newest lines of the operator's log that name a job (namespace/name), at most `limit`."""
    namespace, _, name = job.partition("/")
    named = re.compile(rf"{boundaries(job)}|/namespaces/{re.escape(namespace)}/\S{{0,512}}/{boundaries(name)}")
    found: Sequence[str] = [line for line in log.splitlines() if named.search(line)]
    return "\n".join(found[-limit:])
