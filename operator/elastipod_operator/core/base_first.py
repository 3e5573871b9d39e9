"""Two replica specs: the base one holds the minimum, so its pods come before those of the other (decision 19)."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from .health import Replica, Replicas
from .names import PodId, Slot
from .record import Record, TransitionKind
from .snapshot import Policy

# So long a pod of the base spec waits for a place before one of the elastic spec gives its own away.
BASE_PATIENCE = timedelta(seconds=60)
# After a fault it waits as long as the user wants replacements to be waited for, but for a scheduler that is a little slow.
LEAST_PATIENCE = timedelta(seconds=5)


def base_minimum(policy: Policy) -> int:
    """Count the pods of the base spec without which nobody trains: the smallest size, as far as the spec may hold it."""
    return min(policy.sizes.minimum, policy.specs[0].limit)


def lacks_base(pods: Iterable[PodId], policy: Policy) -> bool:
    """Whether these pods cannot train, however many there are, because too few of them are of the base spec."""
    return sum(pod.spec == policy.specs[0].name for pod in pods) < base_minimum(policy)


def base_first(
    wanted: list[Slot], record: Record, replicas: Replicas, policy: Policy, now: datetime
) -> tuple[list[Slot], datetime | None]:
    """Leave the elastic pods out in whose places the base could be whole, or give when that falls due.

    Only between two generations, when they cannot train without it. Those of them that wait for a place leave too, or the
    scheduler might give them what others left. All are wanted again once the base has its places.
    """
    base = [slot for slot in wanted if slot.spec == policy.specs[0].name]
    elastic = [slot for slot in wanted if slot.spec != policy.specs[0].name]
    pods = _living(base, replicas)
    waiting = [r for r in pods if not r.pod.node]
    lacking = min(len(waiting), base_minimum(policy) - (len(pods) - len(waiting)))
    transition = record.transition
    if transition is None or lacking <= 0 or not elastic:
        return wanted, None
    is_shrink = transition.kind is TransitionKind.RECOVERY and not transition.recreates_pods
    patience = max(LEAST_PATIENCE, policy.faulty_timeout) if is_shrink else BASE_PATIENCE
    due = min(r.pod.created_at for r in waiting) + patience
    if now < due:
        return wanted, due
    holding = [r.id.slot for r in _living(elastic, replicas) if r.pod.node]
    return [*base, *holding[: max(0, len(holding) - lacking)]], None


def _living(slots: list[Slot], replicas: Replicas) -> list[Replica]:
    found = (replicas.newest.get(slot) for slot in slots)
    return [r for r in found if r is not None and r.may_train]
