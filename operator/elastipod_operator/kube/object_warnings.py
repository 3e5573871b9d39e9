"""What a job's object says beside its spec and does not get: warnings with reasons. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .reading import annotations_of, mapping, mappings

# Kueue reads them from pod templates (facts 5 of docs/design/queues.md).
TOPOLOGY_PREFIX, TOPOLOGY_SUFFIX = "kueue.x-k8s.io/podset-", "-topology"

Body = Mapping[str, Any]
Warnings = tuple[tuple[str, str], ...]


def object_warnings(body: Body) -> Warnings:
    """Give reasons and sentences about a job whose spec can be used."""
    return (*_scaled_to_zero(body), *_topology(body))


def _scaled_to_zero(body: Body) -> Warnings:
    """Whoever sets spec.replicas through the scale subresource is named among the managers of its field."""
    if mapping(body.get("spec")).get("replicas"):
        return ()
    if not any(_scales(entry) for entry in mappings(mapping(body.get("metadata")).get("managedFields"))):
        return ()
    text = (
        "spec.replicas was set to 0 by kubectl scale, or by an autoscaler, which means no ceiling: the job grows to its maximum; to "
        "stop it set spec.runPolicy.suspend to true"
    )
    return (("ScaledToZero", text),)


def _scales(entry: Body) -> bool:
    fields = mapping(mapping(entry.get("fieldsV1")).get("f:spec"))
    return entry.get("subresource") == "scale" and "f:replicas" in fields


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
    return (("TopologyIgnored", text),)


def _is_topology(name: str) -> bool:
    return name.startswith(TOPOLOGY_PREFIX) and name.endswith(TOPOLOGY_SUFFIX)
