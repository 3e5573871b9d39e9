"""Condition Warning: what needs attention although the job continues."""

from __future__ import annotations

from collections import Counter
from datetime import datetime

from ..context import Context
from ..depth import NO_PROGRESS_LIMIT, keeps_nothing
from ..ending import blocked_deletion
from ..escalation import does_not_progress
from ..queue_warnings import Warnings, overdue_evictions, queue_warnings
from ..quota import Quota, QuotaRequest
from ..quota_requests import quota_returned_until
from ..reasons import AnyReason, Reason
from ..record import Record
from ..replica import Replicas
from ..snapshot import ObservedJob, Policy, Snapshot
from ..wording import counted
from .draft import ConditionDraft, time_of_day
from .operator_error import OPERATOR_ERROR

FOREIGN_RECORD = (
    "annotations of the operator (elastipod.io/state, applied or history) were written for another object, as in a copied "
    "manifest, or by hand; they are ignored and replaced, and the job starts from the beginning"
)


PRIORITY_PROBLEMS = (Reason.PRIORITY_CLASS_MISSING, Reason.PRIORITY_REFUSED)


def describe(record: Record, context: Context) -> tuple[ConditionDraft | None, datetime | None]:
    """Report what needs attention although the job continues; the most urgent warning gives the reason."""
    snapshot, policy, quota = context.snapshot, context.policy, context.quota
    late, due = overdue_evictions(snapshot, policy, context.replicas, quota)
    found: Warnings = []
    found += unusable_edits(snapshot.job)
    if does_not_progress(record):
        text = (
            f"the last {record.stalled_recoveries} recoveries reached no newer step; "
            f"after {NO_PROGRESS_LIMIT} the fault is probably in the script"
        )
        found.append((Reason.NO_PROGRESS, text))
    found += late
    found += queue_warnings(snapshot.job, policy, snapshot.queue_fact, quota)
    if quota is not None:
        found += _priorities(snapshot, quota)
        found += _outdated_base(policy, quota)
    found += _refused_answers(context.replicas)
    found += pending_edits(snapshot.job)
    found += _pending_limits(record, policy)
    if policy.expects_memory and record.running_since is not None and keeps_nothing(record, context.replicas):
        text = (
            "spec.elastipod.recovery is InMemory, but the workers keep nothing in memory: they neither announce it nor run with "
            "--inprocess-restart, so each change starts new processes from a checkpoint"
        )
        found.append((Reason.SPEC_WARNING, text))
    found += spec_warnings(snapshot.job, policy)
    return (_merge_warnings(found) if found else None), due


def unusable_edits(job: ObservedJob) -> Warnings:
    """Report edits with which the job could not run."""
    text = f"{job.edit_error}; the last valid spec stays in force"
    return [(Reason.INVALID_SPEC, text)] if job.edit_error else []


def pending_edits(job: ObservedJob) -> Warnings:
    """Report edits that a running job does not take over."""
    text = f"edits of {', '.join(job.pending_edits)} take effect when the job is suspended and resumed"
    return [(Reason.EDITS_PENDING, text)] if job.pending_edits else []


def _pending_limits(record: Record, policy: Policy) -> Warnings:
    """Report specs with more members than they may have now. No change begins for it while the size as a whole is allowed.

    Such a change could lead to itself again: who alone holds a part of the state continues, whatever the limit of its spec.
    """
    size, number = len(record.members), Counter(member.spec for member in record.members)
    if record.transition is not None or policy.sizes.fit(size) != size:
        return []
    return [
        (
            Reason.EDITS_PENDING,
            f"spec.replicaSpecs[{spec.name}] allows {counted(spec.limit, 'replica')} now, and {number[spec.name]} train; the lower limit "
            "takes effect at the next change of the size or recovery, or when the job is suspended and resumed",
        )
        for spec in policy.specs
        if number[spec.name] > spec.limit
    ]


def spec_warnings(job: ObservedJob, policy: Policy) -> Warnings:
    """Report what the object itself shows."""
    return [*job.warnings, *((Reason.SPEC_WARNING, text) for text in (*policy.sizes.warnings, *policy.warnings))]


def with_operator_warnings(
    lines: list[ConditionDraft], snapshot: Snapshot, replicas: Replicas, record: Record
) -> list[ConditionDraft]:
    """Put errors of the operator, and pods or quota that cannot be released, before all other warnings, also when a job ends."""
    found: Warnings = [(OPERATOR_ERROR, snapshot.operator_error)] if snapshot.operator_error else []
    if stuck := snapshot.pod_deletion_error or blocked_deletion(snapshot, replicas):
        found.append((Reason.PODS_NOT_DELETED, stuck))
    if snapshot.quota_return_error:
        found.append((Reason.QUOTA_NOT_RETURNED, _not_returned(snapshot)))
    if _has_foreign_record(snapshot, record):
        found.append((Reason.RECORD_IGNORED, FOREIGN_RECORD))
    if not found:
        return lines
    others = [line for line in lines if line.type != "Warning"]
    if snapshot.job.deleting_since is None:
        found += (
            part for line in lines if line.type == "Warning" for part in line.parts or ((line.reason, line.message),)
        )
    return [*others[:-1], _merge_warnings(found), others[-1]]


def _has_foreign_record(snapshot: Snapshot, record: Record) -> bool:
    """Whether to report an ignored record. It is overwritten at once, so the warning itself keeps the fact until training begins."""
    is_reported = any(FOREIGN_RECORD in c.message for c in snapshot.job.conditions if c.type == "Warning")
    return snapshot.job.has_foreign_record or (is_reported and not record.generation)


def _not_returned(snapshot: Snapshot) -> str:
    if snapshot.job.deleting_since is None:
        return f"{snapshot.quota_return_error}; the operator tries again"
    return (
        f"{snapshot.quota_return_error}; the job is deleted nevertheless at {time_of_day(quota_returned_until(snapshot))}, if its "
        "pods have ended: then the garbage collector deletes its Workloads"
    )


def _refused_answers(replicas: Replicas) -> Warnings:
    """Report agents that send more than the operator accepts."""
    refused = sorted((r for r in replicas.newest.values() if r.agent.refused_answer), key=lambda r: r.id)
    if not refused:
        return []
    others = f" (and of {counted(len(refused) - 1, 'more pod')})" if len(refused) > 1 else ""
    return [
        (Reason.ANSWER_REFUSED, f"the agent of pod {refused[0].pod.name}{others}: {refused[0].agent.refused_answer}")
    ]


def _merge_warnings(found: Warnings) -> ConditionDraft:
    """Merge several warnings into one condition; the first gives the reason."""
    by_reason: dict[AnyReason, list[str]] = {}
    for reason, text in found:
        by_reason.setdefault(reason, []).append(text)
    parts = tuple((reason, "; ".join(texts)) for reason, texts in by_reason.items())
    return ConditionDraft("Warning", False, parts[0][0], "; ".join(text for _, text in parts), parts)


def _outdated_base(policy: Policy, quota: Quota) -> Warnings:
    """Report that sizes or spares were edited while the base Workload keeps its quota."""
    if 0 not in quota.granted:
        return []
    granted = f"queue {quota.queue} granted a base"
    rest = "which cannot be changed; the job keeps it until it is suspended and resumed"
    texts = []
    if quota.retained_base:
        size = counted(quota.retained_base, "replica")
        texts.append(f"the minimum size is now {policy.sizes.minimum}, but {granted} of {size}, {rest}")
    base = quota.requests[0]
    beyond = {spec.name: _spares_in(base, spec.name) - spec.spares for spec in policy.specs if spec.name in base.trains}
    if short := [f"spec.replicaSpecs[{name}].spares" for name, pods in beyond.items() if pods < 0]:
        texts.append(f"{granted} without room for all of {', '.join(short)}, {rest}")
    if ample := [f"spec.replicaSpecs[{name}]" for name, pods in beyond.items() if pods > 0]:
        texts.append(f"{granted} with room for more pods of {', '.join(ample)} than the job may have, {rest}")
    return [(Reason.EDITS_PENDING, text) for text in texts]


def _spares_in(request: QuotaRequest, spec: str) -> int:
    return dict(request.counts)[spec] - request.trains[spec]


def _priorities(snapshot: Snapshot, quota: Quota) -> Warnings:
    """Report edited priorities that have no effect yet."""
    problem = snapshot.queue_problem
    if problem is not None and problem[0] in PRIORITY_PROBLEMS and 0 in quota.present:
        return [(problem[0], f"{problem[1]}; the Workloads keep their priority")]
    if not any(w.is_priority_fixed for w in quota.present.values()):
        return []
    text = "Kueue does not allow a Workload that has quota to change to another kind of priority class"
    return [
        (Reason.PRIORITY_PENDING, f"{text}; the edited priority takes effect when the job is suspended and resumed")
    ]
