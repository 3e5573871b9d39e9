"""The state record that a decision starts from: the one on the job, or a first one."""

from __future__ import annotations

from dataclasses import replace

from .backoff import longest_wait
from .clock_skew import without_future_times
from .faults import STOP_TIME
from .health import assess
from .reasons import Reason
from .record import RECORD_LOST, Record, Transition, TransitionKind
from .replica import Replicas
from .snapshot import Snapshot


def current_record(snapshot: Snapshot) -> Record:
    """Give the job's state record, without times in the future; a first one where it has none."""
    policy = snapshot.job.policy
    longest = longest_wait(policy.backoff_max) if policy is not None else None
    record = snapshot.job.record or _first_record(snapshot, assess(snapshot))
    return without_future_times(record, snapshot.now, longest)


def without_empty_record(snapshot: Snapshot) -> Snapshot:
    """Treat an empty record as a lost one: a job without members cannot have completed."""
    empty = snapshot.job.record
    if empty is None or not empty.is_empty:
        return snapshot
    known = max(snapshot.job.history_generation, empty.generation)
    return replace(snapshot, job=replace(snapshot.job, record=None, history_generation=known))


def _first_record(snapshot: Snapshot, replicas: Replicas) -> Record:
    """Give the record of a new job, or of one whose record was lost: all workers are stopped and started in a newer generation.

    A job whose status says that it has ended does not start again.
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
    kind, cause, message = TransitionKind.START, Reason.JOB_CREATED, "the job was accepted"
    if known or replicas.by_id:  # no pod is created before there is a record
        kind = TransitionKind.RECOVERY if known else TransitionKind.START
        cause, message = RECORD_LOST, "the job's state record was lost"
    begun = Transition(
        kind=kind, cause=cause, message=message, from_size=0, target_size=target_size, began_at=snapshot.now, detected_at=snapshot.now,
        deadline=snapshot.now + STOP_TIME,
    )  # fmt: skip
    members = tuple(sorted(pod for pod, r in replicas.by_id.items() if (r.agent.generation or 0) > 0))
    # Workers ran, so the loss of the record must not let startupDeadlineSeconds pass.
    return Record(
        generation=known, members=members, transition=begun, started_at=snapshot.now if members else None,
        accepted_at=snapshot.job.created_at,
    )  # fmt: skip
