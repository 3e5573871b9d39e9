"""The generation that follows a drain in memory, where it is decided before the workers stop.

Agents are told of it with /stop, and begin it by themselves as soon as their workers have drained; newcomers get its /start at once. So
no turn of the operator falls into the pause. The record has it before the first agent is told, and takes it over once all members that
stay have begun it. Whatever happens before that withdraws it: those who have begun it return to the barrier with what they hold, and
the next generation is decided as without it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from .actions import StartWorkers
from .context import Context
from .names import PodId
from .ranks import in_vacated_ranks, usable
from .record import NextGeneration, Record
from .replica import Health, Replica, Replicas
from .snapshot import SHARDED, AgentState

# The record takes a generation over after its first step, or so long after its last member began it: writes would prolong the pause.
FIRST_STEP_PATIENCE = timedelta(seconds=1)


def new_generation(record: Record, replicas: Replicas, chosen: Sequence[Replica]) -> NextGeneration:
    """Give a generation of these replicas, in the order of their group ranks, with a number that no other one has.

    Newcomers take the ranks of those whom they replace, where `in_vacated_ranks` says so.
    """
    chosen = in_vacated_ranks(list(chosen), record)
    number = 1 + max(record.generation, record.newest_told, replicas.highest_generation())
    return NextGeneration(
        generation=number,
        members=tuple(r.id for r in chosen),
        master_addr=chosen[0].pod.ip,
        agents_serve_store=_can_serve_store(chosen),
    )


def decide_early(record: Record, context: Context, leavers: Collection[PodId]) -> NextGeneration | None:
    """Decide who trains after a drain in memory that begins now; None where that is better decided when all have stopped.

    leavers: members that do not train any more. The agents of all others must be able to begin the generation by themselves.
    """
    replicas, known, leave = context.replicas, record.member_set, frozenset(leavers)
    staying = [replicas.get(m) for m in record.members if m not in leave]
    if not staying or not all(r is not None and _can_begin(r, record) for r in staying):
        return None
    newcomers = [r for r in replicas.candidates() if r.id not in known and r.id not in record.lost_set]
    if any(r.agent.warming for r in newcomers):  # growth leaves them out, other changes do not
        return None
    ready = usable([*(r for r in staying if r is not None), *newcomers], record, context.grant)
    chosen = ready[: context.grant.sizes.fit(min(len(ready), context.grant.sizes.maximum))]
    if len([r for r in chosen if r.id in known]) < len(staying):
        return None
    return new_generation(record, replicas, chosen)


def _can_begin(replica: Replica, record: Record) -> bool:
    agent = replica.agent
    is_there = replica.health is Health.GOOD and agent.state is AgentState.RUNNING and not agent.terminating
    is_kept = bool(agent.memory_state) and agent.can_begin_next
    return is_there and is_kept and agent.generation == record.generation


def _can_serve_store(chosen: Sequence[Replica]) -> bool:
    """Whether the workers of these replicas can meet at a store of an agent: all agents know it, and have the same key of the job."""
    return all(replica.agent.can_serve_store for replica in chosen) and len({one.pod.key_secret for one in chosen}) == 1


def next_of(record: Record) -> NextGeneration | None:
    """Give the generation that follows the drain, if agents are told of one. None for what no operator has written."""
    following = record.transition.next_generation if record.transition is not None else None
    is_valid = following is not None and following.generation > record.generation and bool(following.members)
    return following if is_valid else None


def next_rank(replica: Replica, record: Record) -> int | None:
    """Give a replica's group rank in the generation that follows the drain; None for none."""
    following = next_of(record)
    return following.ranks.get(replica.id) if following is not None else None


def next_number(replica: Replica, record: Record) -> int | None:
    """Give the generation that a replica's agent is to begin by itself after the drain; None for none."""
    following = next_of(record)
    return following.generation if following is not None and replica.id in following.ranks else None


def has_begun_next(replica: Replica | None, record: Record) -> bool:
    """Whether an agent has begun the generation that follows the drain."""
    number = next_number(replica, record) if replica is not None else None
    return replica is not None and number is not None and replica.agent.generation == number


def _staying(record: Record, replicas: Replicas) -> list[Replica | None]:
    """Give those members that also train after the drain."""
    following = next_of(record)
    return [replicas.get(member) for member in record.members if following is not None and member in following.ranks]


def is_under_way(record: Record, replicas: Replicas) -> bool:
    """Whether all members that stay have begun the generation that follows the drain."""
    staying = _staying(record, replicas)
    return bool(staying) and all(has_begun_next(replica, record) for replica in staying)


def takes_over_at(record: Record, replicas: Replicas, now: datetime) -> datetime | None:
    """Give until when the record waits for the first step of a generation that a member has begun; None if it does not.

    The status waits as long.
    """
    begun = [r for r in replicas.by_id.values() if has_begun_next(r, record)]
    if any(r.health is not Health.GOOD or r.agent.state is not AgentState.RUNNING for r in begun):
        return None
    if any(r.agent.step is not None for r in begun):
        return None
    old = frozenset(record.members)  # newcomers begin while the others still drain
    until = max(
        (r.agent.generation_at for r in begun if r.id in old and r.agent.generation_at is not None), default=None
    )
    return until + FIRST_STEP_PATIENCE if until is not None and now < until + FIRST_STEP_PATIENCE else None


def without_next(record: Record) -> Record:
    """Have nobody begin the generation that agents were told of."""
    transition = record.transition
    assert transition is not None
    return replace(record, transition=replace(transition, next_generation=None))


def without_void_next(record: Record, context: Context) -> Record:
    """Withdraw the generation that follows the drain if it could not train any more, or is not wanted."""
    following, transition = next_of(record), record.transition
    if following is None or transition is None:
        return record
    members = [context.replicas.get(member) for member in following.members]
    is_wanted = transition.graceful and not context.grant.is_suspended
    if is_wanted and all(r is not None and _can_train(r, record) for r in members):
        # Those who were told that they stay with their shards begin it in any case: others may have handed theirs over to them.
        holds_shards = any(r is not None and r.agent.memory_state == SHARDED for r in members)
        if holds_shards or _is_allowed(members, context):
            return record
    return without_next(record)


def _can_train(replica: Replica, record: Record) -> bool:
    agent = replica.agent
    is_lost = replica.health in (Health.LOST, Health.ENDED) or replica.id in record.lost_set or replica.cannot_run_again
    has_failed = has_begun_next(replica, record) and agent.state is not AgentState.RUNNING
    return not (is_lost or has_failed or agent.terminating)


def _is_allowed(members: Sequence[Replica | None], context: Context) -> bool:
    """Whether a job may have these members now: nobody must go, and its size is allowed."""
    may_stay = all(
        r is not None and r.health is not Health.DISRUPTED and r.id.slot not in context.replicas.quota_lost
        for r in members
    )
    return may_stay and context.grant.sizes.fit(len(members)) == len(members)


def early_starts(record: Record, replicas: Replicas) -> list[StartWorkers]:
    """Start the newcomers of the generation that follows the drain, which have nothing to stop."""
    following = next_of(record)
    if following is None:
        return []
    known = frozenset(record.members)
    newcomers = ((rank, replicas.get(m)) for rank, m in enumerate(following.members) if m not in known)
    return [
        StartWorkers(r.pod.name, rank, is_early=True)
        for rank, r in newcomers
        if r is not None and r.ready and (r.agent.generation or 0) < following.generation
    ]
