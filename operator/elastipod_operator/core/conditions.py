"""What the user is told: conditions with reasons in plain words, the size, and the status fields (decision 30)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from .actions import JobEvent
from .base_first import base_minimum
from .ending import blocked_deletion
from .escalation import NO_PROGRESS_LIMIT, does_not_progress
from .growth import growth_due
from .health import Health, Replica, Replicas
from .membership import earliest, wanted_slots
from .operator_error_condition import OPERATOR_ERROR
from .payback import growth_hold
from .queue_warnings import Warnings, overdue_evictions, queue_warnings
from .quota import Quota
from .quota_requests import increments_requested_from, quota_returned_until
from .record import Record, TransitionKind
from .snapshot import NOT_CONSIDERED, AgentState, Condition, ObservedPod, Policy, Snapshot
from .status_fields import size_text, status_fields

# Running stays the state through planned resizes, and through recoveries up to this long.
FAULT_REPORTED_AFTER = timedelta(seconds=30)
# A kubelet tries again 10 to 15 s after what did not work: what outlasts two more tries hardly heals by itself.
TROUBLE_REPORTED_AFTER = timedelta(seconds=30)
# Characters of a condition's message; Kubernetes' own conditions stop at 32,768.
MAX_TEXT = 8192
TRANSIENT_TROUBLES = ("ImagePullFailed", "ContainerCannotStart", NOT_CONSIDERED)


@dataclass(frozen=True, slots=True)
class StatusReport:
    """conditions: oldest first, the present state last. notes: Events for what newly became worth telling."""

    conditions: tuple[Condition, ...]
    size: str
    status: dict[str, Any]
    events: tuple[JobEvent, ...] = ()
    wake_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class ConditionDraft:
    """A condition before its time is known."""

    type: str
    status: bool
    reason: str
    message: str
    parts: tuple[tuple[str, str], ...] = ()
    """Of several things that are told together: reason and sentence of each."""


def describe(snapshot: Snapshot, record: Record, replicas: Replicas, quota: Quota | None = None) -> StatusReport:
    """Say how the job stands. Times of unchanged conditions are kept; events are given only for changed reasons."""
    late, eviction_due_at = _overdue_evictions(snapshot, replicas, quota)
    lines, wake = _drafts(snapshot, record, replicas, quota, late)
    lines = _with_operator_warnings(lines, snapshot, replicas, record)
    old = {condition.type: condition for condition in snapshot.job.conditions}
    conditions = tuple(_dated(line, old, snapshot.now) for line in lines)
    events = tuple(
        JobEvent(reason, message, warning=True)
        for line in lines
        if line.type in ("PodsReady", "Warning", "Suspended")
        for reason, message in line.parts or ((line.reason, line.message),)
        if reason in WORTH_AN_EVENT and not _is_reported(old.get(line.type), reason, message if line.parts else "")
    )
    wake = earliest(wake, eviction_due_at)
    return StatusReport(
        conditions, size_text(snapshot, record, replicas), status_fields(snapshot, record, replicas), events, wake
    )


def _is_reported(before: Condition | None, reason: str, message: str) -> bool:
    """Whether a condition says so already. message: of one of several things; "" where the reason tells enough."""
    return before is not None and (before.reason == reason or (bool(message) and message in before.message))


WORTH_AN_EVENT = frozenset(
    {
        "AgentNotAnswering",
        "AgentSilent",
        "PodsRefused",
        "PodsNotDeleted",
        "ImagePullFailed",
        "ContainerCannotStart",
        "ContainerEnded",
        "InvalidSpec",
        "SpecWarning",
        "TopologyIgnored",
        NOT_CONSIDERED,
        "EditsPending",
        "NoProgress",
        "RecordIgnored",
        "RecordOfNewerOperator",
        "OperatorCutOff",
        "TokenRefused",
        "AnswerRefused",
        "EvictionOverdue",
        "QuotaNotReturned",
        "QueueMissing",
        "QueueStopped",
        "QueueInactive",
        "QueueTooSmall",
        "PreemptionNever",
        "StrictFIFO",
        "PriorityClassMissing",
        "PriorityRefused",
        "PriorityPending",
    }
)
FOREIGN_RECORD = (
    "annotations of the operator (elastipod.io/state, applied or history) were written for another object, as in a copied "
    "manifest, or by hand; they are ignored and replaced, and the job begins anew"
)
PRIORITY_TROUBLES = ("PriorityClassMissing", "PriorityRefused")


def _dated(line: ConditionDraft, old: dict[str, Condition], now: datetime) -> Condition:
    """Give a condition; a message that repeats something endless of the user's is cut."""
    before = old.get(line.type)
    since = before.since if before is not None and before.status == line.status else now
    message = line.message if len(line.message) <= MAX_TEXT else f"{line.message[:MAX_TEXT]} ..."
    return Condition(line.type, line.status, line.reason, message, since)


def _overdue_evictions(snapshot: Snapshot, replicas: Replicas, quota: Quota | None) -> tuple[Warnings, datetime | None]:
    return (
        overdue_evictions(snapshot, snapshot.job.policy, replicas, quota)
        if snapshot.job.policy is not None
        else ([], None)
    )


def _drafts(
    snapshot: Snapshot, record: Record, replicas: Replicas, quota: Quota | None, late: Warnings
) -> tuple[list[ConditionDraft], datetime | None]:
    created = ConditionDraft("Created", True, "Accepted", "the job was accepted")
    if record.outcome:
        ended = ConditionDraft(record.outcome, True, record.outcome_reason, record.outcome_message)
        return [created, ConditionDraft("Running", False, record.outcome, "the job has ended"), ended], None
    if snapshot.job.unmanaged:
        return _unmanaged(snapshot, created), None
    policy = snapshot.job.policy
    if policy is None:
        return _invalid_spec(created, record, snapshot.job.refusal), None
    pods_ready, trouble_at = _pods_ready(snapshot, replicas, policy)
    auxiliary = [
        line
        for line in (
            pods_ready,
            _warning(snapshot, record, replicas, policy, quota, late),
            _scaling(snapshot, record, replicas, policy, quota),
        )
        if line
    ]
    state, wake = _state(snapshot, record, replicas, policy)
    before = [created] if state.type != "Created" else []
    if state.type in ("Running", "Faulted"):
        before.append(ConditionDraft("PodsRunning", True, "PodsRunning", "the first pods run"))
    if state.type != "Running" and any(c.type == "Running" for c in snapshot.job.conditions):
        before.append(ConditionDraft("Running", False, state.reason, state.message))
    return [*before, *auxiliary, state], earliest(wake, trouble_at)


def _with_operator_warnings(
    lines: list[ConditionDraft], snapshot: Snapshot, replicas: Replicas, record: Record
) -> list[ConditionDraft]:
    """Say first of all, also at the end of a job, what the operator failed at, and what is to go and cannot: pods, and quota."""
    found: Warnings = [(OPERATOR_ERROR, snapshot.operator_error)] if snapshot.operator_error else []
    if stuck := snapshot.pod_deletion_trouble or blocked_deletion(snapshot, replicas):
        found.append(("PodsNotDeleted", stuck))
    if snapshot.quota_return_trouble:
        found.append(("QuotaNotReturned", _not_returned(snapshot)))
    if _has_foreign_record(snapshot, record):
        found.append(("RecordIgnored", FOREIGN_RECORD))
    if not found:
        return lines
    others = [line for line in lines if line.type != "Warning"]
    if snapshot.job.deleting_since is None:
        found += (
            part for line in lines if line.type == "Warning" for part in line.parts or ((line.reason, line.message),)
        )
    return [*others[:-1], _merge_warnings(found), others[-1]]


def _has_foreign_record(snapshot: Snapshot, record: Record) -> bool:
    """Whether to say that a record was ignored: it is overwritten at once, and told until the training begins."""
    is_told = any(FOREIGN_RECORD in c.message for c in snapshot.job.conditions if c.type == "Warning")
    return snapshot.job.has_foreign_record or (is_told and not record.generation)


def _not_returned(snapshot: Snapshot) -> str:
    if snapshot.job.deleting_since is None:
        return f"{snapshot.quota_return_trouble}; it is tried again"
    return (
        f"{snapshot.quota_return_trouble}; the job is deleted all the same, once its pods are gone, from "
        f"{_time_of_day(quota_returned_until(snapshot))} on: then the garbage collector has its Workloads"
    )


def _unmanaged(snapshot: Snapshot, created: ConditionDraft) -> list[ConditionDraft]:
    """Say why nothing is done, and leave the state as whoever understands the record told it."""
    why = ConditionDraft("Warning", False, "RecordOfNewerOperator", snapshot.job.unmanaged)
    last = snapshot.job.conditions[-1] if snapshot.job.conditions else None
    if last is None or last.type in ("Created", "Warning"):
        return [why, created]
    return [created, why, ConditionDraft(last.type, last.status, last.reason, last.message)]


def _invalid_spec(created: ConditionDraft, record: Record, refusal: str) -> list[ConditionDraft]:
    """An edit that cannot be used does not end a training that runs; it is only not looked after until it is mended."""
    if not record.members or record.transition is not None:
        return [created, ConditionDraft("Suspended", True, "InvalidSpec", refusal)]
    text = f"{len(record.members)} replicas train in generation {record.generation}"
    return [
        created,
        ConditionDraft("Warning", False, "InvalidSpec", refusal),
        ConditionDraft("Running", True, "Training", text),
    ]


def _state(
    snapshot: Snapshot, record: Record, replicas: Replicas, policy: Policy
) -> tuple[ConditionDraft, datetime | None]:
    transition = record.transition
    if transition is not None and transition.kind is TransitionKind.SUSPEND:
        if policy.suspended_by is not None:
            return ConditionDraft("Suspended", True, policy.suspended_by.reason, policy.suspended_by.message), None
        text = "spec.runPolicy.suspend is true; set it to false to resume"
        if not policy.suspend:
            text = "the job resumes as soon as its workers are stopped"
        return ConditionDraft("Suspended", True, "SuspendedByUser" if policy.suspend else "Resuming", text), None
    if transition is not None and transition.kind is TransitionKind.START:
        return _starting(record, replicas, policy), None
    text = f"{len(record.members)} replicas train in generation {record.generation}"
    if transition is not None:
        text = f"{transition.message}; {_waiting_for(record, replicas, policy)}"
    if record.fault_at is None:
        reason = "Resizing" if transition is not None else "Training" if record.running_since else "Starting"
        return ConditionDraft("Running", True, reason, text), None
    shown_at = record.fault_at + FAULT_REPORTED_AFTER
    if snapshot.now < shown_at and record.consecutive_failures < 2:
        return ConditionDraft("Running", True, "Recovering", text), shown_at
    cause = transition.cause if transition is not None else "Recovering"
    if record.consecutive_failures >= 2:
        text = f"{text} ({record.consecutive_failures} failures in a row without progress)"
        if transition is not None and transition.not_before is not None and snapshot.now < transition.not_before:
            text += f"; next try at {_time_of_day(transition.not_before)}"
        text += "; see the workers' logs with kubectl logs"
    return ConditionDraft("Faulted", True, cause, text), None


def _starting(record: Record, replicas: Replicas, policy: Policy) -> ConditionDraft:
    started = [r for r in replicas.newest.values() if r.pod.started and not r.pod.ended]
    text = _waiting_for(record, replicas, policy)
    if len(started) >= policy.sizes.minimum:
        return ConditionDraft("PodsRunning", True, "WaitingForAgents", text)
    return ConditionDraft("Created", True, "WaitingForPods", text)


def _waiting_for(record: Record, replicas: Replicas, policy: Policy) -> str:
    transition = record.transition
    assert transition is not None
    stopping = [
        r for m in record.members
        if (r := replicas.get(m)) is not None and r.agent.state in (AgentState.RUNNING, AgentState.STOPPING)
        and r.health in (Health.GOOD, Health.DISRUPTED, Health.SILENT)
    ]  # fmt: skip
    if stopping:
        return f"{len(stopping)} replicas are being stopped"
    ready = len(replicas.candidates())
    aim = max(policy.sizes.minimum, transition.target_size)
    gang = record.gang
    if gang is not None and gang.rest_until is not None:
        return f"there was room for too few replicas; one pod waits for room, the others follow from {_time_of_day(gang.rest_until)} on"
    base = policy.specs[0].name
    of_base = sum(r.id.spec == base for r in replicas.candidates())
    if policy.sizes.minimum <= ready and of_base < (least := base_minimum(policy)):
        return f"{of_base} of {least} replicas of {base} are ready, without which no others train{_why_not_ready(replicas)}"
    if ready < aim:
        return f"{ready} of {aim} replicas are ready{_why_not_ready(replicas)}"
    return f"{ready} replicas are ready"


def _why_not_ready(replicas: Replicas) -> str:
    return _first_trouble(replicas.newest.values())


def _first_trouble(replicas: Iterable[Replica]) -> str:
    """Give what keeps one of them, as the end of a sentence. What every new pod is in for a moment is no trouble yet."""
    troubles = (r.pod.trouble for r in replicas if r.pod.trouble and r.pod.trouble_reason != NOT_CONSIDERED)
    return next((f": {trouble}" for trouble in troubles), "")


def _pods_ready(
    snapshot: Snapshot, replicas: Replicas, policy: Policy
) -> tuple[ConditionDraft | None, datetime | None]:
    """Name what keeps a pod from training, with what to do about it; gives too when trouble that may heal will have lasted."""
    denied = _token_refused(replicas)
    if denied is not None:
        return denied, None
    if replicas.all_silent:
        text = "no agent answers the operator; training goes on by itself, nothing is changed until one answers"
        return ConditionDraft("PodsReady", False, "OperatorCutOff", text + _replaced_at(replicas)), None
    if snapshot.refusal:
        return ConditionDraft("PodsReady", False, "PodsRefused", snapshot.refusal), None
    told = next((c.reason for c in snapshot.job.conditions if c.type == "PodsReady"), "")
    wakes: list[datetime] = []
    for replica in sorted(replicas.newest.values(), key=lambda r: r.id):
        pod = replica.pod
        if pod.kill_at is not None:
            continue  # it goes because somebody wants it so; how it ends is nobody's trouble
        if replica.health is Health.PENDING and pod.started and replica.why == "AgentNotAnswering":
            text = (
                f"container {policy.container or 'of pod'} of pod {pod.name} runs, but nothing answers on port {policy.agent_port}: "
                "start the training with hyperpodrun, or set spec.elastipod.agentPort to the port it serves"
            )
            return ConditionDraft("PodsReady", False, "AgentNotAnswering", text), earliest(*wakes)
        if replica.health is Health.SILENT and replica.until is not None:
            text = f"{replica.detail}; unless it answers, it is replaced at {_time_of_day(replica.until)}"
            return ConditionDraft("PodsReady", False, "AgentSilent", text), earliest(*wakes)
        if not pod.trouble or pod.trouble_reason == "Unschedulable":
            continue
        if replica.health in (Health.PENDING, Health.ENDED):
            due = _persists_from(pod) if pod.trouble_reason != told else None  # what was told once has lasted
            if due is None or snapshot.now >= due:
                return ConditionDraft("PodsReady", False, pod.trouble_reason, pod.trouble), earliest(*wakes)
            wakes.append(due)
    good = len([r for r in replicas.newest.values() if r.health is Health.GOOD])
    line = ConditionDraft("PodsReady", False, "AgentsAnswer", f"{good} agents answer") if good else None
    return line, earliest(*wakes)


def _replaced_at(replicas: Replicas) -> str:
    """Say until when agents that are all silent are waited for."""
    until = max((r.until for r in replicas.by_id.values() if r.until is not None), default=None)
    return f"; if none does until {_time_of_day(until)}, the replicas are replaced" if until is not None else ""


def _persists_from(pod: ObservedPod) -> datetime | None:
    """Give when a pod's trouble is one that lasts; None: it does not heal, or began nobody knows when."""
    if pod.trouble_reason not in TRANSIENT_TROUBLES or pod.trouble_since is None:
        return None
    return pod.trouble_since + TROUBLE_REPORTED_AFTER


def _token_refused(replicas: Replicas) -> ConditionDraft | None:
    pods = sorted((r.pod for r in replicas.newest.values() if r.agent.denied), key=lambda pod: pod.id)
    if not pods:
        return None
    pod, others = pods[0], f" (and those of {len(pods) - 1} more pods)" if len(pods) > 1 else ""
    text = f"the agent of pod {pod.name}{others} and the operator do not accept each other: "
    if pod.key_secret:
        text += (
            f"Secret {pod.key_secret} does not hold the key that the operator derives, because it or the operator's install "
            "key was changed, or something else answers at the pod's address; put the old install key back, or delete that "
            "Secret and the pod: both are recreated"
        )
    else:
        text += "it has a key that is not the operator's; remove ELASTIPOD_KEY and ELASTIPOD_TOKEN from the template"
    return ConditionDraft("PodsReady", False, "TokenRefused", text)


def _warning(
    snapshot: Snapshot, record: Record, replicas: Replicas, policy: Policy, quota: Quota | None, late: Warnings
) -> ConditionDraft | None:
    """Say what deserves attention though nothing stands still; the most pressing gives the reason."""
    found: Warnings = []
    if snapshot.job.refused_edit:
        found.append(("InvalidSpec", f"{snapshot.job.refused_edit}; the last spec that could be used stays in force"))
    if does_not_progress(record):
        text = (
            f"the last {record.stalled_recoveries} recoveries brought no newer step; "
            f"after {NO_PROGRESS_LIMIT} a script hardly heals by itself"
        )
        found.append(("NoProgress", text))
    found += late
    found += queue_warnings(snapshot.job, policy, snapshot.queue_fact, quota)
    if quota is not None:
        found += _priorities(snapshot, quota)
        found += _outdated_base(policy, quota)
    found += _refused_answers(replicas)
    if snapshot.job.pending_edits:
        text = f"edits of {', '.join(snapshot.job.pending_edits)} act when the job is suspended and resumed"
        found.append(("EditsPending", text))
    found += snapshot.job.warnings
    found += [("SpecWarning", text) for text in (*policy.sizes.warnings, *policy.warnings)]
    return _merge_warnings(found) if found else None


def _refused_answers(replicas: Replicas) -> Warnings:
    """Say of agents that tell more than is taken."""
    refused = sorted((r for r in replicas.newest.values() if r.agent.refused_answer), key=lambda r: r.id)
    if not refused:
        return []
    others = f" (and of those of {len(refused) - 1} more pods)" if len(refused) > 1 else ""
    return [("AnswerRefused", f"of the agent of pod {refused[0].pod.name}{others}: {refused[0].agent.refused_answer}")]


def _merge_warnings(found: Warnings) -> ConditionDraft:
    """Give one warning of several; the first gives the reason."""
    by_reason: dict[str, list[str]] = {}
    for reason, text in found:
        by_reason.setdefault(reason, []).append(text)
    parts = tuple((reason, "; ".join(texts)) for reason, texts in by_reason.items())
    return ConditionDraft("Warning", False, parts[0][0], "; ".join(text for _, text in parts), parts)


def _outdated_base(policy: Policy, quota: Quota) -> Warnings:
    """Say that the smallest size was lowered, while the quota of the base stays as it was granted."""
    if not quota.retained_base:
        return []
    text = (
        f"the smallest size is {policy.requested_sizes.minimum} by now, but queue {quota.queue} granted a base of {quota.retained_base} "
        "replicas, which cannot be changed; the job keeps it until it is suspended and resumed"
    )
    return [("EditsPending", text)]


def _priorities(snapshot: Snapshot, quota: Quota) -> Warnings:
    """Say of priorities that were edited and do not act."""
    trouble = snapshot.queue_trouble
    if trouble is not None and trouble[0] in PRIORITY_TROUBLES and 0 in quota.present:
        return [(trouble[0], f"{trouble[1]}; the Workloads keep their priority")]
    if not any(w.is_priority_fixed for w in quota.present.values()):
        return []
    text = "Kueue lets nobody give a Workload another kind of priority class while it has quota"
    return [("PriorityPending", f"{text}: the edited priority acts when the job is suspended and resumed")]


def _scaling(
    snapshot: Snapshot, record: Record, replicas: Replicas, policy: Policy, quota: Quota | None
) -> ConditionDraft | None:
    """Say why the job has the size it has."""
    size = len(record.members)
    if not size or record.transition is not None:
        return None
    maximum = policy.requested_sizes.maximum
    if quota is not None and policy.sizes.maximum <= size < maximum:
        return _queued(snapshot, record, policy, quota)
    if size >= maximum:
        return ConditionDraft("Scaling", False, "AtMaximum", f"{size} replicas train, the most that is allowed")
    due = growth_due(record, policy, snapshot.job.uid)
    if due is not None:
        text = f"more replicas are ready; the job grows at about {_time_of_day(due)}"
        if record.resize_failures:
            text += f" ({record.resize_failures} growths in a row came to nothing)"
        return ConditionDraft("Scaling", False, "Growing", text)
    members = frozenset(record.members)
    loading = [r for r in replicas.candidates() if r.id not in members and r.agent.warming]
    if loading:
        text = f"{len(loading)} more replicas load what their workers will need; training goes on meanwhile"
        return ConditionDraft("Scaling", False, "WarmingUp", text)
    if snapshot.refusal:
        return ConditionDraft(
            "Scaling", False, "LimitReached", f"{maximum - size} more replicas are wanted: {snapshot.refusal}"
        )
    gang = record.gang
    if gang is not None and gang.rest_until is not None:
        text = (
            f"room for less than a whole increment was given back; asked again from {_time_of_day(gang.rest_until)} on"
        )
        return ConditionDraft("Scaling", False, "WaitingForCapacity", text)
    asked = [r for r in replicas.newest.values() if r.id not in members and r.health in (Health.PENDING, Health.GOOD)]
    hold = growth_hold(record, policy)
    if hold is not None and hold > snapshot.now and not asked:
        text = f"growing now would cost more time than it brings; asked for from {_time_of_day(hold)} on"
        return ConditionDraft("Scaling", False, "NotWorthwhile", text)
    waiting = [
        r for slot in wanted_slots(policy, record, replicas)
        if (r := replicas.newest.get(slot)) is not None and r.id not in members and not r.ready
    ]  # fmt: skip
    text = f"{maximum - size} more replicas are wanted and {len(waiting)} pods wait{_first_trouble(waiting)}"
    return ConditionDraft("Scaling", False, "WaitingForCapacity", text)


def _queued(snapshot: Snapshot, record: Record, policy: Policy, quota: Quota) -> ConditionDraft:
    """Say what the increments wait for, in Kueue's own words."""
    missing = policy.requested_sizes.maximum - len(record.members)
    waiting = [w for number, w in sorted(quota.present.items()) if number and not w.admitted]
    until = increments_requested_from(record, policy, snapshot.now)
    if waiting:
        why = next((w.pending_message for w in waiting if w.pending_message), "Kueue has not looked at them yet")
        return ConditionDraft(
            "Scaling", False, "Queued", f"{missing} more replicas are wanted and wait in queue {quota.queue}: {why}"
        )
    if until is not None:
        text = f"{missing} more replicas are wanted; queue {quota.queue} is asked again from {_time_of_day(until)} on"
        return ConditionDraft("Scaling", False, "Queued", text)
    why = f": {snapshot.queue_trouble[1]}" if snapshot.queue_trouble is not None else ""
    return ConditionDraft("Scaling", False, "Queued", f"{missing} more replicas are asked of queue {quota.queue}{why}")


def _time_of_day(at: datetime) -> str:
    return f"{at.astimezone(UTC):%H:%M:%S} UTC"
