"""The end of a job: what becomes of its pods, and its deletion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from ..api.models import CleanPodPolicy
from .actions import Action, DeleteJob, DeletePod, JobEvent, SetFinalizer, ShutDownAgent, StopWorkers
from .context import Context, PlanDraft
from .health import Health, Replica, Replicas, drain_grace
from .pod_removal import remove
from .reasons import AnyReason, Reason, as_reason
from .record import Record
from .snapshot import AgentState, Snapshot
from .time_order import earliest

SIDECAR_GRACE = timedelta(seconds=60)
SIDECAR_RUNS = "a container still runs a minute after the end of the job"
NAMED_PODS = 3
DELETION_LIMIT = timedelta(seconds=30)
# What a kubelet leaves the containers of a pod after that; 0 would be removal by force.
KILL_GRACE = timedelta(seconds=1)
# A kubelet needs some seconds to end a pod at once; what takes longer is told.
BLOCKED_AFTER = timedelta(seconds=30)

Parts = tuple[Record, tuple[Action, ...], datetime | None]


def plan_end(snapshot: Snapshot, record: Record, replicas: Replicas) -> Parts:
    """Let every agent go, then treat the pods as cleanPodPolicy says, then the job itself as its time to live says."""
    policy = snapshot.job.policy
    # Where the spec cannot be read, nobody knows what the user wants done with the pods: they stay.
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
    """Whether a replica's work is done, as far as anything tells: an operator that just began has not heard its agent."""
    if _container_has_ended(replica) or replica.agent.state in (AgentState.COMPLETED, AgentState.SHUTDOWN):
        return True
    return replica.agent.state is None and record.outcome == "Completed" and replica.id in record.members


def _has_run(replica: Replica) -> bool:
    """Whether there is anything to keep of a pod: one whose agent never began has no logs and would only begin later."""
    container = replica.pod.container
    return replica.pod.started or replica.pod.ended or (container is not None and container.has_run)


def _container_has_ended(replica: Replica) -> bool:
    """Whether the agent's container is over. The phase of the pod says so only some time later."""
    return replica.pod.ended or (replica.pod.container is not None and replica.pod.container.ended)


def plan_deletion(snapshot: Snapshot, record: Record, replicas: Replicas) -> Parts:
    """Delete quickly: workers are ended at once, pods deleted, the finalizer taken off when they are gone.

    With annotation elastipod.io/drain-on-delete the workers get the graceful time-out for a last checkpoint. After 30 s
    kubelets have to end at once what is left; what is gone is removed by force.
    """
    since = snapshot.job.deleting_since or snapshot.now
    grace = _drain_time(snapshot)
    answering = [r for r in replicas.by_id.values() if r.health in (Health.GOOD, Health.DISRUPTED)]
    running = [r for r in answering if r.agent.state is AgentState.RUNNING]
    draining = [r for r in answering if r.agent.state is AgentState.STOPPING]
    if snapshot.job.drain_on_delete and (running or draining) and snapshot.now < since + grace:
        left = max(1, int((since + grace - snapshot.now).total_seconds()))
        stops = [StopWorkers(r.pod.name, record.generation, graceful=True, timeout_s=left) for r in running]
        return record, tuple(stops), since + grace
    if not replicas.by_id:
        return record, (SetFinalizer(False),), None
    actions: list[Action] = []
    limit = deletion_due_at(snapshot)
    is_over = snapshot.now >= limit
    for replica in replicas.by_id.values():
        actions += _kill(replica, snapshot.now) if is_over else remove(replica, "the job is deleted")
    return record, tuple(actions), limit if not is_over else snapshot.now + timedelta(seconds=5)


def _kill(replica: Replica, now: datetime) -> list[Action]:
    """Have a pod ended without further delay.

    Its object goes by force only where that leaves nothing running: its containers have ended, or its node is gone. Elsewhere
    the kubelet is told to kill what still runs, and confirms that by taking the object away.
    """
    pod = replica.pod
    if replica.cannot_run_again:
        return [DeletePod(pod.name, pod.uid, "the job is deleted", force=True)]
    if pod.kill_at is not None and pod.kill_at <= now + KILL_GRACE:
        return []
    grace_s = int(KILL_GRACE.total_seconds())
    return [DeletePod(pod.name, pod.uid, "the job is deleted, and its containers did not end in time", grace_s=grace_s)]


def deletion_notes(deletions: Sequence[DeletePod]) -> tuple[JobEvent, ...]:
    """Give the Events for deletions that a user would not expect: by force, and of pods with a sidecar (29)."""
    forced = [action for action in deletions if action.force]
    kept_alive = [action for action in deletions if action.reason == SIDECAR_RUNS and not action.force]
    events: list[JobEvent] = []
    if forced:
        text = "removed by force, for no kubelet does it any more; on a node that is cut off its containers may run on until it is back"
        events.append(
            JobEvent(Reason.POD_FORCE_DELETED, f"{_pod_names(forced)} ({forced[0].reason}): {text}", warning=True)
        )
    if kept_alive:
        events.append(
            JobEvent(
                Reason.SIDECAR_STILL_RUNS,
                f"{_pod_names(kept_alive)} deleted: {SIDECAR_RUNS}, and would hold its devices",
            )
        )
    return tuple(events)


def _pod_names(deletions: Sequence[DeletePod]) -> str:
    names = ", ".join(action.name for action in deletions[:NAMED_PODS])
    more = f" and {len(deletions) - NAMED_PODS} more" if len(deletions) > NAMED_PODS else ""
    return f"{'pod' if len(deletions) == 1 else 'pods'} {names}{more}"


def deletion_due_at(snapshot: Snapshot) -> datetime:
    """Give until when the pods of a job that is being deleted may take to end."""
    return (snapshot.job.deleting_since or snapshot.now) + _drain_time(snapshot) + DELETION_LIMIT


def blocked_deletion(snapshot: Snapshot, replicas: Replicas) -> str:
    """Say what holds the deletion of a job up when its pods should be gone for a while; empty when nothing does."""
    if snapshot.job.deleting_since is None or snapshot.now < deletion_due_at(snapshot) + BLOCKED_AFTER:
        return ""
    left = sorted((r for r in replicas.by_id.values() if not r.cannot_run_again), key=lambda r: r.id)
    if not left:
        return ""
    pod, more = left[0].pod, f" (and {len(left) - 1} more)" if len(left) > 1 else ""
    node = snapshot.nodes.get(pod.node)
    why = "its kubelet has not ended it" if node is not None and node.ready else "its node is not ready"
    return (
        f"pod {pod.name}{more} on node {pod.node or '(none)'} is to go, but {why}; the job goes when the pod has ended, or when "
        f"its node is deleted, tainted as out of service, or not ready for {drain_grace(snapshot).total_seconds():g} s"
    )


def _drain_time(snapshot: Snapshot) -> timedelta:
    policy = snapshot.job.policy
    return policy.graceful_timeout if policy is not None and snapshot.job.drain_on_delete else timedelta(0)


KEPT_TEXT = (
    "spec.runPolicy.ttlSecondsAfterFinished is 0, which means that the job is kept; set it to 1 or more to have the job deleted so "
    "many seconds after its end"
)


def finish(record: Record, context: Context, outcome: str, reason: AnyReason, message: str) -> PlanDraft:
    """End the job."""
    ended = replace(
        record, outcome=outcome, outcome_reason=reason, outcome_message=message, ended_at=context.now, transition=None,
        window_since=None, fault_at=None, gang=None,
    )  # fmt: skip
    record, actions, wake = plan_end(context.snapshot, ended, context.replicas)
    kept = (JobEvent(Reason.JOB_KEPT, KEPT_TEXT),) if context.policy.is_ttl_zero else ()
    return PlanDraft(
        record, actions, (JobEvent(as_reason(outcome), message, warning=outcome == "Failed"), *kept), wake_at=wake
    )
