"""Planned stops: suspension, disruption, a size that is no longer allowed, and a stop that another client requested."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta

from .context import Context
from .depth import depth_of_change, waits_for_new_processes
from .faults import START_LIMIT, STOP_TIME
from .leavers import choose_leavers, told_as_leavers
from .next_generation import decide_early
from .payback import record_step_time
from .ranks import count_trainable
from .reasons import AnyReason, Reason, ReasonAndMessage
from .record import SUSPENDED_BY_USER, Depth, Record, Transition, TransitionKind
from .recovery import count_progress
from .replica import Health, Replica
from .snapshot import SHARDED, AgentState
from .wording import counted, share

# Time for a pod to exit by itself after its workers have ended, before it is killed.
KILL_MARGIN = timedelta(seconds=5)


def drain_limit(replicas: Iterable[Replica], context: Context) -> datetime | None:
    """Give the latest end of a drain: shortly before the first of these replicas is killed; None: not known."""
    times: list[datetime] = []
    for replica in replicas:
        node = context.snapshot.nodes.get(replica.pod.node)
        times += [at for at in (replica.pod.kill_at, node.leaves_at if node is not None else None) if at is not None]
    return min(times) - KILL_MARGIN if times else None


def begin(
    record: Record,
    context: Context,
    kind: TransitionKind,
    cause: AnyReason,
    message: str,
    *,
    target_size: int,
    limit: datetime | None = None,
) -> Record:
    """Begin a planned change: a drain if the workers have progress to save, else a hard stop."""
    leavers = true_leavers = choose_leavers(record, context, target_size) if kind is TransitionKind.RESIZE else None
    choice = depth_of_change(record, context.replicas, context.policy, kind, leavers or ())
    if leavers is not None and choice.depth is Depth.MEMORY:
        leavers = told_as_leavers(record, context, leavers)
    # Workers that wait for new processes are at no step to drain after; what they hold in memory lives through a hard stop too.
    # With shards they drain when all train: only then can those who leave hand theirs over.
    is_whole = not any(
        r.agent.memory_state == SHARDED for m in record.members if (r := context.replicas.get(m)) is not None
    )
    holds = choice.depth is Depth.MEMORY and is_whole and waits_for_new_processes(record, context.replicas)
    graceful = _has_work_to_save(record, context) and not holds
    deadline = context.now + (context.policy.graceful_timeout if graceful else STOP_TIME)
    if limit is not None:
        deadline = max(context.now, min(deadline, limit))
    is_decided = graceful and choice.depth is Depth.MEMORY and leavers is not None and leavers == true_leavers
    following = decide_early(record, context, leavers) if is_decided and leavers is not None else None
    transition = Transition(
        kind=kind, cause=cause, message=message, from_size=len(record.members), target_size=target_size, began_at=context.now,
        detected_at=context.now, deadline=deadline, graceful=graceful, depth=choice.depth, depth_reason=choice.reason,
        depth_code=choice.code,
        leavers=leavers, next_generation=following,
    )  # fmt: skip
    record = count_progress(record_step_time(record, context.replicas), context.replicas, context.now)
    newest_told = record.newest_told if following is None else following.generation
    return replace(record, transition=transition, newest_told=newest_told, window_since=None, gang=None)


def _has_work_to_save(record: Record, context: Context) -> bool:
    """Whether the workers can save a checkpoint: not between two generations, nor before every member has started.

    Members that have not answered a new operator yet count as running. So do silent members: an answer from before their start
    says nothing about now.
    """
    if record.transition is not None:
        return False
    members = [r for m in record.members if (r := context.replicas.get(m)) is not None]
    heard = [r for r in members if r.health is not Health.SILENT]
    return not all(r.is_idle for r in members) and not any(awaits_start(r, record) for r in heard)


def awaits_start(replica: Replica, record: Record) -> bool:
    """Whether a member has not taken the /start of the present generation yet."""
    if replica.agent.state not in (AgentState.READY, AgentState.INIT):
        return False
    return replica.agent.generation is None or replica.agent.generation < record.generation


def suspension(record: Record, context: Context) -> Record:
    """Begin to stop all workers because the user or the queue suspends the job."""
    suspended_by = context.grant.suspended_by
    cause, message = (
        (SUSPENDED_BY_USER, "the user suspended the job")
        if suspended_by is None
        else (suspended_by.reason, suspended_by.message)
    )
    return begin(record, context, TransitionKind.SUSPEND, cause, message, target_size=0)


def planned_change(record: Record, context: Context, members: list[Replica]) -> Record | None:
    """Begin a drain if the job is suspended, a member is disrupted, or the size is no longer allowed; else None."""
    grant = context.grant
    size = len(record.members)
    if _starts_from_memory(record, members, context):
        return None
    if grant.is_suspended:
        return suspension(record, context)
    disrupted = [r for r in (_without_quota(r, context) for r in members) if r.health is Health.DISRUPTED]
    if disrupted:
        healthy = {r.id for r in members}.difference(r.id for r in disrupted)
        ready = {r.id for r in context.replicas.candidates()}
        target_size = grant.sizes.fit(count_trainable(healthy | ready, grant)) or grant.sizes.minimum
        limit = drain_limit(disrupted, context)
        return begin(
            record,
            context,
            TransitionKind.RESIZE,
            disrupted[0].cause,
            _summary(disrupted),
            target_size=target_size,
            limit=limit,
        )
    if 0 < grant.sizes.fit(size) < size:
        return begin(
            record, context, TransitionKind.RESIZE, *_why_shrink(size, context), target_size=grant.sizes.fit(size)
        )
    drained = [
        r for r in members if r.agent.state is AgentState.READY and r.agent.drained and r.runs(record.generation)
    ]
    if drained:
        message = f"the workers of pod {drained[0].pod.name} were stopped by another client"
        return begin(record, context, TransitionKind.RESIZE, Reason.DRAINED_FROM_OUTSIDE, message, target_size=size)
    return None


def _starts_from_memory(record: Record, members: list[Replica], context: Context) -> bool:
    """Whether workers that are just being started hold the only copy of the state: they can save it once all of them run.

    Those with shards can hand them over then, too. A member that does not start ends the wait.
    """
    if record.running_since is not None or context.grant.suspended_by is not None:
        return False
    began_at = record.generation_began_at
    if began_at is None or context.now >= began_at + START_LIMIT:
        return False
    if context.grant.is_suspended:
        return any(r.agent.memory_state for r in members)
    if any(awaits_start(r, record) and r.agent.terminating for r in members):
        return False
    return any(r.agent.memory_state == SHARDED for r in members)


def _why_shrink(size: int, context: Context) -> ReasonAndMessage:
    """Give cause and message of a size that is too large now: the user scaled the job, or quota was lost."""
    policy, grant = context.policy, context.grant
    if policy.sizes.fit(size) < size:
        return (
            Reason.SCALED_BY_USER,
            f"{counted(size, 'replica')}: no longer an allowed size; the next smaller one is {grant.sizes.fit(size)}",
        )
    taken = next((w for w in context.snapshot.workloads if w.number and w.eviction_reason), None)
    if taken is not None:
        return taken.eviction_reason, f"Kueue evicts an increment: {taken.eviction_message}"
    return Reason.QUOTA_LOST, f"only {share(grant.sizes.fit(size), size, 'has', 'have')} quota"


def _without_quota(replica: Replica, context: Context) -> Replica:
    """Treat a silent member whose quota is lost as disrupted: it must leave whether its agent answers or not."""
    quota_lost = context.grant.quota_lost.get(replica.id.slot)
    if quota_lost is None or replica.health is not Health.SILENT:
        return replica
    cause, sentence = quota_lost
    return replace(replica, health=Health.DISRUPTED, cause=cause, detail=sentence)


def _summary(disrupted: list[Replica]) -> str:
    more = f" (and {len(disrupted) - 1} more)" if len(disrupted) > 1 else ""
    return disrupted[0].detail + more
