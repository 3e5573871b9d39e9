"""Who leaves in a planned change of size.

The choice is made before the workers stop, and it is in the state record before the first /stop. Workers with sharded state therefore
know the ranks to which they can hand over their shards, and the next generation consists of the replicas that were told to stay.
"""

from __future__ import annotations

from .context import Context
from .names import PodId
from .ranks import lacks_base, rank_order, usable
from .record import Depth, Record, Transition
from .replica import Health, Replica
from .snapshot import SHARDED, AgentState


def choose_leavers(record: Record, context: Context, target_size: int) -> tuple[PodId, ...]:
    """Give the members that do not train in the next generation of this size, by the rule that chooses who does.

    Those who must go always leave. Where too few would be left to train, nobody else does: the others wait for replacements.
    """
    replicas = context.replicas
    must_go = {m for m in record.members if (r := replicas.get(m)) is None or not _may_stay(r, context)}
    staying = [r for m in record.members if m not in must_go and (r := replicas.get(m)) is not None]
    known = frozenset(record.members)
    newcomers = [r for r in replicas.candidates() if r.id not in known]
    ready = usable([*staying, *newcomers], record, context.grant)
    if context.grant.sizes.fit(len(ready)):
        must_go.update(known.difference(r.id for r in ready[:target_size]))
    return tuple(m for m in record.members if m in must_go)


def _may_stay(replica: Replica, context: Context) -> bool:
    if replica.health is Health.DISRUPTED or replica.cannot_run_again:
        return False
    return replica.id.slot not in context.replicas.quota_lost


def told_to_leave(replica: Replica, record: Record, context: Context) -> bool | None:
    """What a member's workers are told with /stop: whether their pod goes; None where that is not decided yet."""
    if context.grant.is_suspended or not _may_stay(replica, context):
        return True
    transition = record.transition
    assert transition is not None
    return None if transition.leavers is None else replica.id in transition.leavers


def next_members(record: Record, context: Context, ready: list[Replica], size: int) -> list[Replica]:
    """Choose who begins the next generation, in the order of group ranks. ready: who may, of whom size are wanted.

    Those who were told that they stay come first. With shards, they may hold the only copy of a part of the state. So they begin it
    even if some of them must leave by now, or the job must be smaller: it changes from there, when the shards of those who leave can
    be handed over.
    """
    transition = record.transition
    if transition is None or transition.leavers is None:
        return ready[:size]
    holders = _holders(record, transition, context)
    held, left = {r.id for r in holders}, frozenset(transition.leavers)
    stayed = frozenset(record.members) - left
    others = [r for r in ready if r.id not in held]
    others.sort(key=lambda r: (r.id not in stayed, r.id in left))  # then newcomers; who has left may come back
    best = _size_with(len(holders), len(holders) + len(others), size, transition, context)
    chosen = rank_order([*holders, *others[: best - len(holders)]], record, context.grant)
    return chosen if best and not lacks_base((r.id for r in chosen), context.grant) else ready[:size]


def _size_with(fewest: int, most: int, size: int, transition: Transition, context: Context) -> int:
    """Give the size of a generation with at least so many members; 0 where neither the spec nor the decided change has one."""
    possible = (size, context.policy.sizes.fit(most), transition.target_size)
    return next((each for each in possible if fewest <= each <= most), 0)


def _holders(record: Record, transition: Transition, context: Context) -> list[Replica]:
    """Give the members that were told that they stay, and wait at the barrier with their shards."""
    if transition.depth is not Depth.MEMORY:
        return []
    stayed = [context.replicas.get(m) for m in record.members if m not in (transition.leavers or ())]
    return [r for r in stayed if r is not None and _waits_with_shards(r)]


def _waits_with_shards(replica: Replica) -> bool:
    """Whether its workers are at the barrier, with shards, and its agent takes a /start."""
    agent = replica.agent
    is_there = replica.health in (Health.GOOD, Health.DISRUPTED) and agent.state is AgentState.READY
    return is_there and agent.memory_state == SHARDED and bool(agent.num_kept) and not agent.terminating
