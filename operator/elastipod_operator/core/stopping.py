"""Stop the workers of a generation: drain them, then stop them hard, then give up their pods."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from .actions import Action, StopWorkers
from .context import Context
from .leavers import is_told_for_a_checkpoint, told_to_leave
from .names import PodId
from .next_generation import has_begun_next, next_number, next_rank
from .pod_removal import remove
from .record import Depth, Record, RestartMode, TransitionKind
from .recovery import widen_restart
from .replica import MAX_GENERATION, Health, Replica
from .root_cause import attribute_to_outside, attribute_to_own_end
from .snapshot import AgentState, Policy
from .time_order import earliest

# After the deadline of the drain: first the agent ends the workers by itself, then the operator orders it, then the pod goes.
HARD_STOP_AFTER = timedelta(seconds=15)
GIVE_UP_AFTER = timedelta(seconds=45)
# In a recovery in memory an agent is not ready before a new process has been built beside those that it keeps. It allows that as long
# (its --inprocess-timeout) and then ends them all by itself.
SUCCESSORS_WITHIN = timedelta(minutes=10)
# Agents get time-outs in whole seconds and do not all act at the same instant.
FORCED_END = timedelta(seconds=2)
RECHECK_AFTER = timedelta(seconds=1)


def stop_members(record: Record, context: Context) -> tuple[Record, list[Action], datetime | None]:
    """Stop the workers of every replica that is alive; a replica that does not stop in time is given up.

    Gives the record with the losses, the stops, and when to check again; None when no replica is awaited.
    """
    policy, replicas, now = context.policy, context.replicas, context.now
    actions: list[Action] = []
    wakes: list[datetime] = []
    members = record.member_set
    given_up: list[PodId] = []
    for member in record.members:
        record = attribute_to_own_end(
            attribute_to_outside(record, member, replicas.get(member)), member, replicas.get(member)
        )
    record = widen_restart(record, replicas)
    for replica in replicas.by_id.values():
        if has_begun_next(replica, record):
            continue
        is_left = _must_end_kept(replica, record) if replica.is_idle else replica.id in members or replica.is_busy
        if replica.has_no_workers or not is_left:
            continue
        due = _due(replica, record, policy)
        # Quota must be returned even if all agents are silent: Kueue waits for it, and a kubelet ends pods without their agents.
        must_go = context.grant.is_suspended or replica.id.slot in replicas.quota_lost
        give_up_at = due + GIVE_UP_AFTER
        if not must_go and _may_wait_for_successors(replica, record):
            give_up_at += SUCCESSORS_WITHIN
        is_given_up = now >= give_up_at and (must_go or not replicas.all_silent)
        if replica.health is Health.LOST or is_given_up:
            if replica.id not in record.lost_set:
                given_up.append(replica.id)
                actions += remove(replica, "its agent did not stop its workers in time")
            continue
        hard_at = _hard_stop_at(replica, record, context, due)
        next_step = earliest(*(at for at in (hard_at, due + HARD_STOP_AFTER, give_up_at) if at > now))
        wakes.append(max(next_step or now, now + RECHECK_AFTER))
        may_save = now < hard_at and runs_this_generation(replica, record, members)
        actions += _stops(replica, record, due, now, told_to_leave(replica, record, context), may_save=may_save)
    if given_up:
        record = replace(record, lost=(*record.lost, *given_up))
    return record, actions, earliest(*wakes)


def _may_wait_for_successors(replica: Replica, record: Record) -> bool:
    """Whether an agent that answers keeps workers for the next generation, and may still build successors of others."""
    transition = record.transition
    assert transition is not None
    is_in_memory = transition.kind is TransitionKind.RECOVERY and transition.depth is Depth.MEMORY
    builds = replica.agent.state is AgentState.STOPPING and replica.health is not Health.SILENT
    return is_in_memory and builds and replica.id in record.member_set


def _must_end_kept(replica: Replica, record: Record) -> bool:
    """Whether the workers of a stopped replica wait for the next generation with what they hold in memory, and must not."""
    transition = record.transition
    assert transition is not None
    is_deep = transition.kind is TransitionKind.RECOVERY and transition.depth is not Depth.MEMORY
    waits = replica.agent.state is AgentState.READY and bool(replica.agent.num_kept)  # new processes hold nothing
    return is_deep and waits and replica.agent.memory_state != "" and replica.id in record.member_set


def is_hard_stop_due(record: Record, now: datetime) -> bool:
    """Whether agents now kill workers that have not drained: later failures are a consequence of that."""
    assert record.transition is not None
    return now >= record.transition.deadline - FORCED_END


def runs_this_generation(replica: Replica, record: Record, members: frozenset[PodId]) -> bool:
    """Whether its workers belong to the present generation; a late /start may have begun an older one."""
    return replica.id in members and replica.runs(record.generation)


def hard_stop(replica: Replica, record: Record) -> StopWorkers:
    """Give the call that ends a replica's workers at once, whatever their generation.

    Afterwards the agent refuses every /start up to the generation in this call, so an impossible generation is never sent.
    """
    generation = replica.agent.generation
    named = record.generation if generation is None or generation > MAX_GENERATION else generation
    transition = record.transition
    reach = transition.reach if transition is not None else RestartMode.IN_PROCESS
    # A member that took the /start of an older generation late may hold the only state that the present one is to begin with.
    depth = transition.depth if transition is not None else record.phase_times.depth
    keeps = depth == Depth.MEMORY and (transition is not None or replica.id in record.member_set)
    return StopWorkers(replica.pod.name, named, graceful=False, timeout_s=0, reach=reach, keeps=keeps)


def _due(replica: Replica, record: Record, policy: Policy) -> datetime:
    """Give the time by which a replica's workers must have stopped.

    An agent that became reachable only after the transition began gets the full time from then on: no replica is stopped hard
    or given up before it was asked to drain.
    """
    transition = record.transition
    assert transition is not None
    since = replica.agent.answering_since or replica.agent.trying_since
    if since is None or since <= transition.began_at:
        return transition.deadline
    grace = policy.graceful_timeout if transition.graceful else timedelta(0)
    return max(transition.deadline, since + grace)


def _hard_stop_at(replica: Replica, record: Record, context: Context, due: datetime) -> datetime:
    """Give when a drain ends for a replica by order of the operator.

    An agent whose pod leaves ends workers that drain late. One that was told so only for the sake of a checkpoint may hold the only
    state that is left, so its workers return to the barrier before.
    """
    transition = record.transition
    assert transition is not None
    is_kept = transition.depth is Depth.MEMORY and is_told_for_a_checkpoint(replica, record, context)
    return due - FORCED_END if is_kept else due + HARD_STOP_AFTER


def _stops(
    replica: Replica, record: Record, due: datetime, now: datetime, leaves: bool | None, *, may_save: bool
) -> list[Action]:
    transition = record.transition
    assert transition is not None
    if replica.health is Health.SILENT:
        return []
    if not (replica.is_busy or replica.agent.state is AgentState.STOPPING):
        return [hard_stop(replica, record)] if _must_end_kept(replica, record) else []
    if not (transition.graceful and may_save) or replica.agent.state in (AgentState.FAULTED, AgentState.COMPLETED):
        return [hard_stop(replica, record)]
    if replica.agent.state is AgentState.STOPPING and not _is_told_again(replica, record, leaves):
        return []
    left = max(1, int((due - now).total_seconds()))
    keeps = transition.depth is Depth.MEMORY
    return [
        StopWorkers(
            replica.pod.name, record.generation, graceful=True, timeout_s=left, leaves=leaves, keeps=keeps,
            next_rank=next_rank(replica, record),
        )
    ]  # fmt: skip


def _is_told_again(replica: Replica, record: Record, leaves: bool | None) -> bool:
    """Whether an agent that drains is called again, because what it was told has changed: its workers may not have stopped yet.

    It got a later deadline, was told that its pod stays, or knows of another generation that follows.
    """
    transition, agent = record.transition, replica.agent
    assert transition is not None
    is_to_go = bool(leaves) and transition.leavers is not None and replica.id not in transition.leaver_set
    follows_another = agent.can_begin_next and agent.next_generation != next_number(replica, record)
    return agent.generation is not None and (transition.is_shortened or is_to_go or follows_another)
