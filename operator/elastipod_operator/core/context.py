"""What all parts of a decision share: what they look at, and the beginning of a change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from .actions import Action, JobEvent
from .ending import plan_end
from .faults import STOP_TIME
from .health import Health, Replica, Replicas
from .history import HistoryEntry
from .payback import record_step_time
from .quota import Quota
from .record import SUSPENDED_BY_USER, Record, Transition, TransitionKind
from .snapshot import AgentState, Policy, Snapshot

KEPT_TEXT = (
    "spec.runPolicy.ttlSecondsAfterFinished is 0, which means that the job is kept; set it to 1 or more to have the job deleted so "
    "many seconds after its end"
)
# A pod that is to be killed needs this long after its workers are gone to end in order.
KILL_MARGIN = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class PlanDraft:
    """A part of a plan on its way to being whole."""

    record: Record
    actions: tuple[Action, ...] = ()
    events: tuple[JobEvent, ...] = ()
    history: tuple[HistoryEntry, ...] = ()
    running_since: datetime | None = None
    wake_at: datetime | None = None
    adopts_spec: bool = False

    def with_actions(self, *actions: Action) -> PlanDraft:
        return replace(self, actions=(*self.actions, *actions))


@dataclass(frozen=True, slots=True)
class Context:
    """What every part of the decision looks at. key: tells this job's waits from those of others. quota: None without a queue."""

    snapshot: Snapshot
    policy: Policy
    replicas: Replicas
    quota: Quota | None = None
    now: datetime = field(init=False)
    key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "now", self.snapshot.now)
        object.__setattr__(self, "key", self.snapshot.job.uid)

    @property
    def is_refused(self) -> bool:
        return bool(self.snapshot.refusal)


def drain_limit(replicas: Iterable[Replica], context: Context) -> datetime | None:
    """Give until when the workers of these may take: a little before the first of them is killed; None: nothing says."""
    times: list[datetime] = []
    for replica in replicas:
        node = context.snapshot.nodes.get(replica.pod.node)
        times += [at for at in (replica.pod.kill_at, node.leaves_at if node is not None else None) if at is not None]
    return min(times) - KILL_MARGIN if times else None


def begin(
    record: Record,
    context: Context,
    kind: TransitionKind,
    cause: str,
    message: str,
    *,
    target_size: int,
    limit: datetime | None = None,
) -> Record:
    """Begin a planned change: the workers are asked for a checkpoint where they have something to save."""
    graceful = _has_work_to_save(record, context)
    deadline = context.now + (context.policy.graceful_timeout if graceful else STOP_TIME)
    if limit is not None:
        deadline = max(context.now, min(deadline, limit))
    transition = Transition(
        kind=kind, cause=cause, message=message, from_size=len(record.members), target_size=target_size, began_at=context.now,
        detected_at=context.now, deadline=deadline, graceful=graceful,
    )  # fmt: skip
    return replace(record_step_time(record, context.replicas), transition=transition, window_since=None, gang=None)


def _has_work_to_save(record: Record, context: Context) -> bool:
    """Whether a checkpoint can be asked for: not between two generations, nor before every member was started.

    Members that have not answered yet, to an operator that just began, are believed to be at work; and so are those that do
    not answer any more: what they said before they were started is no news.
    """
    if record.transition is not None:
        return False
    members = [r for m in record.members if (r := context.replicas.get(m)) is not None]
    heard = [r for r in members if r.health is not Health.SILENT]
    return not all(r.is_idle for r in members) and not any(awaits_start(r, record) for r in heard)


def awaits_start(replica: Replica, record: Record) -> bool:
    """Whether a member has not taken the /start of the present generation yet."""
    if replica.agent.state not in (AgentState.READY, AgentState.INIT):
        return False
    return replica.agent.generation is None or replica.agent.generation < record.generation


def suspension(record: Record, context: Context) -> Record:
    """Begin to stop all workers, because the user or the queue wishes it."""
    suspended_by = context.policy.suspended_by
    cause, message = (
        (SUSPENDED_BY_USER, "the user suspended the job")
        if suspended_by is None
        else (suspended_by.reason, suspended_by.message)
    )
    return begin(record, context, TransitionKind.SUSPEND, cause, message, target_size=0)


def finish(record: Record, context: Context, outcome: str, reason: str, message: str) -> PlanDraft:
    """End the job."""
    ended = replace(
        record, outcome=outcome, outcome_reason=reason, outcome_message=message, ended_at=context.now, transition=None,
        window_since=None, fault_at=None, gang=None,
    )  # fmt: skip
    record, actions, wake = plan_end(context.snapshot, ended, context.replicas)
    kept = (JobEvent("JobKept", KEPT_TEXT),) if context.policy.is_ttl_zero else ()
    return PlanDraft(record, actions, (JobEvent(outcome, message, warning=outcome == "Failed"), *kept), wake_at=wake)
