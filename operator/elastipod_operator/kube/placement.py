"""What a pod gets from the admission of its Workload (facts of Kueue 5): flavors, admission checks, topology. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.names import ANNOTATION_WORKLOAD
from .workloads import GROUP, TOPOLOGY_ANNOTATIONS, UNCONSTRAINED

LABEL_POD_SET = f"{GROUP}/podset"
TOPOLOGY_GATE = f"{GROUP}/topology"

Body = Mapping[str, Any]


class PlacementError(Exception):
    """Pods cannot be made as Kueue wants them; the text is one sentence."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What is added to a pod."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Body, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    gates: tuple[str, ...] = ()


def assignment_of(workload: Body, spec: str) -> Body:
    """Give what Kueue assigned to the pods of a spec; empty where it did not."""
    admission = (workload.get("status") or {}).get("admission") or {}
    return next((a for a in admission.get("podSetAssignments") or () if a.get("name") == spec), {})


def flavors_of(workload: Body) -> list[str]:
    """Give the names of all flavors on which a Workload is admitted."""
    admission = (workload.get("status") or {}).get("admission") or {}
    assigned = (a.get("flavors") or {} for a in admission.get("podSetAssignments") or ())
    return list(dict.fromkeys(str(name) for flavors in assigned for name in flavors.values()))


def first_domain(workload: Body, spec: str) -> dict[str, str]:
    """Give the values, by level of the topology, of a place where Kueue put a pod of a spec; empty where it did not."""
    assigned = assignment_of(workload, spec).get("topologyAssignment") or {}
    slices = assigned.get("slices") or [{}]
    values = slices[0].get("valuesPerLevel") or ()
    return {
        level: found for level, one in zip(assigned.get("levels") or (), values, strict=False) if (found := _first(one))
    }


def _first(values: Body) -> str:
    if values.get("universal"):
        return str(values["universal"])
    several = values.get("individual") or {}
    roots = several.get("roots") or [""]
    return f"{several.get('prefix') or ''}{roots[0]}{several.get('suffix') or ''}"


def node_labels(workload: Body, spec: str, flavors: Mapping[str, Body]) -> dict[str, str]:
    """Give the node labels of the flavors that the pods of a spec run on. Raises PlacementError."""
    merged: dict[str, str] = {}
    for name in dict.fromkeys((assignment_of(workload, spec).get("flavors") or {}).values()):
        if name not in flavors:
            raise PlacementError(
                f"ResourceFlavor {name}, on which Workload {workload['metadata']['name']} is admitted, does not exist"
            )
        labels = (flavors[name].get("spec") or {}).get("nodeLabels") or {}
        _merge(merged, labels, "node label", f"ResourceFlavor {name}", "another flavor")
    return merged


def placement(workload: Body, spec: str, template: Body, flavors: Mapping[str, Body]) -> Placement:
    """Work out what pods of a spec get. template: theirs. Raises PlacementError where wishes contradict each other."""
    meta, pod = template.get("metadata") or {}, template.get("spec") or {}
    own = pod.get("nodeSelector") or {}
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    selector: dict[str, str] = {}
    _merge(selector, node_labels(workload, spec, flavors), "nodeSelector", "the flavor", "the template", own)
    assigned = assignment_of(workload, spec)
    tolerations = [
        t
        for name in dict.fromkeys((assigned.get("flavors") or {}).values())
        for t in (flavors[name].get("spec") or {}).get("tolerations") or ()
    ]
    gates: tuple[str, ...] = ()
    if assigned.get("topologyAssignment") or assigned.get("delayedTopologyRequest"):
        gates = (TOPOLOGY_GATE,)
        annotations |= _topology(meta.get("annotations") or {})
    for check, update in _updates(workload, spec):
        who = f"admission check {check}"
        _merge(labels, update.get("labels") or {}, "label", who, "the template", meta.get("labels") or {})
        _merge(
            annotations,
            update.get("annotations") or {},
            "annotation",
            who,
            "the template",
            meta.get("annotations") or {},
        )
        _merge(selector, update.get("nodeSelector") or {}, "nodeSelector", who, "the template or a flavor", own)
        tolerations += update.get("tolerations") or ()
    present = pod.get("tolerations") or []
    return Placement(
        node_selector=selector,
        tolerations=tuple(t for at, t in enumerate(tolerations) if t not in present and t not in tolerations[:at]),
        labels={**labels, LABEL_POD_SET: spec},
        annotations={**annotations, ANNOTATION_WORKLOAD: workload["metadata"]["name"]},
        gates=gates,
    )


def place(manifest: dict[str, Any], placed: Placement | None) -> None:
    """Put a placement into a pod, after taking away what Kueue would read as a job of its own."""
    meta, spec = manifest["metadata"], manifest["spec"]
    for part in ("labels", "annotations"):
        meta[part] = {key: value for key, value in meta[part].items() if not key.startswith(f"{GROUP}/")}
    if placed is None:
        return
    meta["labels"].update(placed.labels)
    meta["annotations"].update(placed.annotations)
    if placed.node_selector:
        spec["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **placed.node_selector}
    if placed.tolerations:
        spec["tolerations"] = [*(spec.get("tolerations") or ()), *placed.tolerations]
    if placed.gates:
        spec["schedulingGates"] = [*(spec.get("schedulingGates") or ()), *({"name": name} for name in placed.gates)]


def _topology(annotations: Body) -> dict[str, str]:
    """Give the annotations by which Kueue knows the pods that it is to place: without one it would leave them gated."""
    kept = {name: str(annotations[name]) for name in TOPOLOGY_ANNOTATIONS if annotations.get(name)}
    return kept or {UNCONSTRAINED: "true"}


def _updates(workload: Body, spec: str) -> Iterable[tuple[str, Body]]:
    for check in (workload.get("status") or {}).get("admissionChecks") or ():
        for update in check.get("podSetUpdates") or ():
            if update.get("name") == spec:
                yield str(check.get("name")), update


def _merge(
    into: dict[str, str], more: Mapping[str, str], what: str, who: str, other: str, own: Mapping[str, str] | None = None
) -> None:
    for key, value in more.items():
        present = into.get(key, (own or {}).get(key))
        if present is not None and present != value:
            raise PlacementError(
                f"{who} wants {what} {key}={value} for the pods, and {other} wants {key}={present}; make them agree"
            )
        into[key] = value
