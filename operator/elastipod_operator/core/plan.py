"""The decision for one job, from a snapshot to a plan. Read `plan` first; each step names the files that decide it.

The workers of a job either run one generation or are in transition to the next. Which of the two is in the state record before
the first call to an agent, so an operator that dies anywhere continues from the record.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from .actions import Action, Plan, SetFinalizer
from .conditions import describe
from .context import Context, PlanDraft
from .deadlines import accepted, next_deadline, overdue
from .ending import finish, plan_deletion, plan_end
from .first_step import status_waits_until
from .grant import Grant
from .health import assess
from .incarnations import record_incarnations
from .initial_record import current_record, without_empty_record
from .phase_accounting import account_phases, next_phase_change
from .pod_listing import list_while_leaving
from .pod_supply import supply
from .preparation import with_preparation
from .quota import Quota, adopt_queue, apply_quota, must_request_again
from .quota_requests import with_quota_requests, with_quota_returns
from .record import Record
from .replica import Health, Replicas
from .running import running
from .snapshot import Snapshot
from .spec_edits import note_ceiling, take_edits
from .time_order import earliest
from .transition import in_transition


def plan(snapshot: Snapshot) -> Plan:
    """Decide for one job. Pure: the same snapshot gives the same plan, and a plan may be carried out twice."""
    # 1. Start from the state record, or from a first one (initial_record, clock_skew).
    is_new = snapshot.job.record is None
    snapshot = without_empty_record(snapshot)
    record = current_record(snapshot)

    # 2. Choose the queue and apply what it grants: sizes, slots, suspension, lost quota (quota -> Grant, Quota).
    record = adopt_queue(record, snapshot)
    grant, quota = apply_quota(snapshot, record)

    # 3. Assess each pod: it can train, or it is disrupted, silent or lost (health, replica, silence).
    replicas = assess(snapshot, grant.quota_lost if grant is not None else {})

    # 4. End the pods of a job that is being deleted, and return its quota (ending, quota_requests, pod_listing).
    if snapshot.job.deleting_since is not None:
        draft = with_quota_returns(_as_draft(plan_deletion(snapshot, record, replicas)), snapshot, replicas)
        return _complete(list_while_leaving(draft, snapshot, replicas, record), snapshot, replicas, grant)

    # 5. Leave a job unmanaged if a newer operator wrote its record.
    if snapshot.job.unmanaged:
        return _leave_unmanaged(snapshot, replicas)

    # 6. Clean up a job that has ended (ending); keep the pods of one whose spec is invalid; train all others.
    if record.outcome:
        draft = _as_draft(plan_end(snapshot, record, replicas))
    elif snapshot.job.policy is None or grant is None:
        draft = PlanDraft(record)
    else:
        draft = _train(record, Context(snapshot, snapshot.job.policy, replicas, grant, quota), is_new)

    # 12. Request quota for increments, return unused quota, report ready pods to Kueue (quota_requests).
    draft = with_quota_requests(draft, snapshot, replicas, quota)

    # 13. Account the time to phases and report conditions, status and Events (phase_accounting, conditions).
    return _complete(draft, snapshot, replicas, grant, quota)


def _train(record: Record, context: Context, is_new: bool) -> PlanDraft:
    """Decide for a job that has not ended and whose spec can be used."""
    snapshot, replicas = context.snapshot, context.replicas

    # 7. Record what must survive: the names of pods, when the first pod appeared, which pods were given up.
    if (accepted_at := accepted(snapshot, record)) != record.accepted_at:
        record = replace(record, accepted_at=accepted_at)
    record = record_incarnations(record, replicas.by_id)
    record = _note_first_pod(_without_gone_pods(record, replicas), context)

    # 8. Recreate the pods of a job that has never trained when its template was edited (spec_edits).
    if snapshot.job.pending_edits and not record.generation and not context.grant.is_suspended:
        return take_edits(record, context)

    # 9. Fail a job that has passed a deadline (deadlines).
    late = overdue(snapshot, record, context.grant)
    if late is not None:
        return finish(record, context, "Failed", late.reason, late.message)

    # 10. Workers: keep a generation running, or begin to stop it (running: faults, planned_change, growth); bring a
    #     transition to the next start (transition: stopping, root_cause, escalation, partial_gangs, ranks). Have new replicas
    #     prepare their workers meanwhile (preparation).
    draft = running(record, context) if record.transition is None else in_transition(record, context)
    draft = with_preparation(draft, context)
    requests_again = context.quota is not None and must_request_again(snapshot, record)
    adopts_spec = draft.adopts_spec or requests_again or (is_new and not replicas.by_id)
    # The next reconcile pass replaces a replica that was given up just now, which was assessed before that, and compares the
    # Workloads with a template that was adopted just now.
    again_at = snapshot.now if requests_again or _gives_up(record, draft.record, replicas) else None
    wake_at = earliest(draft.wake_at, again_at, next_deadline(snapshot, draft.record, context.grant))
    draft = replace(draft, wake_at=wake_at, adopts_spec=adopts_spec)

    # 11. Pods: create missing ones, delete unwanted ones (slots, pod_supply, pod_removal, pod_listing).
    return supply(note_ceiling(draft, context), context)


def _gives_up(before: Record, after: Record, replicas: Replicas) -> bool:
    """Whether a pass gave up a replica that it had not assessed as lost."""
    given_up = (replicas.get(pod) for pod in after.lost if pod not in before.lost)
    return any(replica is not None and replica.health is not Health.LOST for replica in given_up)


def _leave_unmanaged(snapshot: Snapshot, replicas: Replicas) -> Plan:
    """Do nothing, and report why: a newer operator wrote the record."""
    report = describe(snapshot, Record(), replicas, None)
    return Plan(record=Record(), conditions=report.conditions, events=report.events, skips_record=True)


def _note_first_pod(record: Record, context: Context) -> Record:
    """Note when a job that has never trained got its first pod; startupDeadlineSeconds counts from then."""
    if record.started_at is not None or context.grant.is_suspended:
        return record if record.first_pod_at is None else replace(record, first_pod_at=None)
    first = min((r.pod.created_at for r in context.replicas.by_id.values()), default=None)
    return record if record.first_pod_at is not None or first is None else replace(record, first_pod_at=first)


def _without_gone_pods(record: Record, replicas: Replicas) -> Record:
    """Forget pods that were given up and are no longer listed by the API server."""
    lost = tuple(pod for pod in record.lost if pod in replicas.by_id)
    return record if lost == record.lost else replace(record, lost=lost)


def _as_draft(parts: tuple[Record, tuple[Action, ...], datetime | None]) -> PlanDraft:
    record, actions, wake = parts
    return PlanDraft(record, actions, wake_at=wake)


def _complete(
    draft: PlanDraft, snapshot: Snapshot, replicas: Replicas, grant: Grant | None, quota: Quota | None = None
) -> Plan:
    """Add the phase accounting, the report and the finalizer."""
    draft = replace(draft, record=account_phases(draft.record, snapshot, replicas))
    if draft.adopts_spec:
        snapshot = replace(snapshot, job=replace(snapshot.job, pending_edits=()))
    report = describe(snapshot, draft.record, replicas, grant, quota)
    if not snapshot.job.has_finalizer and snapshot.job.deleting_since is None:
        draft = replace(draft, actions=(SetFinalizer(True), *draft.actions))
    waits_until = (
        status_waits_until(draft.record, replicas, snapshot.now) if snapshot.job.deleting_since is None else None
    )
    return Plan(
        record=draft.record, actions=draft.actions, conditions=report.conditions, size=report.size,
        events=draft.events if waits_until else (*draft.events, *report.events), status_waits=waits_until is not None,
        history=draft.history, running_since=draft.running_since,
        wake_at=earliest(
            draft.wake_at, report.wake_at, waits_until, replicas.next_loss_at, next_phase_change(draft.record, replicas, snapshot.now)
        ),
        status=report.status, adopts_spec=draft.adopts_spec, skips_record=bool(snapshot.job.unmanaged),
    )  # fmt: skip
