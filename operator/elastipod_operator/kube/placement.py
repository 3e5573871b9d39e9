"""What the admission of a Workload adds to its pods: flavors, admission checks, topology (docs/design/queues.md). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.names import ANNOTATION_WORKLOAD
from .reading import is_within_depth, mapping, mappings, name_of, text, texts
from .workloads import GROUP, TOPOLOGY_ANNOTATIONS, UNCONSTRAINED

LABEL_POD_SET = f"{GROUP}/podset"
TOPOLOGY_GATE = f"{GROUP}/topology"

Body = Mapping[str, Any]


class PlacementError(Exception):
    """Pods cannot be created as Kueue assigned them; the text is one sentence."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What is added to a pod."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Body, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    gates: tuple[str, ...] = ()


def assignment_of(workload: Body, spec: str) -> Body:
    """Give what Kueue assigned to the pods of a spec; empty for nothing."""
    return next((a for a in _assignments(workload) if a.get("name") == spec), {})


def flavors_of(workload: Body) -> list[str]:
    """Give the names of all flavors on which a Workload is admitted."""
    return list(dict.fromkeys(name for assigned in _assignments(workload) for name in _flavors(assigned)))


def _assignments(workload: Body) -> list[Body]:
    return mappings(mapping(mapping(workload.get("status")).get("admission")).get("podSetAssignments"))


def _flavors(assigned: Body) -> list[str]:
    """Give the names of the flavors of an assignment, each once."""
    return list(dict.fromkeys(texts(assigned.get("flavors")).values()))


def first_domain(workload: Body, spec: str) -> dict[str, str]:
    """Give one topology domain to which Kueue assigned pods of a spec, as values by level; empty for none."""
    assigned = mapping(assignment_of(workload, spec).get("topologyAssignment"))
    slices = mappings(assigned.get("slices")) or [{}]
    values = mappings(slices[0].get("valuesPerLevel"))
    return {
        level: found
        for level, one in zip(_list(assigned.get("levels")), values, strict=False)
        if (found := _first(one))
    }


def _first(values: Body) -> str:
    if text(values.get("universal")):
        return text(values["universal"])
    several = mapping(values.get("individual"))
    roots = _list(several.get("roots")) or [""]
    return f"{text(several.get('prefix'))}{roots[0]}{text(several.get('suffix'))}"


def _list(found: Any) -> list[str]:
    return [one for one in found if isinstance(one, str)] if isinstance(found, list | tuple) else []


def node_labels(workload: Body, spec: str, flavors: Mapping[str, Body]) -> dict[str, str]:
    """Give the node labels of the flavors that the pods of a spec run on. Raises PlacementError."""
    merged: dict[str, str] = {}
    for name in _flavors(assignment_of(workload, spec)):
        if name not in flavors:
            raise PlacementError(
                f"ResourceFlavor {name}, on which Workload {name_of(workload)} is admitted, does not exist"
            )
        labels = texts(mapping(flavors[name].get("spec")).get("nodeLabels"))
        _merge(merged, labels, "node label", f"ResourceFlavor {name}", "another flavor")
    return merged


def placement(workload: Body, spec: str, template: Body, flavors: Mapping[str, Body]) -> Placement:
    """Compute what is added to the pods of a spec. template: theirs. Raises PlacementError if settings contradict each other."""
    meta, pod = mapping(template.get("metadata")), mapping(template.get("spec"))
    own_labels, own_notes = texts(meta.get("labels")), texts(meta.get("annotations"))
    own = texts(pod.get("nodeSelector"))
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    selector: dict[str, str] = {}
    _merge(selector, node_labels(workload, spec, flavors), "nodeSelector", "the flavor", "the template", own)
    assigned = assignment_of(workload, spec)
    tolerations = [
        t for name in _flavors(assigned) for t in mappings(mapping(flavors[name].get("spec")).get("tolerations"))
    ]
    gates: tuple[str, ...] = ()
    if assigned.get("topologyAssignment") or assigned.get("delayedTopologyRequest"):
        gates = (TOPOLOGY_GATE,)
        annotations |= _topology(own_notes)
    for check, update in _updates(workload, spec):
        who = f"admission check {check}"
        _merge(labels, texts(update.get("labels")), "label", who, "the template", own_labels)
        _merge(annotations, texts(update.get("annotations")), "annotation", who, "the template", own_notes)
        _merge(selector, texts(update.get("nodeSelector")), "nodeSelector", who, "the template or a flavor", own)
        tolerations += mappings(update.get("tolerations"))
    if not is_within_depth(tolerations, 5):
        raise PlacementError(
            f"the tolerations that Kueue assigned to pods of {spec} are invalid; check the flavors of the queue"
        )
    present = mappings(pod.get("tolerations"))
    return Placement(
        node_selector=selector,
        tolerations=tuple(t for at, t in enumerate(tolerations) if t not in present and t not in tolerations[:at]),
        labels={**labels, LABEL_POD_SET: spec},
        annotations={**annotations, ANNOTATION_WORKLOAD: name_of(workload)},
        gates=gates,
    )


def place(manifest: dict[str, Any], placed: Placement | None) -> None:
    """Add a placement to a pod, after removing what would make Kueue treat the pod as a job of its own."""
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
    """Give the annotations by which Kueue finds the pods of a topology request: without them the pods would stay gated."""
    kept = {name: text(annotations[name]) for name in TOPOLOGY_ANNOTATIONS if annotations.get(name)}
    return kept or {UNCONSTRAINED: "true"}


def _updates(workload: Body, spec: str) -> Iterable[tuple[str, Body]]:
    for check in mappings(mapping(workload.get("status")).get("admissionChecks")):
        for update in mappings(check.get("podSetUpdates")):
            if update.get("name") == spec:
                yield text(check.get("name")), update


def _merge(
    into: dict[str, str], more: Mapping[str, str], what: str, who: str, other: str, own: Mapping[str, str] | None = None
) -> None:
    for key, value in more.items():
        present = into.get(key, (own or {}).get(key))
        if present is not None and present != value:
            raise PlacementError(
                f"{who} sets {what} {key}={value} for the pods, but {other} sets {key}={present}; make them agree"
            )
        into[key] = value
