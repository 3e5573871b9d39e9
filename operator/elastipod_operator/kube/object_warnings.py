"""What a job's object says beside its spec and does not get: warnings with reasons. Pure."""

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
    """Give reasons and sentences about a job whose spec can be used."""
    return _topology(body)


def _topology(body: Body) -> Warnings:
    """Annotations that ask Kueue for a topology act in the templates only."""
    wanted = {name for name in annotations_of(body) if _is_topology(name)}
    for one in mappings(mapping(body.get("spec")).get("replicaSpecs")):
        wanted -= annotations_of(one.get("template")).keys()
    if not wanted:
        return ()
    text = (
        f"annotation {min(wanted)} of the job does nothing there; put it into "
        "spec.replicaSpecs[].template.metadata.annotations, from where Kueue is asked for that topology"
    )
    return ((Reason.TOPOLOGY_IGNORED, text),)


def _is_topology(name: str) -> bool:
    return name.startswith(TOPOLOGY_PREFIX) and name.endswith(TOPOLOGY_SUFFIX)
