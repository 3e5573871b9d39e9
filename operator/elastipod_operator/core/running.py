"""Decide for a running generation: start its workers, and end it after a fault, for a planned change or for a growth."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from .actions import Action, AssignSpare, JobEvent, StartWorkers
from .avoided_nodes import drop_expired_faults, next_fault_expiry
from .context import Context, PlanDraft
from .ending import finish
from .escalation import close_window, next_window_end
from .faults import START_LIMIT, answers_count_from, find_fault, first_answers_due, start_limit
from .first_step import has_made_step
from .growth import growth_window
from .next_generation import FIRST_STEP_PATIENCE
from .partial_gangs import follow_partial_gang, next_gang_check
from .payback import record_resize_pause
from .planned_change import awaits_start, planned_change
from .reasons import Reason
from .record import Record
from .replica import Health, Replica
from .snapshot import AgentState
from .stopping import hard_stop, runs_this_generation
from .time_order import earliest
from .transition import in_transition, recover
from .wording import counted, training

RECHECK_AFTER = timedelta(seconds=1)


def running(record: Record, context: Context) -> PlanDraft:
    """Decide for a job whose workers run or are being started."""
    record = close_window(record, context.policy, context.now)
    fault = find_fault(record, context.replicas)
    if fault is not None:
        return recover(record, context, fault)
    members = [replica for member in record.members if (replica := context.replicas.get(member)) is not None]
    if _all_completed(members, record):
        message = f"{counted(len(members), 'replica')} finished"
        return finish(record, context, "Completed", Reason.COMPLETED, message)
    due = first_answers_due(record, context.replicas)
    if due is not None:
        return _keep_running(record, context, members, due)
    planned = planned_change(record, context, members)
    if planned is not None:
        return in_transition(planned, context)
    record, wake = growth_window(record, context, members)
    if record.transition is not None:
        return in_transition(record, context)
    return _keep_running(record, context, members, wake)


def _all_completed(members: list[Replica], record: Record) -> bool:
    return len(members) == len(record.members) and all(r.finished(record.generation) for r in members)


def _keep_running(record: Record, context: Context, members: list[Replica], wake: datetime | None) -> PlanDraft:
    """Start workers that have not started yet, note when all of them run, and handle time-outs."""
    actions: list[Action] = []
    for rank, member in enumerate(record.members):
        replica = context.replicas.get(member)
        if replica is None or not awaits_start(replica, record):
            if replica is not None and record.running_since is None:
                wake = earliest(wake, start_limit(replica, record))  # it gets no call while it stops
            continue
        if record.running_since is None or replica.agent.generation is None:
            actions.append(StartWorkers(replica.pod.name, rank))
            is_to_change = replica.health is Health.DISRUPTED or context.grant.is_suspended
            if is_to_change and record.generation_began_at is not None:
                wake = earliest(wake, record.generation_began_at + START_LIMIT)  # planned_change waits for it no longer
        else:  # it has run this generation; a restarted agent must not run it again
            wake = earliest(wake, max(answers_count_from(record), context.now + RECHECK_AFTER))
    ids = frozenset(record.members)
    for replica in context.replicas.by_id.values():
        if replica.is_busy and not runs_this_generation(replica, record, ids):
            actions.append(hard_stop(replica, record))
    actions += _spares(record, context)
    policy, now = context.policy, context.now
    record = drop_expired_faults(record, policy, now)
    record, events = follow_partial_gang(record, context)
    due = earliest(
        wake,
        next_window_end(record, policy, now),
        next_fault_expiry(record, policy, now),
        next_gang_check(record, context.key, now),
    )
    draft = PlanDraft(record, tuple(actions), events, wake_at=due)
    if record.running_since is not None or not _all_run(members, record):
        return draft
    marked_at = _marked_at(members, record, context)
    if marked_at is not None and now < marked_at:
        return replace(draft, wake_at=earliest(due, marked_at))
    return replace(_mark_running(draft, context), wake_at=now)  # pods that are ready already may open the growth window


def _spares(record: Record, context: Context) -> list[Action]:
    """Assign the spares of each spec, so that they can prepare; they stay ready."""
    found: list[Action] = []
    if record.running_since is None or not any(spec.spares for spec in context.grant.specs):
        return found
    members = frozenset(record.members)
    for spec in context.grant.specs:
        idle = [r for r in context.replicas.candidates() if r.id.spec == spec.name and r.id not in members]
        for number, replica in enumerate(sorted(idle, key=lambda r: r.id)[: spec.spares]):
            agent = replica.agent
            is_assigned = agent.is_spare and agent.generation == record.generation
            if agent.generation is not None and not is_assigned:  # other agents would start their workers
                found.append(AssignSpare(replica.pod.name, len(record.members) + number))
    return found


def _all_run(members: list[Replica], record: Record) -> bool:
    return len(members) == len(record.members) and all(
        r.agent.state in (AgentState.RUNNING, AgentState.COMPLETED) and r.runs(record.generation) for r in members
    )


def _marked_at(members: list[Replica], record: Record, context: Context) -> datetime | None:
    """Give until when a generation whose workers all run waits for its first step before it is marked; None if it does not."""
    is_awaited = record.generation > 1 and all(replica.agent.state is AgentState.RUNNING for replica in members)
    if not is_awaited or record.generation_began_at is None or has_made_step(record, context.replicas):
        return None
    return record.generation_began_at + FIRST_STEP_PATIENCE


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
    event = JobEvent(Reason.RUNNING, training(len(record.members), record.generation))
    return replace(draft, record=settled, running_since=context.now, events=(*draft.events, event))
