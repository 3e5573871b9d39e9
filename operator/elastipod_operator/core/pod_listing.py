"""When to list the pods at the API server: a watch may have missed that one is gone."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from .actions import Action, ListPods
from .context import Context, PlanDraft
from .health import Health, Replicas
from .record import Record
from .snapshot import Snapshot
from .time_order import earliest

RECHECK_AFTER = timedelta(seconds=1)


RELIST_AFTER = timedelta(minutes=5)


RELIST_SILENT_AFTER = timedelta(seconds=30)


def list_while_waiting(record: Record, context: Context) -> tuple[tuple[Action, ...], datetime | None]:
    """While pods are waited for, or do not answer, ask now and then whether they still exist.

    A broken watch may have missed their end: a pod that never gets an agent would hold its place for ever, and one that
    fell silent with all others would never be missed.
    """
    is_waiting = record.transition is not None or len(record.members) < context.grant.sizes.maximum
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


def list_while_leaving(draft: PlanDraft, snapshot: Snapshot, replicas: Replicas, record: Record) -> PlanDraft:
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
