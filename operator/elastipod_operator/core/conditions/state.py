"""The present state of a job, the last of its conditions: Created, PodsRunning, Running, Faulted or Suspended."""

from __future__ import annotations

from datetime import datetime, timedelta

from ..context import Context
from ..depth import chosen_depth, describe_depth
from ..ranks import base_minimum
from ..reasons import Reason
from ..record import Record, Transition, TransitionKind
from ..replica import Health
from ..snapshot import AgentState
from ..time_order import earliest
from ..wording import counted, share, training
from .draft import ConditionDraft, avoidance, first_problem, time_of_day

# Running stays the state through planned resizes, and through recoveries up to this long.
FAULT_REPORTED_AFTER = timedelta(seconds=30)
# What a change waits for is told only after this time: nobody reads it of a shorter one, whose pause each write would prolong.
WAIT_REPORTED_AFTER = timedelta(seconds=2)


def describe(record: Record, context: Context) -> tuple[ConditionDraft, datetime | None]:
    """Give the state of a job that has not ended, and when it changes with time alone."""
    policy, grant = context.policy, context.grant
    transition = record.transition
    if transition is not None and transition.kind is TransitionKind.SUSPEND:
        if grant.suspended_by is not None:
            return ConditionDraft("Suspended", True, grant.suspended_by.reason, grant.suspended_by.message), None
        text = "spec.runPolicy.suspend is true; set it to false to resume"
        if not policy.suspend:
            text = "the job resumes as soon as its workers have stopped"
        return ConditionDraft(
            "Suspended", True, Reason.SUSPENDED_BY_USER if policy.suspend else Reason.RESUMING, text
        ), None
    if transition is not None and transition.kind is TransitionKind.START:
        return _starting(record, context), None
    text, changes_at = training(len(record.members), record.generation), None
    if transition is not None:
        text, changes_at = _changing(transition, record, context)
    if record.fault_at is None:
        reason = (
            Reason.RESIZING if transition is not None else Reason.TRAINING if record.running_since else Reason.STARTING
        )
        return ConditionDraft("Running", True, reason, text), changes_at
    shown_at = record.fault_at + FAULT_REPORTED_AFTER
    if context.now < shown_at and record.consecutive_failures < 2:
        return ConditionDraft("Running", True, Reason.RECOVERING, text), earliest(shown_at, changes_at)
    cause = transition.cause if transition is not None else Reason.RECOVERING
    if record.consecutive_failures >= 2:
        text = f"{text} ({record.consecutive_failures} failures in a row without progress)"
        if transition is not None and transition.not_before is not None and context.now < transition.not_before:
            text += f"; next attempt at {time_of_day(transition.not_before)}"
        text += "; see the workers' logs with kubectl logs"
    return ConditionDraft("Faulted", True, cause, text), changes_at


def _changing(transition: Transition, record: Record, context: Context) -> tuple[str, datetime | None]:
    """Say why the job changes, how deep, and what it waits for; gives when the latter is due to be told."""
    told_at = transition.began_at + WAIT_REPORTED_AFTER
    text = f"{transition.message}{describe_depth(chosen_depth(transition))}"
    if context.now < told_at:
        return text, told_at
    return f"{text}; {_waiting_for(record, context)}", None


def _starting(record: Record, context: Context) -> ConditionDraft:
    started = [r for r in context.replicas.newest.values() if r.pod.started and not r.pod.ended]
    text = _waiting_for(record, context)
    if len(started) >= context.grant.sizes.minimum:
        return ConditionDraft("PodsRunning", True, Reason.WAITING_FOR_AGENTS, text)
    return ConditionDraft("Created", True, Reason.WAITING_FOR_PODS, text)


def _waiting_for(record: Record, context: Context) -> str:
    transition, replicas, grant = record.transition, context.replicas, context.grant
    assert transition is not None
    stopping = [
        r for m in record.members
        if (r := replicas.get(m)) is not None and r.agent.state in (AgentState.RUNNING, AgentState.STOPPING)
        and r.health in (Health.GOOD, Health.DISRUPTED, Health.SILENT)
    ]  # fmt: skip
    if stopping:
        return counted(len(stopping), "replica is being stopped", "replicas are being stopped")
    ready = len(replicas.candidates())
    aim = max(grant.sizes.minimum, transition.target_size)
    gang = record.gang
    if gang is not None and gang.released_until is not None:
        at = time_of_day(gang.released_until)
        return f"there was room for too few replicas, and it was released; one pod waits for room, the others follow at {at}"
    why_not = f"{avoidance(record, context)}{first_problem(replicas.newest.values())}"
    base = grant.specs[0].name
    of_base = sum(r.id.spec == base for r in replicas.candidates())
    if grant.sizes.minimum <= ready and of_base < (least := base_minimum(grant)):
        return f"of {base}, {share(of_base, least, 'is', 'are')} ready, and training needs all of them{why_not}"
    if ready < aim:
        return f"{share(ready, aim, 'is', 'are')} ready{why_not}"
    return counted(ready, "replica is ready", "replicas are ready")
