"""What the user is told: conditions with reasons in plain words, the size, and the status fields (decision 30)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from .actions import Note
from .facts import AgentState, Condition, Observed, Policy
from .health import Health, Replica, View
from .membership import wanted_slots
from .names import master_port
from .record import Kind, Record

# Running stays the state through planned resizes, and through recoveries up to this long.
FAULT_SHOWN_AFTER = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class Report:
    """conditions: oldest first, the present state last. notes: Events for what newly became worth telling."""

    conditions: tuple[Condition, ...]
    size: str
    status: dict[str, Any]
    notes: tuple[Note, ...] = ()
    wake_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A condition before its time is known."""

    type: str
    status: bool
    reason: str
    message: str


def describe(seen: Observed, record: Record, view: View) -> Report:
    """Say how the job stands. Times of unchanged conditions are kept; events are given only for changed reasons."""
    lines, wake = _lines(seen, record, view)
    old = {condition.type: condition for condition in seen.job.conditions}
    conditions = tuple(_dated(line, old, seen.now) for line in lines)
    notes = tuple(
        Note(line.reason, line.message, warning=True)
        for line in lines
        if line.type in ("PodsReady", "Warning", "Suspended")
        and line.reason in WORTH_AN_EVENT
        and (line.type not in old or old[line.type].reason != line.reason)
    )
    return Report(conditions, _size(seen, record, view), _status(seen, record), notes, wake)


WORTH_AN_EVENT = frozenset(
    {
        "AgentNotAnswering",
        "PodsRefused",
        "ImagePullFailed",
        "ContainerCannotStart",
        "ContainerEnded",
        "InvalidSpec",
        "SpecWarning",
        "OperatorCutOff",
    }
)


def _dated(line: Line, old: dict[str, Condition], now: datetime) -> Condition:
    before = old.get(line.type)
    since = before.since if before is not None and before.status == line.status else now
    return Condition(line.type, line.status, line.reason, line.message, since)


def _lines(seen: Observed, record: Record, view: View) -> tuple[list[Line], datetime | None]:
    created = Line("Created", True, "Accepted", "the job was accepted")
    if record.outcome:
        ended = Line(record.outcome, True, record.outcome_reason, record.outcome_message)
        return [created, Line("Running", False, record.outcome, "the job has ended"), ended], None
    policy = seen.job.policy
    if policy is None:
        return _refused(created, record, seen.job.refusal), None
    auxiliary = [
        line
        for line in (_pods_ready(seen, view, policy), _warning(policy, view), _scaling(seen, record, view, policy))
        if line
    ]
    state, wake = _state(seen, record, view, policy)
    before = [created] if state.type != "Created" else []
    if state.type in ("Running", "Faulted"):
        before.append(Line("PodsRunning", True, "PodsRunning", "the first pods run"))
    if state.type != "Running" and any(c.type == "Running" for c in seen.job.conditions):
        before.append(Line("Running", False, state.reason, state.message))
    return [*before, *auxiliary, state], wake


def _refused(created: Line, record: Record, refusal: str) -> list[Line]:
    """An edit that cannot be used does not end a training that runs; it is only not looked after until it is mended."""
    if not record.members or record.transition is not None:
        return [created, Line("Suspended", True, "InvalidSpec", refusal)]
    text = f"{len(record.members)} replicas train in generation {record.generation}"
    return [created, Line("Warning", False, "InvalidSpec", refusal), Line("Running", True, "Training", text)]


def _state(seen: Observed, record: Record, view: View, policy: Policy) -> tuple[Line, datetime | None]:
    transition = record.transition
    if transition is not None and transition.kind is Kind.SUSPEND:
        return Line(
            "Suspended", True, "SuspendedByUser", "spec.runPolicy.suspend is true; set it to false to resume"
        ), None
    if transition is not None and transition.kind is Kind.START:
        return _starting(record, view, policy), None
    text = f"{len(record.members)} replicas train in generation {record.generation}"
    if transition is not None:
        text = f"{transition.message}; {_waiting_for(record, view, policy)}"
    if record.incident_at is None:
        reason = "Resizing" if transition is not None else "Training" if record.settled_at else "Starting"
        return Line("Running", True, reason, text), None
    shown_at = record.incident_at + FAULT_SHOWN_AFTER
    if seen.now < shown_at and record.failures_in_row < 2:
        return Line("Running", True, "Recovering", text), shown_at
    cause = transition.cause if transition is not None else "Recovering"
    if record.failures_in_row >= 2:
        text = f"{text} ({record.failures_in_row} failures in a row without progress)"
        if transition is not None and transition.not_before is not None and seen.now < transition.not_before:
            text += f"; next try at {transition.not_before.astimezone(UTC):%H:%M:%S} UTC"
        text += "; see the workers' logs with kubectl logs"
    return Line("Faulted", True, cause, text), None


def _starting(record: Record, view: View, policy: Policy) -> Line:
    started = [r for r in view.newest.values() if r.pod.started and not r.pod.ended]
    text = _waiting_for(record, view, policy)
    if len(started) >= policy.sizes.minimum:
        return Line("PodsRunning", True, "WaitingForAgents", text)
    return Line("Created", True, "WaitingForPods", text)


def _waiting_for(record: Record, view: View, policy: Policy) -> str:
    transition = record.transition
    assert transition is not None
    stopping = [
        r for m in record.members
        if (r := view.get(m)) is not None and r.agent.state in (AgentState.RUNNING, AgentState.STOPPING)
        and r.health in (Health.GOOD, Health.DOOMED, Health.SILENT)
    ]  # fmt: skip
    if stopping:
        return f"{len(stopping)} replicas are being stopped"
    ready = len(view.candidates())
    aim = max(policy.sizes.minimum, transition.goal)
    if ready < aim:
        return f"{ready} of {aim} replicas are ready{_why_not_ready(view)}"
    return f"{ready} replicas are ready"


def _why_not_ready(view: View) -> str:
    troubles = [r.pod.trouble for r in view.newest.values() if r.pod.trouble]
    return f": {troubles[0]}" if troubles else ""


def _pods_ready(seen: Observed, view: View, policy: Policy) -> Line | None:
    """Name what keeps a pod from training, with what to do about it."""
    if view.all_silent:
        text = "no agent answers the operator; training goes on by itself, nothing is changed until one answers"
        return Line("PodsReady", False, "OperatorCutOff", text)
    if seen.refusal:
        return Line("PodsReady", False, "PodsRefused", seen.refusal)
    for replica in sorted(view.newest.values(), key=lambda r: r.id):
        pod = replica.pod
        if replica.health is Health.PENDING and pod.started and replica.why == "AgentNotAnswering":
            text = (
                f"container {policy.container or 'of pod'} of pod {pod.name} runs, but nothing answers on port {policy.agent_port}: "
                "start the training with hyperpodrun, or set spec.elastipod.agentPort to the port it serves"
            )
            return Line("PodsReady", False, "AgentNotAnswering", text)
        if pod.trouble and pod.trouble_reason != "Unschedulable" and replica.health in (Health.PENDING, Health.ENDED):
            return Line("PodsReady", False, pod.trouble_reason, pod.trouble)
    good = len([r for r in view.newest.values() if r.health is Health.GOOD])
    if not good:
        return None
    return Line("PodsReady", False, "AgentsAnswer", f"{good} agents answer")


def _warning(policy: Policy, view: View) -> Line | None:
    return Line("Warning", False, "SpecWarning", "; ".join(policy.sizes.warnings)) if policy.sizes.warnings else None


def _scaling(seen: Observed, record: Record, view: View, policy: Policy) -> Line | None:
    """Say why the job has the size it has."""
    size = len(record.members)
    if not size or record.transition is not None:
        return None
    maximum = policy.sizes.maximum
    if size >= maximum:
        return Line("Scaling", False, "AtMaximum", f"{size} replicas train, the most that is allowed")
    if record.window_since is not None:
        due = record.window_since + policy.scaling_timeout
        return Line(
            "Scaling",
            False,
            "Growing",
            f"more replicas are ready; the job grows at about {due.astimezone(UTC):%H:%M:%S} UTC",
        )
    waiting = [
        r for slot in wanted_slots(policy, record, view)
        if (r := view.newest.get(slot)) is not None and r.id not in record.members and not r.ready
    ]  # fmt: skip
    text = f"{maximum - size} more replicas are wanted and {len(waiting)} pods wait{_scheduling(waiting)}"
    return Line("Scaling", False, "WaitingForCapacity", text)


def _scheduling(waiting: list[Replica]) -> str:
    troubles = [r.pod.trouble for r in waiting if r.pod.trouble]
    return f": {troubles[0]}" if troubles else ""


def _size(seen: Observed, record: Record, view: View) -> str:
    policy = seen.job.policy
    maximum = policy.sizes.maximum if policy else 0
    transition = record.transition
    target = transition.goal if transition is not None else len(record.members)
    if transition is None and policy is not None:
        extras = [r for r in view.candidates() if r.id not in record.members]
        target = max(target, policy.sizes.fit(min(len(record.members) + len(extras), maximum)))
    running = len(record.members) if transition is None and record.settled_at else 0
    return f"{0 if record.outcome else running}/{0 if record.outcome else target}/{maximum}"


def _status(seen: Observed, record: Record) -> dict[str, Any]:
    status: dict[str, Any] = {"startTime": _stamp(seen.job.created_at), "restartCount": record.restarts}
    if record.ended_at is not None:
        status["completionTime"] = _stamp(record.ended_at)
    if record.generation:
        status["masterAddr"] = record.master_addr
        status["masterPort"] = str(master_port(record.generation))
    targets: dict[str, int] = {}
    for member in record.members:
        targets[member.spec] = targets.get(member.spec, 0) + 1
    scaling: dict[str, Any] = {"targetReplicas": targets}
    if record.resized_at is not None:
        scaling["lastScalingTime"] = _stamp(record.resized_at)
    if record.recovered_at is not None:
        scaling["lastRestartTime"] = _stamp(record.recovered_at)
    if seen.job.policy is not None and seen.job.policy.sizes.minimum != seen.job.policy.sizes.maximum:
        status["elasticScalingStatus"] = scaling
    return status


def _stamp(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
