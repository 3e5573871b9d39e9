"""Allowed sizes of a job and the largest one that fits."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace

from .model_groups import SINGLE_RANKS, ModelGroups
from .model_groups import Allowed as Allowed
from .wording import counted

# Replicas and spares of one job together. Jobs of up to 10,000 pods are measured; the cost of a decision grows with them.
MAX_REPLICAS = 16_384
# Longer lists of sizes are abbreviated: those of the largest job would take half a megabyte.
MAX_LISTED = 64


class SizeError(ValueError):
    """The requested sizes are impossible; the message is one sentence that names the field."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes at which a job may train.

    allowed: ascending, never empty, all >= 1. start: wanted first size. warnings: sentences for the user. bound: the field
    that sets the maximum, with its value; empty if unknown.
    """

    allowed: Allowed
    start: int
    warnings: tuple[str, ...] = ()
    bound: str = field(default="", compare=False)

    @property
    def minimum(self) -> int:
        return self.allowed[0]

    @property
    def maximum(self) -> int:
        return self.allowed[-1]

    def up_to(self, most: int) -> Allowed:
        """Give the allowed sizes that are not above `most`."""
        return self.allowed[: bisect_right(self.allowed, most)]

    def fit(self, available: int) -> int:
        """Give the largest allowed size that is not above `available`; 0 when even the minimum does not fit."""
        at = bisect_right(self.allowed, available)
        return self.allowed[at - 1] if at else 0


@dataclass(frozen=True, slots=True)
class SizeRequest:
    """The user's settings; nulls and empty lists count as absent (None or ()). groups: only whole ones train."""

    spec_replicas: tuple[int, ...]
    spec_max_replicas: tuple[int | None, ...]
    elastic: bool = False
    min_replicas: int | None = None
    max_replicas: int | None = None
    step: int | None = None
    values: tuple[int, ...] = ()
    ceiling: int = 0
    spares: int = 0
    groups: ModelGroups = SINGLE_RANKS


def resolve(request: SizeRequest) -> Sizes:
    """Compute the allowed sizes. Raises SizeError, with fields and numbers, if there are none.

    Discrete values override a step and are limited to [min, max]. A missing minimum is the sum of replicas, at least 1.
    Sizes whose ranks form no whole model groups are left out.
    `ceiling` (spec.replicas, 0 = unset) bounds the sizes from above; it can never reach below the minimum.
    """
    warnings: list[str] = []
    if request.groups.ranks > 1 and request.groups.workers is None:
        raise SizeError(
            f"spec.elastipod.parallelism is {request.groups.ranks}, but nothing says how many workers a pod has; write "
            "spec.nprocPerNode as a number, or request the devices in the template"
        )
    wanted = max(1, sum(request.spec_replicas))
    if not request.elastic:
        _check_number(wanted, "spec.replicaSpecs[].replicas", request.spares)
        _whole_groups((wanted,), request, warnings)
        fixed = Sizes((wanted,), wanted, bound="spec.replicaSpecs[].replicas without an elasticPolicy")
        return _under_ceiling(fixed, request.ceiling, ())
    low = max(1, request.min_replicas) if request.min_replicas is not None else wanted
    high = _maximum(request, warnings)
    if low > high:
        raise SizeError(
            f"spec.elasticPolicy.minReplicas is {low} but the maximum is {high}; raise maxReplicas or lower minReplicas"
        )
    allowed = _whole_groups(_grid(low, high, request, warnings), request, warnings)
    sizes = Sizes(allowed, 0)
    start = sizes.fit(wanted) or sizes.minimum
    if start != wanted:
        warnings.append(
            f"the job starts at {counted(start, 'replica')}: {wanted} as written is not one of the allowed sizes {_shown(allowed)}"
        )
    return _under_ceiling(Sizes(allowed, start, bound=_bound(request, high)), request.ceiling, tuple(warnings))


def _maximum(request: SizeRequest, warnings: list[str]) -> int:
    declared = [limit for limit in request.spec_max_replicas if limit is not None]
    from_specs = sum(
        max(replicas, limit if limit is not None else replicas)
        for replicas, limit in zip(request.spec_replicas, request.spec_max_replicas, strict=True)
    )
    from_specs = max(1, from_specs)
    of_policy = request.max_replicas
    # If no spec has a maximum, the policy's maximum applies (the last spec grows).
    if of_policy is not None and declared and of_policy != from_specs:
        warnings.append(
            f"spec.elasticPolicy.maxReplicas is {of_policy} but the replicaSpecs add up to {from_specs}; the smaller one applies"
        )
    if of_policy is not None and (not declared or of_policy <= from_specs):
        _check_number(of_policy, "spec.elasticPolicy.maxReplicas", request.spares)
        return of_policy if declared else max(of_policy, 1)
    _check_number(from_specs, "spec.replicaSpecs[].maxReplicas", request.spares)
    return from_specs


def _bound(request: SizeRequest, high: int) -> str:
    """Name the field that sets the maximum of an elastic job."""
    if request.values:
        return "spec.elasticPolicy.replicaDiscreteValues"
    if request.max_replicas is not None and max(request.max_replicas, 1) == high:
        return f"spec.elasticPolicy.maxReplicas={request.max_replicas}"
    return f"spec.replicaSpecs[], which add up to {high}"


def _check_number(replicas: int, field: str, spares: int) -> None:
    """Reject a job with too many pods. field: the one that sets the number of replicas."""
    if replicas > MAX_REPLICAS:
        raise SizeError(f"{field} allows {counted(replicas, 'replica')}; a job has at most {MAX_REPLICAS}, so lower it")
    if replicas + spares > MAX_REPLICAS:
        raise SizeError(
            f"spec.replicaSpecs[].spares adds {counted(spares, 'pod')} to {counted(replicas, 'replica')}; a job has at most "
            f"{MAX_REPLICAS} pods, so lower it or {field}"
        )


def _grid(low: int, high: int, request: SizeRequest, warnings: list[str]) -> Allowed:
    if request.values:
        if request.step is not None:
            warnings.append(
                "spec.elasticPolicy sets replicaIncrementStep and replicaDiscreteValues; replicaDiscreteValues is used"
            )
        kept = tuple(sorted({value for value in request.values if low <= value <= high}))
        if not kept:
            raise SizeError(
                f"spec.elasticPolicy.replicaDiscreteValues {_shown(request.values)} holds no size between the minimum {low} "
                f"and the maximum {high}; add one or change minReplicas or maxReplicas"
            )
        return kept
    step = request.step if request.step is not None else 1
    if step < 1:
        raise SizeError(f"spec.elasticPolicy.replicaIncrementStep is {step}; it must be 1 or more")
    grid = range(low, high + 1, step)
    if grid[-1] != high:
        warnings.append(
            f"spec.elasticPolicy.maxReplicas {high} cannot be reached from {low} in steps of {step}; the largest size is {grid[-1]}"
        )
    return grid if len(grid) > MAX_LISTED else tuple(grid)


def _whole_groups(sizes: Allowed, request: SizeRequest, warnings: list[str]) -> Allowed:
    """Give the sizes whose ranks form whole model groups. Raises SizeError, with sizes that would, if there are none."""
    groups = request.groups
    whole = groups.whole(sizes)
    if not whole:
        raise SizeError(
            f"no size of the job can train: {groups.why_not(sizes[0])}; sizes that fit: {groups.near(sizes[0])}"
        )
    # Without values and step, the user has not asked for sizes between two whole groups.
    is_wished = bool(request.values) or request.step is not None
    if len(whole) < len(sizes) and (is_wished or whole[0] != sizes[0] or whole[-1] != sizes[-1]):
        left_out = next(size for size in sizes if size % groups.replicas)
        warnings.append(f"of the sizes {_shown(sizes)} the job uses {_shown(whole)}: {groups.why_not(left_out)}")
    return whole


def _under_ceiling(sizes: Sizes, ceiling: int, warnings: tuple[str, ...]) -> Sizes:
    if not ceiling:
        return replace(sizes, warnings=warnings)
    if ceiling > sizes.maximum:
        warnings += (
            f"spec.replicas is {ceiling} (kubectl scale sets it), above the largest size {sizes.maximum}, and has no effect; raise "
            "spec.elasticPolicy.maxReplicas and spec.replicaSpecs[].maxReplicas for more",
        )
    kept = sizes.up_to(ceiling)
    if not kept:
        raise SizeError(
            f"spec.replicas is {ceiling}, below the smallest allowed size {sizes.minimum}; "
            f"set at least {sizes.minimum}, or 0 for no ceiling"
        )
    bounded = Sizes(kept, 0)
    bound = f"spec.replicas={ceiling} (kubectl scale)" if kept[-1] < sizes.maximum else sizes.bound
    return Sizes(kept, bounded.fit(sizes.start), warnings, bound)


def _shown(sizes: Allowed) -> str:
    if len(sizes) <= 8:
        return "[" + ", ".join(map(str, sizes)) + "]"
    return f"[{sizes[0]}, {sizes[1]}, ..., {sizes[-1]}]"
