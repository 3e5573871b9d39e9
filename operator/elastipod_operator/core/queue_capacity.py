"""How much of a job a queue could ever hold, were it empty and all that can be borrowed were lent.

It errs on the side of more: limits of namespaces and taints of flavors are not looked at, so that nobody is warned in vain.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from .caches import limited_cache
from .queue_facts import FlavorCapacity, Labels, PodRequests
from .quota import QuotaRequest, quota_requests_for
from .sizes import Allowed
from .snapshot import SpecLimits

Group = tuple[FlavorCapacity, ...]
PODS = "pods"
ONE = 1000
# Flavors, resources and sizes by which answers are kept, of all jobs together: some 100 bytes each.
ANSWERS_KEPT = 50_000


def _arguments(
    _: object, groups: tuple[Group, ...], needs: tuple[PodRequests, ...], sizes: Allowed | int, __: object
) -> int:
    """What an answer was worked out from is kept with it."""
    rooms = sum(1 + len(flavor.labels) + len(flavor.most) for group in groups for flavor in group)
    wanted = sum(1 + len(need.amounts) + len(need.selector) for need in needs)
    return 1 + rooms + wanted + (len(sizes) if isinstance(sizes, tuple) else 1)


@limited_cache(ANSWERS_KEPT, _arguments)
def largest_size(
    groups: tuple[Group, ...], needs: tuple[PodRequests, ...], allowed: Allowed, specs: tuple[SpecLimits, ...]
) -> tuple[int, str]:
    """Give the largest allowed size that can ever be admitted, 0 for none, and the resource that is short of the next one."""
    requests = quota_requests_for(allowed, specs)
    least, scarce = len(requests), ""
    for group in groups:
        number, what = _in_group(group, {need.spec: need for need in needs}, requests)
        if number < least:
            least, scarce = number, what
    return (allowed[least - 1] if least else 0), scarce


@limited_cache(ANSWERS_KEPT, _arguments)
def most_replicas(
    groups: tuple[Group, ...], needs: tuple[PodRequests, ...], below: int, specs: tuple[SpecLimits, ...]
) -> int:
    """Give how many replicas could be admitted as one gang of fewer than `below`."""

    def is_too_large(size: int) -> bool:
        return largest_size(groups, needs, (size,), specs)[0] == 0

    return bisect_right(range(1, below), False, key=is_too_large)


def _in_group(group: Group, needs: Mapping[str, PodRequests], requests: Sequence[QuotaRequest]) -> tuple[int, str]:
    """Give how many shares, from the base on, fit into the flavors of a group, and what is short of the next."""
    keys = {key for flavor in group for key, _ in flavor.labels}
    known = {resource for flavor in group for resource, _ in flavor.most}
    asked = [
        [(needs[spec], count, _asked(needs[spec], count, known)) for spec, count in s.counts if spec in needs]
        for s in requests
    ]
    if not asked[0] or not any(amounts for pods in asked for _, _, amounts in pods):
        return len(requests), ""
    several = len(needs) > 1
    best = (-1, "")
    for flavor in group:
        if not _matches(flavor, asked[0][0][0].selector, keys):
            continue
        # Increments go where the base is: its flavor's labels are put upon them. Specs may differ in where they go.
        near = group if several else tuple(f for f in group if _matches(f, flavor.labels, keys))
        best = max(best, _filled(flavor, near, [[amounts for _, _, amounts in pods] for pods in asked]))
    return (
        best if best[0] >= 0 else (len(requests), "")
    )  # no flavor of nodes that it wants is another matter than quota


def _filled(first: FlavorCapacity, near: Group, asked: Sequence[Sequence[Counter[str]]]) -> tuple[int, str]:
    """Give how many shares fit when the base begins in `first`: each gang of a spec into one flavor, all into all."""
    rooms = [dict(flavor.most) for flavor in near]
    total: Counter[str] = Counter()
    for room in rooms:
        total.update(room)
    used: Counter[str] = Counter()
    for number, pods in enumerate(asked):
        for at, amounts in enumerate(pods):
            used.update(amounts)
            choice = [dict(first.most)] if number == at == 0 else rooms
            short = [_short(amounts, room) for room in choice]
            if all(short) or _short(used, total):
                return number, _short(used, total) or short[0]
    return len(asked), ""


def _short(amounts: Mapping[str, int], room: Mapping[str, int]) -> str:
    return next((resource for resource, amount in amounts.items() if amount > room.get(resource, 0)), "")


def _asked(need: PodRequests, count: int, known: Iterable[str]) -> Counter[str]:
    """Give what so many pods take of the resources that the group covers; Kueue counts the pods too where it does."""
    one = {**dict(need.amounts), PODS: ONE}
    return Counter({resource: one[resource] * count for resource in sorted(known) if one.get(resource)})


def _matches(flavor: FlavorCapacity, wanted: Labels, keys: Iterable[str]) -> bool:
    """Whether pods that want these node labels may use a flavor; Kueue looks at labels that flavors of the group have."""
    labels = dict(flavor.labels)
    return all(labels.get(key) == value for key, value in wanted if key in keys)
