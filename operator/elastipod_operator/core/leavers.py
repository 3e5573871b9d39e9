"""Who leaves in a planned change of size.

The choice is made before the workers stop, and it is in the state record before the first /stop. Workers with sharded state therefore
know the ranks to which they can hand over their shards, and the next generation consists of the replicas that were told to stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from datetime import datetime

from .context import Context
from .names import PodId, Slot
from .ranks import lacks_base, rank_order, usable
from .record import Depth, Record, Transition, TransitionKind
from .replica import Health, Replica, Replicas
from .snapshot import REPLICATED, SHARDED, AgentState, Policy
from .time_order import latest

# A fault in a resize brings those back who were to leave. After so many in a row the next one does not, so that the job shrinks.
MAX_RESIZES_UNDONE = 3


def choose_leavers(record: Record, context: Context, target_size: int) -> tuple[PodId, ...]:
    """Give the members that do not train in the next generation of this size, by the rule that chooses who does.

    Those who must go always leave. Where too few would be left to train, nobody else does: the others wait for replacements.
    """
    replicas = context.replicas
    must_go = {m for m in record.members if (r := replicas.get(m)) is None or not _may_stay(r, context)}
    ready = _usable_without(must_go, record, context)
    if context.grant.sizes.fit(len(ready)):
        must_go.update(frozenset(record.members).difference(r.id for r in ready[:target_size]))
    return tuple(m for m in record.members if m in must_go)


def told_as_leavers(record: Record, context: Context, leavers: tuple[PodId, ...]) -> tuple[PodId, ...]:
    """Give the members that are told that they leave: all, where those who stay could not train at once, so that a checkpoint is saved.

    They would wait for a replacement with the only copy of the newest state, and be deleted with it when the user suspends the job or
    their node is drained next. Their workers wait at the barrier all the same. Those with shards are told the truth: they hand them over.
    """
    members = [r for m in record.members if (r := context.replicas.get(m)) is not None]
    if not any(r.agent.memory_state == REPLICATED for r in members):
        return leavers
    can_train = context.grant.sizes.fit(len(_usable_without(frozenset(leavers), record, context))) > 0
    return leavers if can_train else record.members


def _usable_without(leaving: Collection[PodId], record: Record, context: Context) -> list[Replica]:
    """Give the replicas that could train once these members have left: the others, and newcomers that are ready."""
    replicas, known = context.replicas, frozenset(record.members)
    staying = [r for m in record.members if m not in leaving and (r := replicas.get(m)) is not None]
    newcomers = [r for r in replicas.candidates() if r.id not in known]
    return usable([*staying, *newcomers], record, context.grant)


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
    return None if transition.leavers is None else replica.id in transition.leaver_set


def is_told_for_a_checkpoint(replica: Replica, record: Record, context: Context) -> bool:
    """Whether a member was told that it leaves although it may stay, because all members save a checkpoint (`told_as_leavers`)."""
    return record.all_leave and replica.agent.memory_state == REPLICATED and _may_stay(replica, context)


def next_members(record: Record, context: Context, ready: list[Replica], size: int) -> list[Replica]:
    """Choose who begins the next generation, in the order of group ranks; nobody if nobody can. ready: who may, of whom size are wanted.

    Those who hold shards come first, because they may hold the only copy of a part of the state: in a planned change those who were told
    that they stay, after a fault all members, and so when one that was to stay has lost what it held. They begin it even if some of
    them must leave by now, or the job must be smaller: it changes from there, when the shards of those who leave can be handed over.
    Where each member holds the whole state, one of those who do begins it, even if it was to leave. One that must go does not: the job
    would have to change again at once, before any other holds the state.
    """
    chosen = _next_members(record, context, ready, size)
    holder = _left_out_holder(record, context.replicas, chosen)
    if holder is None:
        return chosen
    able = list({r.id: r for r in (*ready, holder)}.values())
    return _led_by([holder], able, context.policy.sizes.fit(len(able)), record, context) or chosen


def _next_members(record: Record, context: Context, ready: list[Replica], size: int) -> list[Replica]:
    transition = record.transition
    if transition is None:
        return ready[:size]
    holders = members_with_shards(record, context.replicas)
    if transition.kind is TransitionKind.RECOVERY:
        wanted = ready[:size]
        if {r.id for r in holders} <= {r.id for r in wanted}:
            return wanted
        return _led_by(holders, _that_may_begin(record, context, ready), size, record, context) or wanted
    if transition.leavers is None:
        return ready[:size]
    stayed = record.member_set - transition.leaver_set
    told = [r for r in holders if r.id in stayed]
    may_undo = transition.depth is Depth.MEMORY and record.resizes_undone < MAX_RESIZES_UNDONE
    if may_undo and len(told) < len(stayed) and len(holders) > len(told):
        undone = _led_by(holders, _that_may_begin(record, context, ready), size, record, context)
        if undone:
            return undone
    return _led_by(told, ready, size, record, context) or ready[:size]


def undoes_resize(transition: Transition, chosen: list[Replica], wanted: list[Replica]) -> bool:
    """Whether a generation has members that a planned change was to leave out, because of what they hold."""
    brought_back = {replica.id for replica in chosen}.difference(replica.id for replica in wanted)
    if transition.kind is TransitionKind.RECOVERY:
        return bool(brought_back)
    return not brought_back.isdisjoint(transition.leaver_set)


def members_with_shards(record: Record, replicas: Replicas) -> list[Replica]:
    """Give the members that wait at the barrier with shards for a change in memory, also those that were to leave.

    Nobody is given after a fault if the last ones have undone as many resizes as they may: a hand-over may fail again and again.
    """
    transition = record.transition
    if transition is None or transition.depth is not Depth.MEMORY:
        return []
    if transition.kind is TransitionKind.RECOVERY and record.resizes_undone >= MAX_RESIZES_UNDONE:
        return []
    members = (replicas.get(m) for m in record.members)
    return [r for r in members if r is not None and _waits_with_shards(r)]


def kept_until_the_start(record: Record, replicas: Replicas, policy: Policy) -> dict[PodId, datetime]:
    """Give the members that the next generation may bring back, and until when their pods stay.

    Those that must go come back only after a fault, with shards, and stay for no longer than a stop takes.
    """
    transition = record.transition
    if transition is None or transition.depth is not Depth.MEMORY or not _may_come_back(record, transition, replicas):
        return {}
    soon = transition.deadline
    late = latest(soon, transition.detected_at + policy.faulty_timeout, transition.not_before) or soon
    back = [r for m in record.members if (r := replicas.get(m)) is not None and _takes_start(r)]
    if not _brings_shards_back(record, transition, replicas):
        back = [r for r in back if r.health is not Health.DISRUPTED]
    return {r.id: soon if r.health is Health.DISRUPTED else late for r in back}


def _may_come_back(record: Record, transition: Transition, replicas: Replicas) -> bool:
    """Whether the next generation may need members that were to leave, for what they hold."""
    if _brings_shards_back(record, transition, replicas):
        return True
    left = transition.leaver_set
    others = [r for r in replicas.candidates() if r.id not in left]
    return _left_out_holder(record, replicas, others) is not None


def _brings_shards_back(record: Record, transition: Transition, replicas: Replicas) -> bool:
    return transition.kind is TransitionKind.RECOVERY and bool(members_with_shards(record, replicas))


def _left_out_holder(record: Record, replicas: Replicas, chosen: list[Replica]) -> Replica | None:
    """Give a member that holds the whole state for a change in memory and need not go, if none of the chosen replicas does; else None."""
    transition = record.transition
    if transition is None or transition.depth is not Depth.MEMORY or any(map(_waits_with_state, chosen)):
        return None
    left, members = transition.leaver_set, record.member_set - record.lost_set
    holders = [r for r in replicas.candidates() if r.id in members and _waits_with_state(r)]
    return min(holders, key=lambda r: r.id in left, default=None)


def slots_for_shards(record: Record, context: Context) -> list[Slot]:
    """Give the slots of the members while a recovery waits for a size with room for all who hold shards: a replacement may make one.

    Those who must go are not replaced for it.
    """
    transition, replicas, quota = record.transition, context.replicas, context.grant.workloads
    is_recovery = transition is not None and transition.kind is TransitionKind.RECOVERY
    if (
        transition is None
        or not is_recovery
        or record.window_since is None
        or not members_with_shards(record, replicas)
    ):
        return []
    if context.now >= transition.detected_at + context.policy.faulty_timeout:
        return []
    doomed = {slot for slot, replica in replicas.newest.items() if replica.health is Health.DISRUPTED}
    slots = [member.slot for member in record.members]
    return [slot for slot in slots if slot not in doomed and (quota is None or slot in quota)]


def _led_by(holders: list[Replica], ready: list[Replica], size: int, record: Record, context: Context) -> list[Replica]:
    """Give a generation with all of these and some of the ready ones; nobody where no size is possible.

    Other members come before newcomers, then those who have left, then those who must go.
    """
    transition = record.transition
    if transition is None or not (holders or size):
        return []
    held, left = {r.id for r in holders}, transition.leaver_set
    stayed = record.member_set - left
    others = [r for r in ready if r.id not in held]
    others.sort(key=lambda r: (r.health is Health.DISRUPTED, r.id not in stayed, r.id in left))
    others = _within_limits(others, holders, record, context)
    best = _size_with(len(holders), len(holders) + len(others), size, transition, context)
    chosen = rank_order([*holders, *others[: best - len(holders)]], record, context.grant)
    return chosen if best and not lacks_base((r.id for r in chosen), context.grant) else []


def _that_may_begin(record: Record, context: Context, ready: list[Replica]) -> list[Replica]:
    """Give the ready ones, and all members and replacements that could begin, even if they must go or are more than wanted."""
    replicas = context.replicas
    others = (found for m in record.members for found in (replicas.get(m), replicas.newest.get(m.slot)))
    able = [*ready, *(r for r in others if r is not None and _takes_start(r))]
    return list({r.id: r for r in able}.values())


def _within_limits(others: list[Replica], holders: list[Replica], record: Record, context: Context) -> list[Replica]:
    """Give those that fit beside the holders: of each spec as many as its limit, or as trained together before."""
    before = Counter(m.spec for m in record.members)
    left = Counter({spec.name: max(spec.limit, before[spec.name]) for spec in context.grant.specs})
    left.subtract(r.id.spec for r in holders)
    fitting: list[Replica] = []
    for replica in others:
        if left[replica.id.spec] > 0:
            left[replica.id.spec] -= 1
            fitting.append(replica)
    return fitting


def _size_with(fewest: int, most: int, size: int, transition: Transition, context: Context) -> int:
    """Give the size of a generation with at least so many members; 0 where there is none.

    Where the spec has none, the size of the decided change will do, and after a fault that of the generation that it has ended.
    """
    possible = (size, context.policy.sizes.fit(most), transition.target_size, transition.from_size)
    return next((each for each in possible if each and fewest <= each <= most), 0)


def _waits_with_shards(replica: Replica) -> bool:
    """Whether its workers are at the barrier, with shards, and its agent takes a /start."""
    return _takes_start(replica) and replica.agent.memory_state == SHARDED and bool(replica.agent.num_kept)


def _waits_with_state(replica: Replica) -> bool:
    """Whether its workers are at the barrier, with the whole state, and its agent takes a /start."""
    return _takes_start(replica) and replica.agent.memory_state == REPLICATED and bool(replica.agent.num_kept)


def _takes_start(replica: Replica) -> bool:
    agent = replica.agent
    is_there = replica.health in (Health.GOOD, Health.DISRUPTED) and agent.state is AgentState.READY
    return is_there and not agent.terminating and not replica.cannot_run_again
