"""Limits of the size and depth of a job: its templates go into every pod, and its spec into an annotation. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..core.names import ANNOTATION_APPLIED, ANNOTATION_HISTORY, ANNOTATION_SIZE, ANNOTATION_STATE
from .applied import encode_applied
from .reading import MAX_DEPTH, annotations_of, is_within_depth, mapping

# All templates of a job together, as JSON. Scripts belong in images and ConfigMaps.
MAX_TEMPLATE_BYTES = 128 * 1024
# All log rules of a job together, as JSON: every /start contains them.
MAX_LOG_RULE_BYTES = 64 * 1024
# Kubernetes' own limit for the annotations of one object, names and values together.
MAX_ANNOTATION_BYTES = 256 * 1024
# The part of it for the record, the history and the size.
OWN_ANNOTATION_BYTES = 48 * 1024
OWN = frozenset({ANNOTATION_APPLIED, ANNOTATION_HISTORY, ANNOTATION_SIZE, ANNOTATION_STATE})

Body = Mapping[str, Any]


def limit_violation(body: Body) -> str:
    """Name the field of a job that is too large or too deep; empty for none. The spec must be readable."""
    spec = body["spec"]
    if deep := _deep_field(spec):
        return f"{deep} is nested more than {MAX_DEPTH} levels deep"
    templates = _size([one.get("template") for one in spec.get("replicaSpecs") or ()])
    if templates > MAX_TEMPLATE_BYTES:
        return (
            f"spec.replicaSpecs[].template takes {templates} bytes as JSON in all specs together; at most {MAX_TEMPLATE_BYTES} are "
            "allowed, so put scripts and data into the image or a ConfigMap"
        )
    rules = _size((spec.get("runPolicy") or {}).get("logMonitoringConfiguration"))
    if rules > MAX_LOG_RULE_BYTES:
        return (
            f"spec.runPolicy.logMonitoringConfiguration takes {rules} bytes as JSON; at most {MAX_LOG_RULE_BYTES} are allowed, so use "
            "fewer rules or shorter patterns"
        )
    return _annotation_violation(body)


def _deep_field(spec: Body) -> str:
    """Name a field, known or unknown, that is nested too deep to be copied or written; empty for none."""
    parts = {f"spec.{name}": part for name, part in spec.items() if name != "replicaSpecs"}
    for one in spec.get("replicaSpecs") or ():
        parts |= {f"spec.replicaSpecs[{one['name']}].{name}": part for name, part in one.items()}
    return next((field for field, part in parts.items() if not is_within_depth([part], MAX_DEPTH + 1)), "")


def room_for_applied(body: Body) -> int:
    """Give how many bytes annotation `elastipod.io/applied` of a job may take beside the other annotations."""
    return MAX_ANNOTATION_BYTES - OWN_ANNOTATION_BYTES - _bytes_of_others(annotations_of(body))


def _bytes_of_others(annotations: Mapping[str, str]) -> int:
    return sum(len(name.encode()) + len(text.encode()) for name, text in annotations.items() if name not in OWN)


def _annotation_violation(body: Body) -> str:
    """Say that the annotations leave no room for the record, which the API server would then refuse. A job that has a record keeps it."""
    annotations = annotations_of(body)
    if ANNOTATION_STATE in annotations:
        return ""
    others = _bytes_of_others(annotations)
    if others + _size(body["spec"]) * 5 // 4 + OWN_ANNOTATION_BYTES <= MAX_ANNOTATION_BYTES:
        return ""  # even if they do not compress
    kept = len(encode_applied(body["spec"]))
    if others + kept + OWN_ANNOTATION_BYTES <= MAX_ANNOTATION_BYTES:
        return ""
    return (
        f"metadata.annotations takes {others} bytes, and the operator has to keep {kept} bytes of spec.replicaSpecs[].template there; "
        f"Kubernetes allows {MAX_ANNOTATION_BYTES}, so shorten the templates, or use kubectl apply --server-side, which keeps no copy"
    )


def without_unused_parts(body: Body) -> Body:
    """Give a job without its managed fields and without templates that are too large to be used."""
    meta = {name: value for name, value in mapping(body.get("metadata")).items() if name != "managedFields"}
    spec = body.get("spec")
    specs = spec.get("replicaSpecs") if isinstance(spec, Mapping) else None
    if not isinstance(spec, Mapping) or not isinstance(specs, list):
        return {**body, "metadata": meta}
    templates = [one.get("template") for one in specs if isinstance(one, Mapping)]
    if _size(templates) > MAX_TEMPLATE_BYTES:
        spec = {**spec, "replicaSpecs": [{**one, "template": {}} for one in specs if isinstance(one, Mapping)]}
    return {**body, "metadata": meta, "spec": spec}


def _size(part: Any) -> int:
    try:
        return len(json.dumps(part)) if part else 0
    except RecursionError:
        return 2 * MAX_TEMPLATE_BYTES  # unusable, whatever its size
