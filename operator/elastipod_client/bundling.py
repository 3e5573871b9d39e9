"""What goes into a bundle, and what is taken out of it before. Pure.

A bundle is sent to people who may not read the namespace. So values of variables, credentials in annotations and whatever looks
like a secret leave neither objects nor logs; names and structure stay, because they explain most failures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elastipod_operator.kube.reading import mapping, mappings

REDACTED = "REDACTED"
# Keys whose values are secret wherever they stand; of variables every value is, whatever its name.
SECRET_KEY = re.compile(r"(?i)(password|passwd|secret|token|api[-_]?key|access[-_]?key|credential|authorization)")
# What follows such a word in a line of a log, bearer tokens, keys in addresses, and keys of well-known forms.
SECRET_TEXT = (
    # Numbers stay: training scripts count tokens.
    re.compile(
        r"(?i)([\w-]*(?:password|passwd|secret|token|api[-_]?key|access[-_]?key|credential)[\w-]*[\"']?\s*[=:]\s*)"
        r"(?![\d.,]+(?:\W|$))(\"[^\"]*\"|'[^']*'|[^\s,;&]+)"
    ),
    re.compile(r"(?i)(\bbearer\s+)([\w.~+/=-]+)"),
    re.compile(r"(\w+://[^\s:/@]+:)([^\s@/]+)(?=@)"),
    re.compile(
        r"()\b((?:AKIA|ASIA)[A-Z0-9]{16}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
    ),
)
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


def redacted_object(body: Mapping[str, Any]) -> dict[str, Any]:
    """Give an object without values of variables and without anything that looks secret."""
    found: dict[str, Any] = _without_secrets(body)
    meta = mapping(found.get("metadata"))
    if isinstance(meta, dict):
        meta.pop("managedFields", None)
        if isinstance(notes := meta.get("annotations"), dict):
            meta["annotations"] = {key: REDACTED if key in COPIES else value for key, value in notes.items()}
    return found


def _without_secrets(value: Any, key: str = "") -> Any:
    if key == "env" and isinstance(value, list):
        return [_without_value(entry) for entry in value]
    if isinstance(value, Mapping):
        return {name: _redacted_field(str(name), inner) for name, inner in value.items()}
    if key in ("command", "args") and isinstance(value, list):
        return _arguments(value)
    if isinstance(value, list):
        return [_without_secrets(inner) for inner in value]
    return redacted_text(value) if isinstance(value, str) else value


def _redacted_field(name: str, value: Any) -> Any:
    if SECRET_KEY.search(name) and name not in REFERENCES and isinstance(value, str):
        return REDACTED
    return _without_secrets(value, name)


def _arguments(words: list[Any]) -> list[Any]:
    """Redact words of a command line, also a secret that stands alone behind its option."""
    found: list[Any] = []
    for before, word in zip([None, *words], words, strict=False):
        is_value = (
            isinstance(before, str) and before.startswith("-") and "=" not in before and SECRET_KEY.search(before)
        )
        found.append(REDACTED if is_value else _without_secrets(word))
    return found


def _without_value(entry: Any) -> Any:
    if not isinstance(entry, Mapping):
        return REDACTED
    return {name: REDACTED if name == "value" else value for name, value in entry.items()}


def redacted_text(text: str) -> str:
    """Give text without what looks like a secret."""
    for pattern in SECRET_TEXT:
        text = pattern.sub(rf"\1{REDACTED}", text)
    return text


def values_of_variables(bodies: Iterable[Mapping[str, Any]]) -> set[str]:
    """Give the values of all variables in the pods and templates of these objects, to take them out of logs too."""
    found: set[str] = set()
    for body in bodies:
        _collect(body, found)
    # A short value, such as "1", would take half of the log with it, and is no secret.
    return {value for value in found if len(value) >= SHORTEST}


SHORTEST = 8


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


def redacted_log(log: str, values: Iterable[str]) -> str:
    """Give a log without values of variables and without what looks like a secret."""
    for value in sorted(values, key=len, reverse=True):
        log = log.replace(value, REDACTED)
    return redacted_text(log)


def lines_about(log: str, job: str, limit: int) -> str:
    """Give the newest lines of the operator's log that name a job (namespace/name), at most `limit`."""
    namespace, _, name = job.partition("/")
    named = re.compile(rf"{re.escape(job)}(?![\w-])|/namespaces/{re.escape(namespace)}/\S*/{re.escape(name)}(?![\w-])")
    found: Sequence[str] = [line for line in log.splitlines() if named.search(line)]
    return "\n".join(found[-limit:])
