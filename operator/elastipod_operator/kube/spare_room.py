"""How many more pods of a template fit on a node, as far as requests, labels, taints and ports tell. Pure.

The scheduler knows more (volumes, spreading, affinity to pods). Where it refuses a node that seems to have room, the pod waits;
it is restricted to such nodes, so no autoscaler adds one for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from kubernetes.utils import quantity

from .observed_node import disruption_of, observe_node, tolerates
from .pods import HOSTNAME
from .reading import labels_of, mapping, mappings, text

Body = Mapping[str, Any]
Amounts = dict[str, Decimal]
NOTHING = Decimal(0)
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


def may_host(template: Body, node: Body, avoids: Sequence[str] = ()) -> bool:
    """Whether the scheduler may place pods of a template's spec on a node at all."""
    seen, tolerations = observe_node(node, None, LONG_AGO), mappings(template.get("tolerations"))
    if not seen.ready or seen.cordoned or seen.closed or seen.name in avoids or not labels_of(node).get(HOSTNAME):
        return False
    if disruption_of(node).reason_for(tolerations):  # pods would have to leave again
        return False
    taints = mappings(mapping(node.get("spec")).get("taints"))
    kept_off = (t for t in taints if t.get("effect") != "PreferNoSchedule")
    if not all(any(tolerates(one, taint) for one in tolerations) for taint in kept_off):
        return False
    labels = labels_of(node)
    if any(labels.get(key) != value for key, value in mapping(template.get("nodeSelector")).items()):
        return False
    required = mapping(mapping(mapping(template.get("affinity")).get("nodeAffinity")).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ))  # fmt: skip
    terms = mappings(required.get("nodeSelectorTerms"))
    return not terms or any(_matches(term, labels, seen.name) for term in terms)


def _matches(term: Body, labels: Mapping[str, str], name: str) -> bool:
    fields = {"metadata.name": name}
    return all(_holds(one, labels) for one in mappings(term.get("matchExpressions"))) and all(
        _holds(one, fields) for one in mappings(term.get("matchFields"))
    )


def _holds(requirement: Body, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(text(requirement.get("key"))), requirement.get("values")
    among = [text(one) for one in values] if isinstance(values, list) else []
    operator = text(requirement.get("operator"))
    if operator in ("Exists", "DoesNotExist"):
        return (operator == "Exists") is (value is not None)
    if operator in ("In", "NotIn"):
        return (operator == "In") is (value in among)
    if value is None or not value.isdecimal() or len(among) != 1 or not among[0].isdecimal():
        return False
    return int(value) > int(among[0]) if operator == "Gt" else int(value) < int(among[0])


def places(template: Body, node: Body, pods: Iterable[Body], most: int) -> int:
    """Give how many more pods of a template's spec fit on a node beside its pods, at most `most`."""
    others = [mapping(pod.get("spec")) for pod in pods]
    ports = _host_ports(template)
    if ports:
        most = 0 if any(ports & _host_ports(other) for other in others) else min(most, 1)
    used = _sum(map(requests_of, others))
    allocatable = _amounts(mapping(mapping(node.get("status")).get("allocatable")))
    # A resource that a node does not list does not exist there.
    free = {name: allocatable.get(name, NOTHING) - used.get(name, NOTHING) for name in requests_of(template)}
    fitting = [int(free[name] // needed) for name, needed in requests_of(template).items() if needed > 0]
    return max(0, min(most, min(fitting, default=most)))


def requests_of(spec: Body) -> Amounts:
    """Give what a pod requests: the sum over its containers, or what an init container needs if that is more."""
    beside: Amounts = {}
    highest: Amounts = {}
    for container in mappings(spec.get("initContainers")):
        needed = _sum([beside, _of_container(container)])
        highest = _each(max, highest, needed)
        if container.get("restartPolicy") == "Always":  # a sidecar, which stays
            beside = needed
    running = _sum([beside, *map(_of_container, mappings(spec.get("containers")))])
    overhead = _amounts(mapping(spec.get("overhead")))
    return _sum([_each(max, highest, running), overhead, {"pods": Decimal(1)}])


def _of_container(container: Body) -> Amounts:
    """Give the requests of a container; a limit without a request is one."""
    resources = mapping(container.get("resources"))
    return _amounts({**mapping(resources.get("limits")), **mapping(resources.get("requests"))})


def _amounts(quantities: Body) -> Amounts:
    """Read quantities; those that cannot be read count as nothing."""
    parse: Callable[[Any], Decimal] = quantity.parse_quantity  # the client has no types
    found: Amounts = {}
    for name, written in quantities.items():
        try:
            found[name] = parse(written)
        except (ValueError, ArithmeticError):
            found[name] = NOTHING
    return found


def _sum(parts: Iterable[Amounts]) -> Amounts:
    total: Amounts = {}
    for part in parts:
        total = _each(lambda a, b: a + b, total, part)
    return total


def _each(combine: Callable[[Decimal, Decimal], Decimal], first: Amounts, second: Amounts) -> Amounts:
    return {name: combine(first.get(name, NOTHING), second.get(name, NOTHING)) for name in first | second}


def _host_ports(spec: Body) -> set[int]:
    """Give the ports of the node that a pod needs for itself."""
    ports = [port for container in mappings(spec.get("containers")) for port in mappings(container.get("ports"))]
    key = "containerPort" if spec.get("hostNetwork") else "hostPort"
    return {port[key] for port in ports if isinstance(port.get(key), int)}
