"""When to list the pods at the API server: a watch may have missed a deletion."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from .actions import Action, ListPods
from .context import Context, PlanDraft
from .record import Record
from .replica import Health, Replicas
from .snapshot import Snapshot
from .time_order import earliest

RECHECK_AFTER = timedelta(seconds=1)


RELIST_AFTER = timedelta(minutes=5)


RELIST_SILENT_AFTER = timedelta(seconds=30)


def list_while_waiting(record: Record, context: Context) -> tuple[tuple[Action, ...], datetime | None]:
    """List the pods from time to time while the job waits for pods, or agents are silent.

    A broken watch may have missed a deletion. Then a slot would stay occupied for ever, or a silent pod would never be replaced.
    """
    is_waiting = record.transition is not None or len(record.members) < context.grant.sizes.maximum
    is_silent = any(replica.health is Health.SILENT for replica in context.replicas.by_id.values())
    if context.snapshot.pods_listed_at is None or not (is_waiting or is_silent):
        return ((ListPods(),) if context.replicas.all_silent else ()), None
    # A deletion that was missed before the wait began has done no harm yet.
    since = (
        context.snapshot.pods_listed_at if is_silent else max((context.snapshot.pods_listed_at, *_waits_since(record)))
    )
    due = since + (RELIST_SILENT_AFTER if is_silent else RELIST_AFTER)
    return ((ListPods(),), context.now + RECHECK_AFTER) if context.now >= due else ((), due)


def _waits_since(record: Record) -> tuple[datetime, ...]:
    began_at = record.transition.began_at if record.transition is not None else record.generation_began_at
    return () if began_at is None else (began_at,)


def list_while_leaving(draft: PlanDraft, snapshot: Snapshot, replicas: Replicas, record: Record) -> PlanDraft:
    """List the pods from time to time: a missed deletion must not delay the end of a job, nor keep its quota."""
    if not replicas.by_id or snapshot.pods_listed_at is None:
        return draft
    # No pod had to end before the deletion or the suspension began.
    began_at = snapshot.job.deleting_since or (record.transition.began_at if record.transition is not None else None)
    due = max(snapshot.pods_listed_at, began_at or snapshot.pods_listed_at) + RELIST_SILENT_AFTER
    if snapshot.now < due:
        return replace(draft, wake_at=earliest(draft.wake_at, due))
    return replace(
        draft, actions=(*draft.actions, ListPods()), wake_at=earliest(draft.wake_at, snapshot.now + RECHECK_AFTER)
    )
