"""What a pod takes of a quota, as Kueue counts it but for the limits of its namespace. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import ROUND_CEILING
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from ..core.queue_facts import Amounts, PodRequests

Body = Mapping[str, Any]

# Kubernetes counts in 64 bits.
MOST = 1000 * 2**63


def thousandths(quantity: Any) -> int | None:
    """Read a quantity of Kubernetes as thousandths of its unit, rounded up; None when there is none, or it cannot be read.

    The CRD lets any exponent through: what is beyond all that Kubernetes counts with is not read, and never written out.
    """
    if not isinstance(quantity, int | float | str) or isinstance(quantity, bool):
        return None
    try:
        value = parse_quantity(quantity) * 1000  # type: ignore[no-untyped-call]  # the client has no annotations here
    except (ValueError, ArithmeticError):
        return None
    return int(value.to_integral_value(ROUND_CEILING)) if value.is_finite() and abs(value) < MOST else None


def pod_needs(spec: Body) -> tuple[PodRequests, ...]:
    """Give what a pod of each replicaSpec takes."""
    return tuple(
        _needs(str(one["name"]), (one.get("template") or {}).get("spec") or {}) for one in spec["replicaSpecs"]
    )


def _needs(name: str, pod: Body) -> PodRequests:
    """Containers run together, with the sidecars; other starters run before them, each with the sidecars before it."""
    total = _sum(_requests(c) for c in pod.get("containers") or ())
    sidecars: dict[str, int] = {}
    first: dict[str, int] = {}
    for one in pod.get("initContainers") or ():
        if one.get("restartPolicy") == "Always":
            sidecars = _sum((sidecars, _requests(one)))
            first = _larger(first, sidecars)
        else:
            first = _larger(first, _sum((sidecars, _requests(one))))
    whole = _larger(_sum((total, sidecars)), first)
    whole = _larger(whole, _amounts((pod.get("resources") or {}).get("requests")))
    amounts: Amounts = tuple(sorted(_sum((whole, _amounts(pod.get("overhead")))).items()))
    selector = pod.get("nodeSelector") or {}
    return PodRequests(name, amounts, tuple(sorted((str(k), str(v)) for k, v in selector.items())))


def _requests(container: Body) -> dict[str, int]:
    """Where no request is named the limit is one."""
    resources = container.get("resources") or {}
    return {**_amounts(resources.get("limits")), **_amounts(resources.get("requests"))}


def _amounts(listed: Any) -> dict[str, int]:
    found = listed if isinstance(listed, Mapping) else {}
    return {str(name): amount for name, one in found.items() if (amount := thousandths(one)) is not None}


def _sum(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0) + amount
    return total


def _larger(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}
