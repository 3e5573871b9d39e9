"""What all parts of a decision share: what they look at, and the beginning of a change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from .actions import Action, Note
from .ending import plan_end
from .faults import STOP_TIME
from .health import Health, Replica, View
from .history import HistoryEntry
from .payback import with_pace
from .quota import Quota
from .record import SUSPENDED_BY_USER, Record, Transition, TransitionKind
from .snapshot import AgentState, Observed, Policy

KEPT_TEXT = (
    "spec.runPolicy.ttlSecondsAfterFinished is 0, which means that the job is kept; set it to 1 or more to have the job deleted so "
    "many seconds after its end"
)
# A pod that is to be killed needs this long after its workers are gone to end in order.
KILL_MARGIN = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class Step:
    """A part of a plan on its way to being whole."""

    record: Record
    actions: tuple[Action, ...] = ()
    notes: tuple[Note, ...] = ()
    history: tuple[HistoryEntry, ...] = ()
    running_since: datetime | None = None
    wake_at: datetime | None = None
    takes_spec: bool = False

    def also(self, *actions: Action) -> Step:
        return replace(self, actions=(*self.actions, *actions))


@dataclass(frozen=True, slots=True)
class Scene:
    """What every part of the decision looks at. key: tells this job's waits from those of others. quota: None without a queue."""

    seen: Observed
    policy: Policy
    view: View
    quota: Quota | None = None
    now: datetime = field(init=False)
    key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "now", self.seen.now)
        object.__setattr__(self, "key", self.seen.job.uid)

    @property
    def is_refused(self) -> bool:
        return bool(self.seen.refusal)


def latest_end(replicas: Iterable[Replica], scene: Scene) -> datetime | None:
    """Give until when the workers of these may take: a little before the first of them is killed; None: nothing says."""
    times: list[datetime] = []
    for replica in replicas:
        node = scene.seen.nodes.get(replica.pod.node)
        times += [at for at in (replica.pod.kill_at, node.leaves_at if node is not None else None) if at is not None]
    return min(times) - KILL_MARGIN if times else None


def begin(
    record: Record,
    scene: Scene,
    kind: TransitionKind,
    cause: str,
    message: str,
    *,
    goal: int,
    limit: datetime | None = None,
) -> Record:
    """Begin a planned change: the workers are asked for a checkpoint where they have something to save."""
    graceful = _has_work_to_save(record, scene)
    deadline = scene.now + (scene.policy.graceful_timeout if graceful else STOP_TIME)
    if limit is not None:
        deadline = max(scene.now, min(deadline, limit))
    transition = Transition(
        kind=kind, cause=cause, message=message, from_size=len(record.members), goal=goal, began_at=scene.now,
        detected_at=scene.now, deadline=deadline, graceful=graceful,
    )  # fmt: skip
    return replace(with_pace(record, scene.view), transition=transition, window_since=None, gang=None)


def _has_work_to_save(record: Record, scene: Scene) -> bool:
    """Whether a checkpoint can be asked for: not between two generations, nor before every member was started.

    Members that have not answered yet, to an operator that just began, are believed to be at work; and so are those that do
    not answer any more: what they said before they were started is no news.
    """
    if record.transition is not None:
        return False
    members = [r for m in record.members if (r := scene.view.get(m)) is not None]
    heard = [r for r in members if r.health is not Health.SILENT]
    return not all(r.parked for r in members) and not any(awaits_start(r, record) for r in heard)


def awaits_start(replica: Replica, record: Record) -> bool:
    """Whether a member has not taken the /start of the present generation yet."""
    if replica.agent.state not in (AgentState.READY, AgentState.INIT):
        return False
    return replica.agent.generation is None or replica.agent.generation < record.generation


def suspension(record: Record, scene: Scene) -> Record:
    """Begin to stop all workers, because the user or the queue wishes it."""
    held = scene.policy.held
    cause, message = (SUSPENDED_BY_USER, "the user suspended the job") if held is None else (held.reason, held.message)
    return begin(record, scene, TransitionKind.SUSPEND, cause, message, goal=0)


def finish(record: Record, scene: Scene, outcome: str, reason: str, message: str) -> Step:
    """End the job."""
    ended = replace(
        record, outcome=outcome, outcome_reason=reason, outcome_message=message, ended_at=scene.now, transition=None,
        window_since=None, incident_at=None, gang=None,
    )  # fmt: skip
    record, actions, wake = plan_end(scene.seen, ended, scene.view)
    kept = (Note("JobKept", KEPT_TEXT),) if scene.policy.is_ttl_zero else ()
    return Step(record, actions, (Note(outcome, message, warning=outcome == "Failed"), *kept), wake_at=wake)
