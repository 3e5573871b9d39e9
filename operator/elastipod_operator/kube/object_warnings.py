"""Warnings about parts of a job's object, beside its spec, that have no effect. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.reasons import AnyReason, Reason
from .reading import annotations_of, mapping, mappings

# Kueue reads them from pod templates (facts 5 of docs/design/queues.md).
TOPOLOGY_PREFIX, TOPOLOGY_SUFFIX = "kueue.x-k8s.io/podset-", "-topology"

Body = Mapping[str, Any]
Warnings = tuple[tuple[AnyReason, str], ...]


def object_warnings(body: Body) -> Warnings:
    """Give reasons and sentences about a job with a valid spec."""
    return _topology(body)


def _topology(body: Body) -> Warnings:
    """Warn of topology annotations on the job: they take effect in its templates only."""
    wanted = {name for name in annotations_of(body) if _is_topology(name)}
    for one in mappings(mapping(body.get("spec")).get("replicaSpecs")):
        wanted -= annotations_of(one.get("template")).keys()
    if not wanted:
        return ()
    text = (
        f"annotation {min(wanted)} has no effect on the job itself; move it to "
        "spec.replicaSpecs[].template.metadata.annotations, from which the topology is requested"
    )
    return ((Reason.TOPOLOGY_IGNORED, text),)


def _is_topology(name: str) -> bool:
    return name.startswith(TOPOLOGY_PREFIX) and name.endswith(TOPOLOGY_SUFFIX)
