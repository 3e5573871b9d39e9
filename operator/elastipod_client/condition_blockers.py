"""Blockers that the operator has put into the conditions and Events of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from elastipod_operator.core.reasons import EventRule, Reason, Severity, as_reason
from elastipod_operator.kube.reading import Body, mapping, text
from elastipod_operator.kube.times import time_or

from .blocker import Blocker, blocker_of
from .situation import JobFacts, ReportedCondition, job_began

# How long an Event that no condition repeats is told.
EVENT_TOLD = timedelta(minutes=10)
WAITING = ("Created", "PodsRunning", "Suspended", "Failed")
# Operators before 0.1.0 reported a healthy PodsReady too.
CALM = ("AgentsAnswer", Reason.AT_MAXIMUM)
NO_OPERATOR = (
    "Is the operator up (`kubectl -n aws-hyperpod get pods`), and does its value `watchNamespaces` include the namespace? "
    "`elastipod doctor -n NAMESPACE` checks both."
)


def state_blocker(job: JobFacts) -> Blocker | None:
    """Give what the present state says; None for a job that trains, starts, resizes or has completed."""
    state = job.state
    if state is None:
        message = "the job has no conditions: no operator has processed it"
        return Blocker(
            reason=as_reason("NoOperator"), where="status", message=message, since=job.created_at,
            severity=Severity.ERROR, advice=NO_OPERATOR,
        )  # fmt: skip
    if state.type in WAITING:
        if state.reason in (Reason.ACCEPTED, Reason.PODS_RUNNING):
            return None
        if state.reason == Reason.WAITING_FOR_PODS and ": " not in state.message:
            # Nothing is wrong with a pod yet: its scheduler and its kubelet are at work.
            return replace(blocker_of(state.reason, state.type, state.message, state.since), advice="")
        # Suspended and Failed with a reason of others: Kueue's eviction, or what an agent said of its workers.
        return blocker_of(state.reason, state.type, state.message, state.since, is_fault=state.type == "Failed")
    if state.type == "Faulted" or state.reason == Reason.RECOVERING:
        transition = job.record.transition if job.record is not None else None
        cause = transition.cause if transition is not None else state.reason
        since = transition.detected_at if transition is not None else state.since
        return blocker_of(cause, state.type, state.message, since, is_fault=True)
    if state.reason == Reason.RESIZING:
        return blocker_of(state.reason, state.type, state.message, job_began(job, state))
    return None


def auxiliary_blockers(job: JobFacts, events: Sequence[Body]) -> list[Blocker]:
    """Give what the conditions before the state say: PodsReady, Warning, Scaling."""
    found: list[Blocker] = []
    for condition in job.conditions[:-1]:
        if condition.type == "Warning":
            found += _warnings(condition, events)
        elif condition.type in ("PodsReady", "Scaling") and condition.reason not in CALM:
            found.append(blocker_of(condition.reason, condition.type, condition.message, condition.since))
    return found


def _warnings(condition: ReportedCondition, events: Sequence[Body]) -> list[Blocker]:
    """Split a Warning into its parts, of which it names the reason of the first only: each has an Event with its own reason."""
    parts = {condition.reason: condition.message}
    rest = condition.message
    for event in events:
        reason, message = as_reason(text(event.get("reason"))), text(event.get("message"))
        if message and message in rest and reason != condition.reason and "Warning" in _where(reason):
            parts[reason] = message
            rest = rest.replace(message, "")
    parts[condition.reason] = rest.strip("; ") or condition.message
    return [blocker_of(reason, "Warning", message, condition.since) for reason, message in parts.items()]


def _where(reason: str) -> str:
    return reason.where if isinstance(reason, Reason) else ""


def event_blockers(job: JobFacts, events: Sequence[Body], now: datetime) -> list[Blocker]:
    """Give what the last minutes' Events say that no condition does, if it is a warning or comes with an advice."""
    newest: dict[Reason, Blocker] = {}
    # The API server lists Events by their names, which are random.
    for event in sorted(events, key=lambda one: (event_time(one, job.created_at), text(one.get("reason")))):
        reason = as_reason(text(event.get("reason")))
        if not isinstance(reason, Reason) or reason.where or reason.event is not EventRule.WHEN_IT_HAPPENS:
            continue
        at = event_time(event, job.created_at)
        if (reason.severity is not Severity.INFO or reason.advice) and now - at <= EVENT_TOLD:
            before = newest.get(reason)
            if before is None or before.since is None or before.since <= at:
                newest[reason] = blocker_of(reason, "Event", text(event.get("message")), at)
    return list(newest.values())


def event_time(event: Body, otherwise: datetime) -> datetime:
    """Give when an Event happened last."""
    series = mapping(event.get("series")).get("lastObservedTime")
    fields = (series, event.get("lastTimestamp"), event.get("eventTime"), event.get("firstTimestamp"))
    return time_or(next((at for at in fields if at), ""), otherwise)
