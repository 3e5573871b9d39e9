"""The workers of a generation run: what ends it, what changes it, and who is to be started yet."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from .actions import Action, AssignSpare, JobEvent, StartWorkers
from .avoided_nodes import drop_expired_faults, next_fault_expiry
from .context import Context, PlanDraft, awaits_start, begin, drain_limit, finish, suspension
from .escalation import close_window, next_window_end
from .faults import answers_count_from, find_fault, start_limit
from .growth import growth_window
from .health import Health, Replica
from .membership import earliest, room_for
from .partial_gangs import follow_partial_gang, next_gang_check
from .payback import record_resize_pause
from .record import Record, TransitionKind
from .snapshot import AgentState
from .stopping import hard_stop, runs_this_generation
from .transition import in_transition, recover

RECHECK_AFTER = timedelta(seconds=1)


def running(record: Record, context: Context) -> PlanDraft:
    """Decide for a job whose workers run, or were told to."""
    record = close_window(record, context.policy, context.now)
    fault = find_fault(record, context.replicas)
    if fault is not None:
        return recover(record, context, fault)
    members = [replica for member in record.members if (replica := context.replicas.get(member)) is not None]
    if _all_completed(members, record):
        message = f"all {len(members)} replicas finished"
        return finish(record, context, "Completed", "Completed", message)
    planned = _planned_change(record, context, members)
    if planned is not None:
        return in_transition(planned, context)
    record, wake = growth_window(record, context, members)
    if record.transition is not None:
        return in_transition(record, context)
    return _keep_running(record, context, members, wake)


def _all_completed(members: list[Replica], record: Record) -> bool:
    return len(members) == len(record.members) and all(r.finished(record.generation) for r in members)


def _planned_change(record: Record, context: Context, members: list[Replica]) -> Record | None:
    """Begin a drain when the user, a node or the API server asks for one; None when nobody does."""
    policy = context.policy
    size = len(record.members)
    if policy.suspend:
        return suspension(record, context)
    disrupted = [r for r in (_without_quota(r, context) for r in members) if r.health is Health.DISRUPTED]
    if disrupted:
        healthy = {r.id for r in members}.difference(r.id for r in disrupted)
        ready = {r.id for r in context.replicas.candidates()}
        target_size = policy.sizes.fit(room_for(healthy | ready, policy)) or policy.sizes.minimum
        limit = drain_limit(disrupted, context)
        return begin(
            record,
            context,
            TransitionKind.RESIZE,
            disrupted[0].why,
            _summary(disrupted),
            target_size=target_size,
            limit=limit,
        )
    if 0 < policy.sizes.fit(size) < size:
        return begin(
            record, context, TransitionKind.RESIZE, *_why_shrink(size, context), target_size=policy.sizes.fit(size)
        )
    drained = [
        r for r in members if r.agent.state is AgentState.READY and r.agent.drained and r.runs(record.generation)
    ]
    if drained:
        message = f"the workers of pod {drained[0].pod.name} were asked to stop by somebody else and did"
        return begin(record, context, TransitionKind.RESIZE, "DrainedFromOutside", message, target_size=size)
    return None


def _why_shrink(size: int, context: Context) -> tuple[str, str]:
    """Say why so many may not train any more: the user's wish, or quota that goes while a spare trains in its pods' places."""
    policy = context.policy
    if policy.requested_sizes.fit(size) < size:
        return (
            "ScaledByUser",
            f"{size} replicas are not an allowed size any more; the next one is {policy.sizes.fit(size)}",
        )
    taken = next((w for w in context.snapshot.workloads if w.number and w.eviction_reason), None)
    if taken is not None:
        return taken.eviction_reason, f"Kueue takes quota back: {taken.eviction_message}"
    return "QuotaLost", f"there is only quota for {policy.sizes.fit(size)} of {size} replicas"


def _without_quota(replica: Replica, context: Context) -> Replica:
    """Give a member whose quota is taken back as doomed, also while its agent does not answer: it must leave all the same."""
    quota_lost = context.snapshot.quota_lost.get(replica.id.slot)
    if quota_lost is None or replica.health is not Health.SILENT:
        return replica
    cause, sentence = quota_lost
    return replace(replica, health=Health.DISRUPTED, why=cause, detail=sentence)


def _summary(disrupted: list[Replica]) -> str:
    more = f" (and {len(disrupted) - 1} more)" if len(disrupted) > 1 else ""
    return disrupted[0].detail + more


def _keep_running(record: Record, context: Context, members: list[Replica], wake: datetime | None) -> PlanDraft:
    """Start what has not started yet; note the moment at which everybody runs; follow what runs out by itself."""
    actions: list[Action] = []
    for rank, member in enumerate(record.members):
        replica = context.replicas.get(member)
        if replica is None or not awaits_start(replica, record):
            if replica is not None and record.running_since is None:
                wake = earliest(wake, start_limit(replica, record))  # it is told nothing as long as it stops
            continue
        if record.running_since is None or replica.agent.generation is None:
            actions.append(StartWorkers(replica.pod.name, rank))
        else:  # it has run this generation: if it is a new process, it must never run it a second time
            wake = earliest(wake, max(answers_count_from(record), context.now + RECHECK_AFTER))
    ids = frozenset(record.members)
    for replica in context.replicas.by_id.values():
        if replica.is_busy and not runs_this_generation(replica, record, ids):
            actions.append(hard_stop(replica, record))
    actions += _spares(record, context)
    policy, now = context.policy, context.now
    record = drop_expired_faults(record, policy, now)
    record, events = follow_partial_gang(record, context.replicas, policy, now, context.key, refused=context.is_refused)
    due = earliest(
        wake,
        next_window_end(record, policy, now),
        next_fault_expiry(record, policy, now),
        next_gang_check(record, context.key, now),
    )
    draft = PlanDraft(record, tuple(actions), events, wake_at=due)
    if record.running_since is None and _all_run(members, record):
        return replace(_mark_running(draft, context), wake_at=now)  # what is ready already may open the growth window
    return draft


def _spares(record: Record, context: Context) -> list[Action]:
    """Tell the spares of each spec what they are, so that they may prepare; they stay ready."""
    found: list[Action] = []
    if record.running_since is None or not any(spec.spares for spec in context.policy.specs):
        return found
    members = frozenset(record.members)
    for spec in context.policy.specs:
        idle = [r for r in context.replicas.candidates() if r.id.spec == spec.name and r.id not in members]
        for number, replica in enumerate(sorted(idle, key=lambda r: r.id)[: spec.spares]):
            agent = replica.agent
            is_told = agent.is_spare and agent.generation == record.generation
            if agent.generation is not None and not is_told:  # agents of another make would start their workers
                found.append(AssignSpare(replica.pod.name, len(record.members) + number))
    return found


def _all_run(members: list[Replica], record: Record) -> bool:
    return len(members) == len(record.members) and all(
        r.agent.state in (AgentState.RUNNING, AgentState.COMPLETED) and r.runs(record.generation) for r in members
    )


def _mark_running(draft: PlanDraft, context: Context) -> PlanDraft:
    record = draft.record
    recovered = record.fault_at is not None
    settled = replace(
        record_resize_pause(record, context.now),
        running_since=context.now,
        started_at=record.started_at or context.now,
        recovered_at=context.now if recovered else record.recovered_at,
        resized_at=context.now if record.generation > 1 and not recovered else record.resized_at,
        fault_at=None,
    )
    if record.size_before_growth:
        settled = replace(settled, size_before_growth=0, resize_failures=0, resize_failed_at=None)
    event = JobEvent("Running", f"{len(record.members)} replicas train in generation {record.generation}")
    return replace(draft, record=settled, running_since=context.now, events=(*draft.events, event))
