"""How often a job may be restarted, and how far the next restart reaches (spec.runPolicy)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from .actions import Action, JobEvent
from .avoided_nodes import avoided, count_node_fault
from .depth import LADDER, NO_PROGRESS_LIMIT, repeated_faults
from .incarnations import record_incarnations
from .pod_removal import remove
from .reasons import NO_REASON, AnyReason, Reason, ReasonAndMessage
from .record import Depth, FaultyReplica, Record, RestartMode, RestartWindow, Transition, TransitionKind
from .replica import Health, Replicas
from .snapshot import Policy
from .time_order import earliest
from .wording import counted


@dataclass(frozen=True, slots=True)
class BudgetCheck:
    """A recovery whose budgets were checked. reason and message: why the job ends; empty when it continues."""

    record: Record
    reason: AnyReason = NO_REASON
    message: str = ""
    actions: tuple[Action, ...] = ()
    events: tuple[JobEvent, ...] = ()


def close_window(record: Record, policy: Policy, now: datetime) -> Record:
    """Begin a new evaluation window when the present one is over, but not during a transition."""
    end = window_end(record, policy)
    if end is None or now < end or record.transition is not None:
        return record
    return replace(record, window=RestartWindow(record.window.number + 1))


def window_end(record: Record, policy: Policy) -> datetime | None:
    """Give the end of the present evaluation window; None when it has counted no restart."""
    return record.window.since + policy.eval_period if record.window.since is not None else None


def check_budgets(record: Record, replicas: Replicas, policy: Policy, now: datetime) -> BudgetCheck:
    """Decide what a recovery costs and how far it reaches, once for each recovery.

    The check waits until every member is accounted for. By then it is known whether a lost node, which never counts, caused
    the failures of the workers. The result is recorded before the operator acts on it.
    """
    transition = record.transition
    assert transition is not None
    if transition.kind is not TransitionKind.RECOVERY or transition.is_budget_checked:
        return BudgetCheck(record)
    record = replace(record, transition=replace(transition, is_budget_checked=True))
    record, events = count_node_fault(record, policy, now)
    ending = _why_it_ends(record, policy) if transition.uses_budget else None
    if ending is not None:
        return BudgetCheck(record, ending[0], f"{transition.message}; {ending[1]}", events=events)
    why = _why_everything(record, transition, policy)
    if why:
        return _restart_everything(record, replicas, why, events)
    if transition.depth is Depth.POD:
        return _restart_failed_pods(record, replicas, transition.depth_reason, record.faulty_replicas, events)
    offenders = avoided(record, policy, now)
    there = tuple(one for one in record.faulty_replicas if one.node in offenders)
    return _restart_failed_pods(record, replicas, "its node is to be avoided", there, events)


def does_not_progress(record: Record) -> bool:
    """Whether consecutive recoveries reached no newer step."""
    return record.stalled_recoveries >= NO_PROGRESS_LIMIT


def _why_everything(record: Record, transition: Transition, policy: Policy) -> str:
    """Say why all pods are recreated; empty when they are not. A worker may request this even if it did not cause the fault."""
    if transition.reach is RestartMode.JOB:
        requested = "a worker requested a job-level restart"
        return f"{requested if transition.depth is not Depth.JOB else transition.depth_reason}: all pods are recreated"
    if not transition.uses_budget or not _is_full_restart_due(record, policy):
        return ""
    return (
        f"{counted(record.window.restarts, 'restart')} within {policy.eval_period.total_seconds():g} s, more than "
        f"numRestartBeforeFullJobRestart {policy.restarts_before_full}: all pods are recreated"
    )


def _is_full_restart_due(record: Record, policy: Policy) -> bool:
    return policy.restarts_before_full is not None and record.window.restarts > policy.restarts_before_full


def _why_it_ends(record: Record, policy: Policy) -> ReasonAndMessage | None:
    transition, window = record.transition, record.window
    assert transition is not None
    if policy.max_retries is not None and record.retries > policy.max_retries:
        return transition.cause, f"spec.runPolicy.jobMaxRetryCount {policy.max_retries} is used up"
    is_stuck = record.best_step >= 0 and does_not_progress(record) and not _tries_new_pods(record, transition, policy)
    if policy.max_retries is None and is_stuck:
        text = f"the last {record.stalled_recoveries} recoveries reached no step after {record.best_step}"
        return Reason.NO_PROGRESS, f"{text}; set spec.runPolicy.jobMaxRetryCount to allow more attempts"
    limit = policy.max_full_restarts
    is_full = transition.reach is RestartMode.JOB or _is_full_restart_due(record, policy)
    if is_full and limit is not None and window.full_restarts >= limit:
        return transition.cause, f"spec.runPolicy.restartPolicy.maxFullJobRestarts {limit} is used up"
    return None


def _tries_new_pods(record: Record, transition: Transition, policy: Policy) -> bool:
    """Whether repeated faults bring new pods to a depth that was not tried yet, which may be what helps."""
    counts = (record.failures_in_place, repeated_faults(record, policy))
    is_untried = any(0 < times <= len(LADDER) and transition.depth is LADDER[times - 1] for times in counts)
    return is_untried and transition.depth in (Depth.POD, Depth.JOB)


def _restart_everything(record: Record, replicas: Replicas, why: str, events: tuple[JobEvent, ...]) -> BudgetCheck:
    """Restart the whole job: give up every pod that has a node and never use it again.

    This uses one of maxFullJobRestarts, unless the fault does not count.
    """
    transition, window = record.transition, record.window
    assert transition is not None
    actions: list[Action] = []
    given_up = [r for r in replicas.by_id.values() if r.pod.node and r.health is not Health.ENDED]
    for replica in given_up:
        actions += remove(replica, "full job restart")
    spent = replace(window, restarts=0, full_restarts=window.full_restarts + 1) if transition.uses_budget else window
    known = frozenset(record.lost)
    begun = replace(
        record_incarnations(record, (r.id for r in given_up)), transition=replace(transition, recreates_pods=True),
        members=(), is_full_restart=True,
        window=spent,
        lost=(*record.lost, *(r.id for r in given_up if r.id not in known)),
    )  # fmt: skip
    event = JobEvent(Reason.FULL_JOB_RESTART, why)
    return BudgetCheck(begun, actions=tuple(actions), events=(*events, event))


def _restart_failed_pods(
    record: Record, replicas: Replicas, why: str, faulty: tuple[FaultyReplica, ...], events: tuple[JobEvent, ...]
) -> BudgetCheck:
    """Give up the pods of replicas that failed again and again, or on a node that did; the others keep theirs."""
    gone = (Health.ENDED, Health.LOST)
    failed = [r for one in faulty if (r := replicas.get(one.pod)) is not None and r.health not in gone]
    if not failed:
        return BudgetCheck(record, events=events)
    actions: list[Action] = []
    for replica in failed:
        actions += remove(replica, "its workers failed again and again")
    known = frozenset(record.lost)
    begun = replace(
        record_incarnations(record, (r.id for r in failed)),
        lost=(*record.lost, *(r.id for r in failed if r.id not in known)),
    )
    names = ", ".join(r.pod.name for r in failed)
    event = JobEvent(Reason.FAILED_PODS_RECREATED, f"{why}: {names} is recreated")
    return BudgetCheck(begun, actions=tuple(actions), events=(*events, event))


def next_window_end(record: Record, policy: Policy, now: datetime) -> datetime | None:
    """Give when the evaluation window must be closed, because the status shows its counts."""
    end = window_end(record, policy)
    return earliest(end) if record.transition is None and end is not None and end > now else None
