"""The operator's decision for one job: from what was observed and the time to what is to be done.

The workers of a job are either running one generation (`running`), or in transition to the next (`transit`): being
stopped, then gathered until enough replicas are ready. Which of the two is written in the record before the first call to
an agent, so an operator that dies anywhere continues where the facts are.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from .actions import Action, JobEvent, ListPods, Plan, SetFinalizer
from .avoided_nodes import avoided
from .backoff import longest_wait
from .base_first import base_first
from .clock_skew import without_future_times
from .conditions import describe
from .context import Context, PlanDraft, finish
from .deadlines import accepted, next_deadline, overdue
from .ending import plan_deletion, plan_end
from .faults import STOP_TIME
from .health import Health, Replicas, assess
from .membership import Limits, earliest, record_incarnations, supply_pods, wanted_slots
from .names import Slot
from .partial_gangs import restrict_slots
from .payback import growth_hold
from .phase_accounting import account_phases, next_phase_change
from .quota import Quota, adopt_queue, apply_quota, must_request_again
from .quota_requests import slots_backing_off, with_quota_requests, with_quota_returns
from .record import RECORD_LOST, Record, Transition, TransitionKind
from .running import running
from .snapshot import Snapshot
from .transition import give_up_all, in_transition

RECHECK_AFTER = timedelta(seconds=1)
RELIST_AFTER = timedelta(minutes=5)
RELIST_SILENT_AFTER = timedelta(seconds=30)


def plan(snapshot: Snapshot) -> Plan:
    """Decide for one job. Pure: same observation, same plan; carrying out a plan twice does no harm."""
    is_new = snapshot.job.record is None
    if snapshot.job.record is not None and snapshot.job.record.is_empty:
        snapshot = _without_empty_record(snapshot, snapshot.job.record)
    longest = longest_wait(snapshot.job.policy.backoff_max) if snapshot.job.policy is not None else None
    record = without_future_times(
        snapshot.job.record or _first_record(snapshot, assess(snapshot)), snapshot.now, longest
    )
    record = adopt_queue(record, snapshot)
    snapshot, quota = apply_quota(snapshot, record)
    replicas = assess(snapshot)
    if snapshot.job.deleting_since is not None:
        draft = with_quota_returns(_as_draft(plan_deletion(snapshot, record, replicas)), snapshot, replicas)
        return _completed_plan(snapshot, replicas, _with_listing(draft, snapshot, replicas, record))
    if snapshot.job.unmanaged:
        return _hands_off(snapshot, replicas)
    if record.outcome:
        return _completed_plan(
            snapshot,
            replicas,
            with_quota_requests(_as_draft(plan_end(snapshot, record, replicas)), snapshot, replicas, quota),
            quota,
        )
    if snapshot.job.policy is None:
        return _completed_plan(snapshot, replicas, with_quota_requests(PlanDraft(record), snapshot, replicas, quota))
    draft = _plan_running_job(record, Context(snapshot, snapshot.job.policy, replicas, quota), is_new)
    return _completed_plan(snapshot, replicas, with_quota_requests(draft, snapshot, replicas, quota), quota)


def _plan_running_job(record: Record, context: Context, is_new: bool) -> PlanDraft:
    """Decide for a job that has not ended and whose spec can be used."""
    snapshot, replicas = context.snapshot, context.replicas
    record = replace(record, accepted_at=accepted(snapshot, record))
    record = _with_pods(_forget_the_gone(record_incarnations(record, replicas.by_id), replicas), context)
    if snapshot.job.pending_edits and not record.generation and not context.policy.suspend:
        return _take_edits(record, context)
    late = overdue(snapshot, record)
    if late is not None:
        return finish(record, context, "Failed", late.reason, late.message)
    draft = running(record, context) if record.transition is None else in_transition(record, context)
    draft = replace(draft, wake_at=earliest(draft.wake_at, next_deadline(snapshot, draft.record)))
    asks_anew = context.quota is not None and must_request_again(snapshot, record)
    draft = replace(draft, adopts_spec=draft.adopts_spec or asks_anew or (is_new and not replicas.by_id))
    return _with_supply(_with_ceiling(draft, context), context)


def _with_ceiling(draft: PlanDraft, context: Context) -> PlanDraft:
    """Note the ceiling, and say what it means that it was set to 0: whoever scales a job to nothing expects it to stop."""
    before, now = draft.record.ceiling, context.policy.ceiling
    if before == now:
        return draft
    draft = replace(draft, record=replace(draft.record, ceiling=now))
    if now:
        return draft
    text = (
        f"spec.replicas was set from {before} to 0, which means no ceiling: the job may grow to {context.policy.requested_sizes.maximum} "
        "replicas; to stop it set spec.runPolicy.suspend to true"
    )
    return replace(draft, events=(*draft.events, JobEvent("ScaledToZero", text, warning=True)))


def _hands_off(snapshot: Snapshot, replicas: Replicas) -> Plan:
    """A newer operator wrote the record: nothing is done and nothing of it is written but the reason why."""
    report = describe(snapshot, Record(), replicas)
    return Plan(record=Record(), conditions=report.conditions, events=report.events, skips_record=True)


def _take_edits(record: Record, context: Context) -> PlanDraft:
    """The template was mended before anything trained: the pods made so far are given up, and made anew from it."""
    event = JobEvent(
        "EditsTaken", f"{', '.join(context.snapshot.job.pending_edits)}: pods are made anew from the edited spec"
    )
    draft = PlanDraft(
        replace(record, gang=None), events=(event,), wake_at=context.now + RECHECK_AFTER, adopts_spec=True
    )
    return give_up_all(draft, context, "the template was edited before the training began")


def _without_empty_record(snapshot: Snapshot, empty: Record) -> Snapshot:
    """Take an empty record for a lost one: who holds nobody has not completed."""
    known = max(snapshot.job.history_generation, empty.generation)
    return replace(snapshot, job=replace(snapshot.job, record=None, history_generation=known))


def _first_record(snapshot: Snapshot, replicas: Replicas) -> Record:
    """A new job, or one whose record was lost: then everything that runs is stopped and started in a higher generation.

    A job whose status tells that it has ended does not begin again.
    """
    target_size = snapshot.job.policy.sizes.start if snapshot.job.policy else 1
    known = max(replicas.highest_generation(), snapshot.job.history_generation)
    end = next((c for c in snapshot.job.conditions if c.type in ("Completed", "Failed") and c.status), None)
    if end is not None:
        return Record(
            generation=known,
            outcome=end.type,
            outcome_reason=end.reason,
            outcome_message=end.message,
            ended_at=end.since,
            accepted_at=snapshot.job.created_at,
        )
    kind, cause, message = TransitionKind.START, "JobCreated", "the job was accepted"
    if known or replicas.by_id:  # no pod is made before there is a record
        kind = TransitionKind.RECOVERY if known else TransitionKind.START
        cause, message = RECORD_LOST, "the job's state record was lost"
    begun = Transition(
        kind=kind, cause=cause, message=message, from_size=0, target_size=target_size, began_at=snapshot.now, detected_at=snapshot.now,
        deadline=snapshot.now + STOP_TIME,
    )  # fmt: skip
    members = tuple(sorted(pod for pod, r in replicas.by_id.items() if (r.agent.generation or 0) > 0))
    # Workers ran: that training did not begin in time is nothing that a lost record can bring about.
    return Record(
        generation=known, members=members, transition=begun, started_at=snapshot.now if members else None,
        accepted_at=snapshot.job.created_at,
    )  # fmt: skip


def _with_pods(record: Record, context: Context) -> Record:
    """Note when a job that never trained came to have pods: from then on its start must not take too long (decision 16)."""
    if record.started_at is not None or context.policy.suspend:
        return replace(record, first_pod_at=None)
    first = min((r.pod.created_at for r in context.replicas.by_id.values()), default=None)
    return record if record.first_pod_at is not None else replace(record, first_pod_at=first)


def _forget_the_gone(record: Record, replicas: Replicas) -> Record:
    lost = tuple(pod for pod in record.lost if pod in replicas.by_id)
    return record if lost == record.lost else replace(record, lost=lost)


def _with_supply(draft: PlanDraft, context: Context) -> PlanDraft:
    """Add what keeps the right pods in being."""
    record = draft.record
    idle = record.transition is not None and record.transition.kind is TransitionKind.SUSPEND
    if record.outcome:
        return draft
    if idle or context.policy.suspend:
        is_leaving = any(r.pod.kill_at is not None and not r.pod.ended for r in context.replicas.by_id.values())
        return _with_listing(draft, context.snapshot, context.replicas, record) if is_leaving else draft
    if draft.adopts_spec and context.snapshot.job.pending_edits:
        return replace(draft, wake_at=context.now)  # pods are made from the spec on record: first it is written
    wanted = _wanted(record, context)
    wanted, base_due = base_first(wanted, record, context.replicas, context.policy, context.now)
    limits = Limits(
        avoids=avoided(record, context.policy, context.now),
        refused_until=context.snapshot.refused_until,
        growth_until=growth_hold(record, context.policy),
    )
    actions, wake = supply_pods(context.policy, record, context.replicas, context.now, wanted, limits)
    known = {action for action in draft.actions}
    fresh = tuple(action for action in actions if action not in known)
    listing, due = _listing(record, context)
    return replace(draft.with_actions(*fresh, *listing), wake_at=earliest(draft.wake_at, wake, due, base_due))


def _wanted(record: Record, context: Context) -> list[Slot]:
    wanted = wanted_slots(context.policy, record, context.replicas)
    if context.quota is None:
        return restrict_slots(wanted, record, context.replicas, context.policy, context.now)
    return [slot for slot in wanted if slot not in slots_backing_off(record, context.quota, context.now)]


def _listing(record: Record, context: Context) -> tuple[tuple[Action, ...], datetime | None]:
    """While pods are waited for, or do not answer, ask now and then whether they still exist.

    A broken watch may have missed their end: a pod that never gets an agent would hold its place for ever, and one that
    fell silent with all others would never be missed.
    """
    is_waiting = record.transition is not None or len(record.members) < context.policy.sizes.maximum
    is_silent = any(replica.health is Health.SILENT for replica in context.replicas.by_id.values())
    if context.snapshot.pods_listed_at is None or not (is_waiting or is_silent):
        return ((ListPods(),) if context.replicas.all_silent else ()), None
    # What a watch missed before the waiting began was in nobody's way until now.
    since = (
        context.snapshot.pods_listed_at if is_silent else max((context.snapshot.pods_listed_at, *_waits_since(record)))
    )
    due = since + (RELIST_SILENT_AFTER if is_silent else RELIST_AFTER)
    return ((ListPods(),), context.now + RECHECK_AFTER) if context.now >= due else ((), due)


def _waits_since(record: Record) -> tuple[datetime, ...]:
    began_at = record.transition.began_at if record.transition is not None else record.generation_began_at
    return () if began_at is None else (began_at,)


def _with_listing(draft: PlanDraft, snapshot: Snapshot, replicas: Replicas, record: Record) -> PlanDraft:
    """Have the pods listed from time to time: an end that the watch missed must hold up no deletion, nor keep quota."""
    if not replicas.by_id or snapshot.pods_listed_at is None:
        return draft
    # Before the deletion, or the suspension, the watch had no end to tell.
    began_at = snapshot.job.deleting_since or (record.transition.began_at if record.transition is not None else None)
    due = max(snapshot.pods_listed_at, began_at or snapshot.pods_listed_at) + RELIST_SILENT_AFTER
    if snapshot.now < due:
        return replace(draft, wake_at=earliest(draft.wake_at, due))
    return replace(
        draft, actions=(*draft.actions, ListPods()), wake_at=earliest(draft.wake_at, snapshot.now + RECHECK_AFTER)
    )


def _as_draft(parts: tuple[Record, tuple[Action, ...], datetime | None]) -> PlanDraft:
    record, actions, wake = parts
    return PlanDraft(record, actions, wake_at=wake)


def _completed_plan(snapshot: Snapshot, replicas: Replicas, draft: PlanDraft, quota: Quota | None = None) -> Plan:
    draft = replace(draft, record=account_phases(draft.record, snapshot, replicas))
    if draft.adopts_spec:
        snapshot = replace(snapshot, job=replace(snapshot.job, pending_edits=()))
    report = describe(snapshot, draft.record, replicas, quota)
    if not snapshot.job.has_finalizer and snapshot.job.deleting_since is None:
        draft = replace(draft, actions=(SetFinalizer(True), *draft.actions))
    return Plan(
        record=draft.record, actions=draft.actions, conditions=report.conditions, size=report.size,
        events=(*draft.events, *report.events), history=draft.history, running_since=draft.running_since,
        wake_at=earliest(draft.wake_at, report.wake_at, replicas.next_loss_at, next_phase_change(draft.record, replicas, snapshot.now)),
        status=report.status, adopts_spec=draft.adopts_spec, skips_record=bool(snapshot.job.unmanaged),
    )  # fmt: skip
