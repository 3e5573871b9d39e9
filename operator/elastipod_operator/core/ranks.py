"""Which replicas train, and with which group rank; how many pods can train together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from .grant import Grant
from .names import PodId
from .record import Record, RestartMode
from .replica import Replica


def rank_order(candidates: list[Replica], record: Record, grant: Grant) -> list[Replica]:
    """Order replicas by group rank: base spec before elastic spec, surviving members in their old order, new replicas last."""
    spec_at = {spec.name: at for at, spec in enumerate(grant.specs)}
    old = {member: at for at, member in enumerate(record.members)}
    last = len(old)

    def key(replica: Replica) -> tuple[int, int, PodId]:
        return spec_at.get(replica.id.spec, len(spec_at)), old.get(replica.id, last), replica.id

    return sorted(candidates, key=key)


def usable(candidates: list[Replica], record: Record, grant: Grant) -> list[Replica]:
    """Give the replicas that may train, in the order of their group ranks: at most the limit of each spec, the rest are spares.

    Without the minimum of the base spec, give only its pods: too few to train.
    """
    left = {spec.name: spec.limit for spec in grant.specs}
    chosen: list[Replica] = []
    for replica in rank_order(candidates, record, grant):
        if left.get(replica.id.spec, 0) > 0:
            left[replica.id.spec] -= 1
            chosen.append(replica)
    if lacks_base((r.id for r in chosen), grant):
        return [r for r in chosen if r.id.spec == grant.specs[0].name]
    return chosen


def in_vacated_ranks(chosen: list[Replica], record: Record) -> list[Replica]:
    """Give newcomers the group ranks of those whom they replace, where processes live on without `elastipod.State`.

    Such processes, of an in-process restart, hold what belongs to their rank, such as a shard or a stage of a pipeline, and none of it
    is sent to another one. In a change of size, ranks move all the same.
    """
    there = {replica.id: replica for replica in chosen}
    lives_on = any(_is_bound_to_rank(there[member]) for member in record.members if member in there)
    if len(chosen) != len(record.members) or not lives_on:
        return chosen
    newcomers = [replica for replica in chosen if replica.id not in record.member_set]
    placed: list[Replica] = []
    for member in record.members:
        if member not in there:
            alike = [one for one in newcomers if one.id.spec == member.spec]
            if not alike:
                return chosen
            placed.append(next((one for one in alike if one.id.slot == member.slot), alike[0]))
            newcomers.remove(placed[-1])
        else:
            placed.append(there[member])
    return placed


def _is_bound_to_rank(replica: Replica) -> bool:
    agent = replica.agent
    return agent.restart_mode in (RestartMode.IN_PROCESS, RestartMode.LOCAL) and not agent.memory_state


def count_trainable(pods: Collection[PodId], grant: Grant) -> int:
    """Count the pods that may train together: 0 without the minimum of the base spec."""
    return 0 if lacks_base(pods, grant) else count_within_limits(pods, grant)


def count_within_limits(pods: Collection[PodId], grant: Grant) -> int:
    """Count pods: at most the limit of each spec, and at most the largest size."""
    number = Counter(pod.spec for pod in pods)
    return min(grant.sizes.maximum, sum(min(spec.limit, number[spec.name]) for spec in grant.specs))


def base_minimum(grant: Grant) -> int:
    """Count the pods of the base spec that training needs: the minimum size, at most the limit of the spec."""
    return min(grant.sizes.minimum, grant.specs[0].limit)


def lacks_base(pods: Iterable[PodId], grant: Grant) -> bool:
    """Whether too few of these pods belong to the base spec to train."""
    return sum(pod.spec == grant.specs[0].name for pod in pods) < base_minimum(grant)
