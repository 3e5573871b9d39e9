"""Edits of the spec that take effect before training has begun, and a ceiling that was removed."""

from __future__ import annotations

from dataclasses import replace

from .actions import Action, JobEvent
from .context import Context, PlanDraft
from .incarnations import record_incarnations
from .pod_removal import remove
from .reasons import Reason
from .record import Record
from .stopping import RECHECK_AFTER
from .wording import counted


def note_ceiling(draft: PlanDraft, context: Context) -> PlanDraft:
    """Note the ceiling, and explain a ceiling of 0 in an Event: a user who scales a job to 0 expects it to stop."""
    before, now = draft.record.ceiling, context.policy.ceiling
    if before == now:
        return draft
    draft = replace(draft, record=replace(draft.record, ceiling=now))
    if now:
        return draft
    text = no_ceiling_text(before, counted(context.policy.sizes.maximum, "replica"))
    return replace(draft, events=(*draft.events, JobEvent(Reason.SCALED_TO_ZERO, text)))


def no_ceiling_text(before: int, maximum: str) -> str:
    """Say what a ceiling of 0 means. maximum: the size to which the job may grow, in words."""
    return (
        f"spec.replicas was set from {before} to 0, which means no ceiling: the job may grow to {maximum}; to stop it, set "
        "spec.runPolicy.suspend to true"
    )


def take_edits(record: Record, context: Context) -> PlanDraft:
    """Recreate all pods because the template was edited before the job trained."""
    event = JobEvent(
        Reason.EDITS_TAKEN, f"{', '.join(context.snapshot.job.pending_edits)}: pods are recreated from the edited spec"
    )
    draft = PlanDraft(
        replace(record, gang=None), events=(event,), wake_at=context.now + RECHECK_AFTER, adopts_spec=True
    )
    return recreate_all_pods(draft, context, "the template was edited before the training began")


def recreate_all_pods(draft: PlanDraft, context: Context, why: str) -> PlanDraft:
    """Recreate every pod."""
    known = frozenset(draft.record.lost)
    pods = [r for r in context.replicas.by_id.values() if r.id not in known]
    removals: list[Action] = []
    for replica in pods:
        removals += remove(replica, why)
    lost = (*draft.record.lost, *(r.id for r in pods))
    return replace(draft.with_actions(*removals), record=replace(record_incarnations(draft.record, lost), lost=lost))
