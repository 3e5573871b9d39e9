"""The changes that a decision makes to the job object: only what differs from the present content."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.actions import Plan, SetFinalizer, SetQueueLabel
from ..core.history import decode_history, encode_history, mark_running
from ..core.names import (
    ANNOTATION_APPLIED,
    ANNOTATION_HISTORY,
    ANNOTATION_NODE_SIGNALS,
    ANNOTATION_SIZE,
    ANNOTATION_STATE,
    FINALIZER,
    LABEL_QUEUE,
)
from ..core.record_codec import encode
from ..core.snapshot import Condition
from ..core.time_order import timestamp
from .applied import applied_annotation
from .identity import is_own
from .limits import room_for_applied
from .node_signals import CONFIGURED
from .reading import MAX_DEPTH, annotations_of, finalizers_of, is_within_depth, mapping
from .store import Job


def metadata_changes(job: Job, todo: Plan) -> dict[str, Any]:
    """Give the part of a merge patch for metadata: the record and what goes with it, finalizers, the queue; empty for none."""
    present = annotations_of(job.body)
    if todo.skips_record:
        wanted: dict[str, str] = {}
    else:
        is_owned = todo.record.owner == job.fact.uid
        record = todo.record if is_owned else replace(todo.record, owner=job.fact.uid)
        wanted = {ANNOTATION_SIZE: str(todo.size)}
        if record != job.fact.record:  # encoding it costs more than the rest of a pass
            wanted[ANNOTATION_STATE] = encode(record)
        signals = ",".join(f"{effect} {signal}" for signal, effect in CONFIGURED.items())
        if signals or present.get(ANNOTATION_NODE_SIGNALS):
            wanted[ANNOTATION_NODE_SIGNALS] = signals
    if job.fact.policy is not None and (todo.adopts_spec or wanted):
        applied = applied_annotation(job.body, adopts_spec=todo.adopts_spec, room=room_for_applied(job.body))
        if applied is not None:
            wanted[ANNOTATION_APPLIED] = applied
    if (history := _history(job, todo, present.get(ANNOTATION_HISTORY, "[]"))) is not None:
        wanted[ANNOTATION_HISTORY] = history
    finalizers = _finalizers(job, todo)
    released = finalizers is not None and FINALIZER not in finalizers
    changed = {} if released else {k: v for k, v in wanted.items() if v != present.get(k)}
    metadata: dict[str, Any] = {}
    if changed:
        metadata["annotations"] = changed
    if finalizers is not None:
        metadata["finalizers"] = finalizers
    queue = next((action.queue for action in todo.actions if isinstance(action, SetQueueLabel)), "")
    if queue and queue != job.fact.queue and not released:
        metadata["labels"] = {LABEL_QUEUE: queue}
    return metadata


def _history(job: Job, todo: Plan, present: str) -> str | None:
    """Give the history's new text; None if it is unchanged. Entries of another object are left out."""
    if not (todo.history or todo.running_since is not None or job.fact.has_foreign_record):
        return None
    known = decode_history(present)
    entries = tuple(entry for entry in known if is_own(entry.owner, job.body))
    has_foreign = len(entries) < len(known) and not todo.skips_record
    if not (todo.history or todo.running_since is not None or has_foreign):
        return None
    entries += tuple(replace(entry, owner=job.fact.uid) for entry in todo.history)
    if todo.running_since is not None:
        entries = mark_running(entries, todo.record.generation, todo.running_since)
    return encode_history(entries)


def status_change(job: Job, todo: Plan) -> dict[str, Any] | None:
    """Give the whole status to write; None if it is unchanged or the job can no longer be written."""
    if any(isinstance(a, SetFinalizer) and not a.present for a in todo.actions):
        return None  # the object is gone, or is removed with its last finalizer
    present = mapping(job.body.get("status"))
    kept = present if todo.skips_record and is_within_depth(present, MAX_DEPTH) else todo.status
    status = {**kept, "conditions": [_condition_body(c) for c in todo.conditions]}
    return None if _same(present, status) else status


def status_with_conditions(job: Job, conditions: Sequence[Condition]) -> dict[str, Any]:
    """Give the present status with these conditions."""
    return {**mapping(job.body.get("status")), "conditions": [_condition_body(c) for c in conditions]}


def is_released(job: Job) -> bool:
    """Whether the API server removed the job with its last finalizer."""
    return job.fact.deleting_since is not None and not finalizers_of(job.body)


def _finalizers(job: Job, todo: Plan) -> list[str] | None:
    present = finalizers_of(job.body)
    for action in todo.actions:
        if isinstance(action, SetFinalizer):
            if action.present and FINALIZER not in present:
                return [*present, FINALIZER]
            if not action.present and FINALIZER in present:
                return [name for name in present if name != FINALIZER]
    return None


def _condition_body(condition: Condition) -> dict[str, str]:
    return {
        "type": condition.type,
        "status": "True" if condition.status else "False",
        "reason": condition.reason,
        "message": condition.message,
        "lastTransitionTime": timestamp(condition.since),
    }


def _same(present: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    try:
        return json.dumps(dict(present), sort_keys=True) == json.dumps(dict(wanted), sort_keys=True)
    except RecursionError:
        return False  # no wanted value is nested this deep
