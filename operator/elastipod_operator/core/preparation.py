"""Preparation: the workers of new replicas start, import and build while the present generation still trains.

Only where the workers of the present members wait at the barrier between two generations, so that new ones can wait there too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta

from .actions import PrepareWorkers
from .context import Context, PlanDraft
from .depth import depth_of_change, keeps_state, waits_for_new_processes
from .record import Depth, Record, TransitionKind
from .replica import Replica
from .snapshot import Preparation

# A growth that is due waits for workers that are being prepared at most this long. Meanwhile the others train.
PREPARATION_LIMIT = timedelta(seconds=300)


def with_preparation(draft: PlanDraft, context: Context) -> PlanDraft:
    """Order what is to be prepared: every ready replica that may train later, spares too."""
    record = draft.record
    members = frozenset(record.members)
    missing = [r for r in context.replicas.candidates() if r.id not in members and _is_missing(r)]
    if not missing or record.outcome or not _is_worthwhile(record, context):
        return draft
    return draft.with_actions(*(PrepareWorkers(r.pod.name) for r in sorted(missing, key=lambda r: r.id)))


def preparation_limit(newcomers: Iterable[Replica], record: Record, context: Context, due: datetime) -> datetime | None:
    """Give until when a growth that is due since ``due`` waits for these replicas' workers, or for new ones of the present members.

    None if it waits for none.
    """
    end = due + PREPARATION_LIMIT
    are_missing = any(map(is_on_its_way, newcomers)) or waits_for_new_processes(record, context.replicas)
    if context.now >= end or not are_missing:
        return None
    return end if _is_worthwhile(record, context) else None


def _is_worthwhile(record: Record, context: Context) -> bool:
    """Whether the next change leaves the workers of those who stay their processes, or would if the user did not want new ones."""
    transition = record.transition
    if transition is not None:
        is_change = transition.kind in (TransitionKind.RESIZE, TransitionKind.RECOVERY)
        return is_change and transition.depth is Depth.MEMORY and not transition.recreates_pods
    if record.running_since is None or context.grant.is_suspended:
        return False
    able = replace(context.policy, new_processes=False)
    return depth_of_change(record, context.replicas, able, TransitionKind.RESIZE).depth is Depth.MEMORY


def _is_missing(replica: Replica) -> bool:
    """Whether its workers could be started ahead and are not. Those of an agent that imports modules for them would start slowly."""
    agent = replica.agent
    return agent.can_prepare and agent.preparation is None and not agent.warming and not keeps_state(replica)


def is_on_its_way(replica: Replica) -> bool:
    """Whether its workers are being started ahead, or are about to be."""
    return replica.agent.preparation is Preparation.BEGUN or _is_missing(replica)
