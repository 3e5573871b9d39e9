"""The end of a job: its pods, its deletion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from .actions import Action, DeleteJob, DeletePod, JobEvent, SetFinalizer, ShutDownAgent, StopWorkers
from .clean_pod_policy import CleanPodPolicy
from .context import Context, PlanDraft
from .health import drain_grace
from .next_generation import has_begun_next, next_number
from .pod_removal import remove
from .reasons import AnyReason, Reason, as_reason
from .record import Record
from .replica import Health, Replica, Replicas
from .snapshot import AgentState, Snapshot
from .time_order import earliest

SIDECAR_GRACE = timedelta(seconds=60)
SIDECAR_RUNS = "a container still runs a minute after the end of the job"
NAMED_PODS = 3
DELETION_LIMIT = timedelta(seconds=30)
# The grace period of a pod after that; 0 would delete it by force.
KILL_GRACE = timedelta(seconds=1)
# A kubelet needs some seconds to kill a pod; a longer delay is reported.
BLOCKED_AFTER = timedelta(seconds=30)

Parts = tuple[Record, tuple[Action, ...], datetime | None]


def plan_end(snapshot: Snapshot, record: Record, replicas: Replicas) -> Parts:
    """Shut the agents down, keep or delete the pods (cleanPodPolicy), and delete the job when its time to live is over."""
    policy = snapshot.job.policy
    # Without a valid spec, the user's cleanPodPolicy is unknown: keep the pods.
    clean = policy.clean_pods if policy else CleanPodPolicy.NONE
    ended_at = record.ended_at or snapshot.now
    actions: list[Action] = []
    wake: datetime | None = None
    for replica in replicas.by_id.values():
        is_wanted = not _to_be_deleted(clean, record, replica)
        if replica.pod.ended and is_wanted:
            continue
        if not (is_wanted and _has_run(replica)):
            actions += remove(replica, "the job has ended")
        elif replica.pod.containers_ended and not replica.cannot_run_again:
            continue  # its kubelet is about to write the phase
        elif snapshot.now - ended_at >= SIDECAR_GRACE:
            actions += remove(replica, SIDECAR_RUNS)
        else:
            wake = ended_at + SIDECAR_GRACE
            if replica.agent.state not in (None, AgentState.SHUTDOWN) and not _container_has_ended(replica):
                actions.append(ShutDownAgent(replica.pod.name))
    if policy is not None and policy.ttl is not None:
        due = ended_at + policy.ttl
        if snapshot.now >= due:
            actions.append(DeleteJob())
        else:
            wake = earliest(wake, due)
    return record, tuple(actions), wake


def _to_be_deleted(clean: CleanPodPolicy, record: Record, replica: Replica) -> bool:
    if clean is CleanPodPolicy.ALL:
        return True
    if clean is CleanPodPolicy.ONLY_COMPLETE:
        return record.outcome == "Completed"
    return clean is CleanPodPolicy.RUNNING and not _has_finished(record, replica)


def _has_finished(record: Record, replica: Replica) -> bool:
    """Whether a replica has finished. A new operator that has not heard its agent yet trusts the outcome."""
    if _container_has_ended(replica) or replica.agent.state in (AgentState.COMPLETED, AgentState.SHUTDOWN):
        return True
    return replica.agent.state is None and record.outcome == "Completed" and replica.id in record.member_set


def _has_run(replica: Replica) -> bool:
    """Whether a pod ever ran: otherwise it has no logs to keep, and its agent could still start later."""
    container = replica.pod.container
    return replica.pod.started or replica.pod.ended or (container is not None and container.has_run)


def _container_has_ended(replica: Replica) -> bool:
    """Whether the agent's container has ended. The phase of the pod follows some time later."""
    return replica.pod.ended or (replica.pod.container is not None and replica.pod.container.ended)


def plan_deletion(snapshot: Snapshot, record: Record, replicas: Replicas) -> Parts:
    """Delete quickly: stop the workers, delete the pods, and remove the finalizer when they are gone.

    With annotation elastipod.io/drain-on-delete the workers get the graceful time-out for a last checkpoint. After 30 s the
    kubelets must kill what still runs, and pods that cannot run again are deleted by force.
    """
    since = snapshot.job.deleting_since or snapshot.now
    grace = _drain_time(snapshot)
    answering = [r for r in replicas.by_id.values() if r.health in (Health.GOOD, Health.DISRUPTED)]
    running = [r for r in answering if r.agent.state is AgentState.RUNNING]
    draining = [r for r in answering if r.agent.state is AgentState.STOPPING]
    if snapshot.job.drain_on_delete and (running or draining) and snapshot.now < since + grace:
        left = max(1, int((since + grace - snapshot.now).total_seconds()))
        # Agents that drain already may have been told of a generation that follows.
        told = [*running, *(r for r in draining if r.agent.next_generation is not None)]
        stops = [StopWorkers(r.pod.name, _generation_of(r, record), graceful=True, timeout_s=left) for r in told]
        return record, tuple(stops), since + grace
    if not replicas.by_id:
        return record, (SetFinalizer(False),), None
    actions: list[Action] = []
    limit = deletion_due_at(snapshot)
    is_over = snapshot.now >= limit
    for replica in replicas.by_id.values():
        actions += _kill(replica, snapshot.now) if is_over else remove(replica, "the job is deleted")
    return record, tuple(actions), limit if not is_over else snapshot.now + timedelta(seconds=5)


def _generation_of(replica: Replica, record: Record) -> int:
    """Give the generation that a replica's workers train in: it may have begun the one that follows a drain by itself."""
    number = next_number(replica, record)
    return number if number is not None and has_begun_next(replica, record) else record.generation


def _kill(replica: Replica, now: datetime) -> list[Action]:
    """End a pod without further delay.

    Its object is deleted by force only if that leaves nothing running: its containers have ended, or its node is gone.
    Otherwise the kubelet kills what still runs and confirms it by removing the object.
    """
    pod = replica.pod
    if replica.cannot_run_again:
        return [DeletePod(pod.name, pod.uid, "the job is deleted", force=True)]
    if pod.kill_at is not None and pod.kill_at <= now + KILL_GRACE:
        return []
    grace_s = int(KILL_GRACE.total_seconds())
    return [DeletePod(pod.name, pod.uid, "the job is deleted, and its containers did not end in time", grace_s=grace_s)]


def deletion_notes(deletions: Sequence[DeletePod]) -> tuple[JobEvent, ...]:
    """Give the Events for deletions that a user would not expect: by force, and of pods with a sidecar."""
    forced = [action for action in deletions if action.force]
    kept_alive = [action for action in deletions if action.reason == SIDECAR_RUNS and not action.force]
    events: list[JobEvent] = []
    if forced:
        text = "deleted by force, because no kubelet does it; on a disconnected node its containers may run until the node is back"
        events.append(JobEvent(Reason.POD_FORCE_DELETED, f"{_pod_names(forced)} ({forced[0].reason}): {text}"))
    if kept_alive:
        events.append(
            JobEvent(
                Reason.SIDECAR_STILL_RUNS,
                f"{_pod_names(kept_alive)} deleted: {SIDECAR_RUNS} and would keep its devices",
            )
        )
    return tuple(events)


def _pod_names(deletions: Sequence[DeletePod]) -> str:
    names = ", ".join(action.name for action in deletions[:NAMED_PODS])
    more = f" and {len(deletions) - NAMED_PODS} more" if len(deletions) > NAMED_PODS else ""
    return f"{'pod' if len(deletions) == 1 else 'pods'} {names}{more}"


def deletion_due_at(snapshot: Snapshot) -> datetime:
    """Give when the pods of a job that is being deleted must have ended."""
    return (snapshot.job.deleting_since or snapshot.now) + _drain_time(snapshot) + DELETION_LIMIT


def blocked_deletion(snapshot: Snapshot, replicas: Replicas) -> str:
    """Say what blocks the deletion of a job after its pods should have ended; empty when nothing does."""
    if snapshot.job.deleting_since is None or snapshot.now < deletion_due_at(snapshot) + BLOCKED_AFTER:
        return ""
    left = sorted((r for r in replicas.by_id.values() if not r.cannot_run_again), key=lambda r: r.id)
    if not left:
        return ""
    pod, more = left[0].pod, f" (and {len(left) - 1} more)" if len(left) > 1 else ""
    node = snapshot.nodes.get(pod.node)
    why = "its kubelet has not ended it" if node is not None and node.ready else "its node is not ready"
    return (
        f"pod {pod.name}{more} on node {pod.node or '(none)'} should have ended, but {why}; the job is deleted when the pod has ended, "
        f"or when its node is deleted, tainted as out of service, or not ready for {drain_grace(snapshot).total_seconds():g} s"
    )


def _drain_time(snapshot: Snapshot) -> timedelta:
    policy = snapshot.job.policy
    return policy.graceful_timeout if policy is not None and snapshot.job.drain_on_delete else timedelta(0)


KEPT_TEXT = (
    "spec.runPolicy.ttlSecondsAfterFinished is 0, which means that the job is kept; set it to 1 or more to delete the job that many "
    "seconds after its end"
)


def finish(record: Record, context: Context, outcome: str, reason: AnyReason, message: str) -> PlanDraft:
    """End the job."""
    ended = replace(
        record, outcome=outcome, outcome_reason=reason, outcome_message=message, ended_at=context.now, transition=None,
        window_since=None, fault_at=None, gang=None,
    )  # fmt: skip
    record, actions, wake = plan_end(context.snapshot, ended, context.replicas)
    kept = (JobEvent(Reason.JOB_KEPT, KEPT_TEXT),) if context.policy.is_ttl_zero else ()
    return PlanDraft(record, actions, (JobEvent(as_reason(outcome), message), *kept), wake_at=wake)
