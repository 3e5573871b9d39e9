"""Workloads of Kueue: requests and their status (docs/design/queues.md). Pure.

The templates in a Workload contain only what decides about quota and placement: no variables, no secrets, and nothing else
that could make Kueue reject it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from ..core.actions import CreateWorkload
from ..core.names import API_VERSION, KIND, LABEL_INCREMENT, LABEL_JOB, LABEL_QUEUE_PRIORITY, workload_name
from ..core.reasons import NO_REASON, as_reason
from ..core.snapshot import ObservedJob, ObservedWorkload
from .reading import mapping, mappings, name_of, text, uid_of
from .times import time_or

GROUP = "kueue.x-k8s.io"
VERSION = "v1beta2"
LABEL_OF_JOB = f"{GROUP}/job-uid"
ANNOTATION_TEMPLATES = "elastipod.io/templates"

# The fields of a pod that Kueue counts, or compares with the labels and taints of its flavors.
POD_FIELDS = (
    "nodeSelector", "affinity", "tolerations", "runtimeClassName", "overhead", "resources", "resourceClaims",
)  # fmt: skip
PLACE_FIELDS = ("nodeSelector", "affinity", "tolerations")
# Increments rank below every base, even of less important jobs.
INCREMENTS_BAND = -1_000_000_000
BAND_WIDTH = 1_000_000
CLASS_OF_QUEUES = "WorkloadPriorityClass"

REQUIRED = f"{GROUP}/podset-required-topology"
PREFERRED = f"{GROUP}/podset-preferred-topology"
UNCONSTRAINED = f"{GROUP}/podset-unconstrained-topology"
SLICE_REQUIRED = f"{GROUP}/podset-slice-required-topology"
SLICE_SIZE = f"{GROUP}/podset-slice-size"
TOPOLOGY_ANNOTATIONS = (REQUIRED, PREFERRED, UNCONSTRAINED, SLICE_REQUIRED, SLICE_SIZE)

Body = Mapping[str, Any]
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


# -- requests


@dataclass(frozen=True, slots=True)
class PrioritySource:
    """The class that gives a Workload its priority; without a name, the default of the cluster."""

    kind: str = "PriorityClass"
    name: str = ""


@dataclass(frozen=True, slots=True)
class Priority:
    """A Workload's priority and the class that it names; no class for a number alone."""

    value: int
    kind: str = ""
    name: str = ""


def base_priority_source(job: Body, spec: Body) -> PrioritySource:
    """Give the source of a base's priority: labels of the job, then those of its templates, then the pods' class."""
    templates = [mapping(s.get("template")) for s in spec["replicaSpecs"]]
    owners = [mapping(job.get("metadata")), *(mapping(t.get("metadata")) for t in templates)]
    for meta in owners:
        name = mapping(meta.get("labels")).get(LABEL_QUEUE_PRIORITY)
        if name:
            return PrioritySource(CLASS_OF_QUEUES, text(name))
    return PrioritySource(name=_class_of(templates[0]))


def own_priority_source(spec: Body, order: CreateWorkload) -> PrioritySource | None:
    """Give the class of an increment if all its pods belong to an elastic spec whose class differs from the base spec; else None."""
    base, *others = spec["replicaSpecs"]
    names = [name for name, count in order.counts if count]
    if not order.number or len(names) != 1:
        return None
    elastic = next((s for s in others if s["name"] == names[0]), None)
    name = _class_of(mapping(elastic.get("template"))) if elastic is not None else ""
    return PrioritySource(name=name) if name and name != _class_of(mapping(base.get("template"))) else None


def increment_priority(base: int) -> Priority:
    """Give the priority of the increments of a job: the same order among jobs as that of their bases, but in a lower band."""
    return Priority(INCREMENTS_BAND + max(-BAND_WIDTH, min(BAND_WIDTH, base)))


def workload_manifest(
    job: ObservedJob,
    spec: Body,
    order: CreateWorkload,
    priority: Priority,
    pins: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Any]:
    """Give the Workload to create. spec: the one in effect. pins: node labels by spec that its pods require."""
    pod_sets = [_pod_set(s, count, (pins or {}).get(s["name"], {})) for s, count in _asked(spec, order.counts) if count]
    wanted: dict[str, Any] = {"queueName": order.queue, "priority": priority.value, "podSets": pod_sets}
    if (named := class_ref(priority)) is not None:
        wanted["priorityClassRef"] = named
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": job.name, "uid": job.uid, "controller": True}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "Workload",
        "metadata": {
            "name": workload_name(job.name, job.uid, order.number),
            "namespace": job.namespace,
            "labels": {LABEL_OF_JOB: job.uid, LABEL_JOB: job.name, LABEL_INCREMENT: str(order.number)},
            "annotations": {ANNOTATION_TEMPLATES: templates_digest(spec, [name for name, n in order.counts if n])},
            "ownerReferences": [{**owner, "blockOwnerDeletion": True}],
        },
        "spec": wanted,
    }


def class_ref(priority: Priority) -> dict[str, str] | None:
    """Give the reference to a priority's class; None for a number alone."""
    if not priority.name:
        return None
    group = GROUP if priority.kind == CLASS_OF_QUEUES else "scheduling.k8s.io"
    return {"group": group, "kind": priority.kind, "name": priority.name}


def templates_digest(spec: Body, names: Sequence[str]) -> str:
    """Give a digest of the stripped templates of these specs."""
    parts = {
        s["name"]: (stripped(mapping(s.get("template"))), _topology_of(mapping(s.get("template"))))
        for s in spec["replicaSpecs"]
        if s["name"] in names
    }
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def stripped(template: Body) -> dict[str, Any]:
    """Give the part of a template's spec that decides about quota and placement."""
    pod = mapping(template.get("spec"))
    kept = {name: pod[name] for name in POD_FIELDS if pod.get(name) is not None}
    kept["containers"] = [_container(c, at) for at, c in enumerate(mappings(pod.get("containers")) or [{}])]
    starters = [
        _container(c, at, ("restartPolicy", "resources")) for at, c in enumerate(mappings(pod.get("initContainers")))
    ]
    return {**kept, "initContainers": starters} if starters else kept


def is_placed_alike(one: Body, other: Body) -> bool:
    """Whether two replicaSpecs request the same nodes."""
    specs = [mapping(mapping(s.get("template")).get("spec")) for s in (one, other)]
    return all((specs[0].get(name) or None) == (specs[1].get(name) or None) for name in PLACE_FIELDS)


def required_level(spec: Body, name: str) -> str:
    """Give the topology level at which all pods of a spec must share a domain; empty for none."""
    found = next(s for s in spec["replicaSpecs"] if s["name"] == name)
    return text(_annotations(mapping(found.get("template"))).get(REQUIRED))


def _asked(spec: Body, counts: tuple[tuple[str, int], ...]) -> list[tuple[Body, int]]:
    by_name = {s["name"]: s for s in spec["replicaSpecs"]}
    return [(by_name[name], count) for name, count in counts]


def _pod_set(spec: Body, count: int, pins: Mapping[str, str]) -> dict[str, Any]:
    template = mapping(spec.get("template"))
    pod = stripped(template)
    if pins:
        pod["nodeSelector"] = {**pins, **(pod.get("nodeSelector") or {})}
    wanted: dict[str, Any] = {"name": spec["name"], "count": count, "template": {"spec": pod}}
    topology = _topology_of(template)
    slice_size = topology.get("podSetSliceSize", 1)
    if count % slice_size:  # Kueue rejects a count that is not a multiple of the slice size
        topology = {key: value for key, value in topology.items() if not key.startswith("podSetSlice")}
    return {**wanted, "topologyRequest": topology} if topology else wanted


def _topology_of(template: Body) -> dict[str, Any]:
    """Read the topology annotations that Kueue supports in its own jobs."""
    found = _annotations(template)
    wish: dict[str, Any] = {}
    if found.get(REQUIRED):
        wish["required"] = found[REQUIRED]
    elif found.get(PREFERRED):
        wish["preferred"] = found[PREFERRED]
    elif text(found.get(UNCONSTRAINED)).lower() == "true":
        wish["unconstrained"] = True
    size = text(found.get(SLICE_SIZE))
    if found.get(SLICE_REQUIRED) and size.isdecimal() and int(size) > 0:
        wish |= {"podSetSliceRequiredTopology": found[SLICE_REQUIRED], "podSetSliceSize": int(size)}
    return wish


def _container(container: Body, at: int, names: tuple[str, ...] = ("resources",)) -> dict[str, Any]:
    kept = {name: container[name] for name in names if container.get(name) is not None}
    return {"name": container.get("name") or f"container-{at}", **kept}


def _class_of(template: Body) -> str:
    return text(mapping(template.get("spec")).get("priorityClassName"))


def _annotations(template: Body) -> Body:
    return mapping(mapping(template.get("metadata")).get("annotations"))


# -- status


def workload_fact(body: Body) -> ObservedWorkload | None:
    """Read a Workload; None if its label does not give its number. Fields that Kueue has not set count as absent."""
    meta, spec, status = mapping(body.get("metadata")), mapping(body.get("spec")), mapping(body.get("status"))
    share = text(mapping(meta.get("labels")).get(LABEL_INCREMENT))
    if not share.isdecimal() or len(share) > 6:
        return None
    created = time_or(meta.get("creationTimestamp"), LONG_AGO)
    conditions = conditions_of(body)
    reserved = is_true(conditions, "QuotaReserved")
    admitted = reserved and is_true(conditions, "Admitted")
    evicted = conditions.get("Evicted", {}) if reserved and is_true(conditions, "Evicted") else {}
    named = mapping(spec.get("priorityClassRef"))
    return ObservedWorkload(
        name=name_of(body),
        uid=uid_of(body),
        number=int(share),
        counts=tuple((text(s.get("name")), _number(s.get("count"), 1)) for s in mappings(spec.get("podSets"))),
        created_at=created,
        queue=text(spec.get("queueName")),
        reserved=reserved,
        admitted=admitted,
        admitted_at=time_or(conditions["Admitted"].get("lastTransitionTime"), created) if admitted else None,
        eviction_reason=as_reason(text(evicted.get("reason")) or "Evicted") if evicted else NO_REASON,
        eviction_message=text(evicted.get("message")),
        evicted_at=time_or(evicted.get("lastTransitionTime"), created) if evicted else None,
        pending_message=_waits(conditions, status),
        pods_ready=is_true(conditions, "PodsReady") if "PodsReady" in conditions else None,
        finished=is_true(conditions, "Finished"),
        is_active=spec.get("active") is not False,
        is_deleting=bool(meta.get("deletionTimestamp")),
        priority=_number(spec.get("priority")),
        class_kind=text(named.get("kind")),
        class_name=text(named.get("name")),
    )


def ranked(fact: ObservedWorkload, job: Body, spec: Body, base: ObservedWorkload | None) -> ObservedWorkload:
    """Compare a Workload's priority with the one that the job requests now. spec: the one in effect. base: the job's.

    Classes are compared by name: Kueue decides what an edited value of a class means for existing Workloads.
    """
    wish = (
        base_priority_source(job, spec)
        if fact.number == 0
        else own_priority_source(spec, CreateWorkload(fact.number, fact.counts, fact.queue))
    )
    if wish is None:  # a number that follows the base
        differs = base is not None and (fact.priority, fact.class_name) != (increment_priority(base.priority).value, "")
        kind = ""
    elif wish.name:
        differs = (fact.class_kind, fact.class_name) != (wish.kind, wish.name)
        kind = wish.kind
    else:  # the cluster's default, if there is one
        differs = fact.class_kind == CLASS_OF_QUEUES
        kind = "PriorityClass"
    # With reserved quota, Kueue only allows a change from one WorkloadPriorityClass to another, or from number to number.
    is_free = not fact.reserved or (fact.class_kind == kind and kind in ("", CLASS_OF_QUEUES))
    return replace(fact, has_outdated_priority=differs, is_priority_fixed=differs and not is_free)


def digest_of(body: Body) -> str:
    """Give the digest of the templates for which a Workload was created; empty if unknown."""
    return str(mapping(mapping(body.get("metadata")).get("annotations")).get(ANNOTATION_TEMPLATES) or "")


def conditions_of(body: Body) -> dict[str, Body]:
    """Give the conditions by type."""
    return {text(c.get("type")): c for c in mappings(mapping(body.get("status")).get("conditions"))}


def is_true(conditions: Mapping[str, Body], kind: str) -> bool:
    """Whether a condition exists and is true."""
    return conditions.get(kind, {}).get("status") == "True"


def _waits(conditions: Mapping[str, Body], status: Body) -> str:
    """Give Kueue's own message why the Workload is not admitted, and those of its admission checks."""
    if is_true(conditions, "QuotaReserved"):
        if is_true(conditions, "Admitted"):
            return ""
        return "; ".join(filter(None, (text(conditions.get("Admitted", {}).get("message")), *_checks(status))))
    return text(conditions.get("QuotaReserved", {}).get("message"))


def _checks(status: Body) -> list[str]:
    open_ones = [c for c in mappings(status.get("admissionChecks")) if c.get("state") != "Ready"]
    return [
        f"admission check {text(c.get('name'))} is {text(c.get('state'))}"
        + (f": {text(c['message'])}" if c.get("message") else "")
        for c in open_ones
    ]


def _number(found: Any, otherwise: int = 0) -> int:
    return found if isinstance(found, int) and not isinstance(found, bool) else otherwise
