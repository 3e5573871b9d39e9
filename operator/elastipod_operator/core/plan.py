"""The operator's decision for one job: from what was observed and the time to what is to be done.

The workers of a job are either running one generation, or in transition to the next: being stopped, then gathered
until enough replicas are ready. Which of the two is written in the record before the first call to an agent, so an
operator that dies anywhere continues where the facts are.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from .actions import Action, Note, Plan, SetFinalizer, StartWorkers, VerifyPods
from .conditions import describe
from .deadlines import next_deadline, overdue
from .ending import plan_deletion, plan_end
from .facts import AgentState, Observed, Policy
from .health import Health, Replica, View, judge
from .incidents import STOP_TIME, Incident, begin_recovery, find_incident
from .membership import rank_order, remove, soonest, supply
from .record import HistoryEntry, Kind, Record, Transition
from .stopping import hard_stop, is_forced, stop_members, takes_part

LOOK_AGAIN = timedelta(seconds=1)
LIST_AGAIN = timedelta(minutes=5)
LIST_SILENT = timedelta(seconds=30)
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

    def also(self, *actions: Action) -> Step:
        return replace(self, actions=(*self.actions, *actions))


@dataclass(frozen=True, slots=True)
class Scene:
    """What every part of the decision looks at."""

    seen: Observed
    policy: Policy
    view: View
    now: datetime = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "now", self.seen.now)


def plan(seen: Observed) -> Plan:
    """Decide for one job. Pure: same observation, same plan; carrying out a plan twice does no harm."""
    view = judge(seen)
    record = seen.job.record or _first_record(seen, view)
    if seen.job.deleting_since is not None:
        return _whole(seen, view, _as_step(plan_deletion(seen, record, view)))
    if record.outcome:
        return _whole(seen, view, _as_step(plan_end(seen, record, view)))
    if seen.job.policy is None:
        return _whole(seen, view, Step(record))
    scene = Scene(seen, seen.job.policy, view)
    record = _forget_the_gone(record, view)
    late = overdue(seen, record)
    if late is not None:
        return _whole(seen, view, _finish(record, scene, "Failed", late.reason, late.message))
    step = _running(record, scene) if record.transition is None else _in_transition(record, scene)
    step = replace(step, wake_at=soonest(step.wake_at, next_deadline(seen, step.record)))
    return _whole(seen, view, _with_supply(step, scene))


# ---- the workers of a generation run -------------------------------------------------------------------------------


def _running(record: Record, scene: Scene) -> Step:
    incident = find_incident(record, scene.view)
    if incident is not None:
        return _recover(record, scene, incident)
    members = [replica for member in record.members if (replica := scene.view.get(member)) is not None]
    if _all_completed(members, record):
        message = f"all {len(members)} replicas finished"
        return _finish(record, scene, "Completed", "Completed", message)
    planned = _planned_change(record, scene, members)
    if planned is not None:
        return _in_transition(planned, scene)
    record, wake = _growth_window(record, scene, members)
    if record.transition is not None:
        return _in_transition(record, scene)
    return _keep_running(record, scene, members, wake)


def _all_completed(members: list[Replica], record: Record) -> bool:
    return len(members) == len(record.members) and all(
        r.agent.state is AgentState.COMPLETED and r.runs(record.generation) for r in members
    )


def _planned_change(record: Record, scene: Scene, members: list[Replica]) -> Record | None:
    """Begin a drain when the user, a node or the API server asks for one; None when nobody does."""
    policy = scene.policy
    size = len(record.members)
    if policy.suspend:
        return _begin(record, scene, Kind.SUSPEND, "Suspended", "the user suspended the job", goal=0)
    doomed = [r for r in members if r.health is Health.DOOMED]
    if doomed:
        healthy = size - len(doomed)
        spare = [r for r in scene.view.candidates() if r.id not in record.members]
        goal = policy.sizes.fit(min(healthy + len(spare), policy.sizes.maximum)) or policy.sizes.minimum
        kill_at = soonest(*(r.pod.kill_at for r in doomed))
        limit = kill_at - KILL_MARGIN if kill_at is not None else None
        return _begin(record, scene, Kind.RESIZE, doomed[0].why, _several(doomed), goal=goal, limit=limit)
    if 0 < policy.sizes.fit(size) < size:
        message = f"{size} replicas are not an allowed size any more; the next one is {policy.sizes.fit(size)}"
        return _begin(record, scene, Kind.RESIZE, "ScaledByUser", message, goal=policy.sizes.fit(size))
    drained = [
        r for r in members if r.agent.state is AgentState.READY and r.agent.drained and r.runs(record.generation)
    ]
    if drained:
        message = f"the workers of pod {drained[0].pod.name} were asked to stop by somebody else and did"
        return _begin(record, scene, Kind.RESIZE, "DrainedFromOutside", message, goal=size)
    return None


def _several(doomed: list[Replica]) -> str:
    more = f" (and {len(doomed) - 1} more)" if len(doomed) > 1 else ""
    return doomed[0].detail + more


def _begin(
    record: Record, scene: Scene, kind: Kind, cause: str, message: str, *, goal: int, limit: datetime | None = None
) -> Record:
    graceful = _has_work_to_save(record, scene)
    deadline = scene.now + (scene.policy.graceful_timeout if graceful else STOP_TIME)
    if limit is not None:
        deadline = max(scene.now, min(deadline, limit))
    transition = Transition(
        kind=kind, cause=cause, message=message, from_size=len(record.members), goal=goal, began_at=scene.now,
        detected_at=scene.now, deadline=deadline, graceful=graceful,
    )  # fmt: skip
    return replace(record, transition=transition, window_since=None)


def _has_work_to_save(record: Record, scene: Scene) -> bool:
    """Whether a checkpoint can be asked for: not between two generations, nor before every member was started.

    Members that have not answered yet, to an operator that just began, are believed to be at work.
    """
    if record.transition is not None:
        return False
    members = [r for m in record.members if (r := scene.view.get(m)) is not None]
    return not all(r.parked for r in members) and not any(_awaits_start(r, record) for r in members)


def _growth_window(record: Record, scene: Scene, members: list[Replica]) -> tuple[Record, datetime | None]:
    """Open, keep or close the window in which ready increments are collected (decision 12)."""
    sizes = scene.policy.sizes
    extras = [r for r in scene.view.candidates() if r.id not in record.members]
    size = len(record.members)
    possible = sizes.fit(min(size + len(extras), sizes.maximum))
    # A voluntary resize does not begin while a member is out of sight: its drain would end in a recovery.
    in_sight = len(members) == size and all(r.health is Health.GOOD for r in members)
    if possible <= size or record.settled_at is None or not in_sight:
        return replace(record, window_since=None), None
    opened = record.window_since or scene.now
    due = opened + scene.policy.scaling_timeout
    if record.recovered_at is not None:
        due = max(due, record.recovered_at + scene.policy.snooze)
    if record.resized_at is not None:
        due = max(due, record.resized_at + scene.policy.min_stable)
    if scene.now < due:
        return replace(record, window_since=opened), due
    message = f"{possible - size} more replicas are ready"
    return _begin(record, scene, Kind.RESIZE, "CapacityAvailable", message, goal=possible), None


def _keep_running(record: Record, scene: Scene, members: list[Replica], wake: datetime | None) -> Step:
    """Start what has not started yet; note the moment at which everybody runs."""
    actions: list[Action] = []
    for rank, member in enumerate(record.members):
        replica = scene.view.get(member)
        if replica is not None and _awaits_start(replica, record):
            actions.append(StartWorkers(replica.pod.name, rank))
    for replica in scene.view.by_id.values():
        if replica.busy and not takes_part(replica, record):
            actions.append(hard_stop(replica, record))
    step = Step(record, tuple(actions), wake_at=wake)
    if record.settled_at is None and _all_run(members, record):
        return replace(_settle(step, scene), wake_at=scene.now)  # what is ready already may open the growth window
    return step


def _awaits_start(replica: Replica, record: Record) -> bool:
    if replica.agent.state not in (AgentState.READY, AgentState.INIT):
        return False
    return replica.agent.generation is None or replica.agent.generation < record.generation


def _all_run(members: list[Replica], record: Record) -> bool:
    return len(members) == len(record.members) and all(
        r.agent.state in (AgentState.RUNNING, AgentState.COMPLETED) and r.runs(record.generation) for r in members
    )


def _settle(step: Step, scene: Scene) -> Step:
    record = step.record
    recovered = record.incident_at is not None
    settled = replace(
        record,
        settled_at=scene.now,
        started_at=record.started_at or scene.now,
        recovered_at=scene.now if recovered else record.recovered_at,
        resized_at=scene.now if record.generation > 1 and not recovered else record.resized_at,
        incident_at=None,
    )
    note = Note("Running", f"{len(record.members)} replicas train in generation {record.generation}")
    return replace(step, record=settled, running_since=scene.now, notes=(*step.notes, note))


# ---- between two generations ---------------------------------------------------------------------------------------


def _recover(record: Record, scene: Scene, incident: Incident) -> Step:
    begun = begin_recovery(record, scene.view, scene.policy, scene.now, incident)
    note = Note(incident.cause, incident.message, warning=True)
    step = _in_transition(begun, scene)
    return replace(step, notes=(note, *step.notes))


def _in_transition(record: Record, scene: Scene) -> Step:
    transition = record.transition
    assert transition is not None
    if transition.graceful and not is_forced(record, scene.now):
        incident = find_incident(record, scene.view)
        if incident is not None:  # decision 18
            return _recover(record, scene, incident)
    record, stops, wake = stop_members(record, scene.view, scene.policy, scene.now)
    if wake is not None:
        announce = _announcement(transition) if scene.now == transition.began_at else ()
        return Step(record, tuple(stops), wake_at=wake, notes=announce)
    assert record.transition is not None
    record = replace(record, transition=replace(record.transition, graceful=False))  # nothing can break the drain now
    if transition.kind is Kind.SUSPEND:
        return _suspended(record, scene)
    if _is_spent(record, scene.policy):
        return _give_up(record, scene)
    return _gather(record, scene)


def _is_spent(record: Record, policy: Policy) -> bool:
    """Whether the job's retries are used up.

    Asked when every member is accounted for: by then it is known whether a lost node, which never counts, was behind
    the failures of the workers (decision 17).
    """
    transition = record.transition
    counted = transition is not None and transition.kind is Kind.RECOVERY and transition.counted
    return counted and policy.max_retries is not None and record.retries > policy.max_retries


def _give_up(record: Record, scene: Scene) -> Step:
    assert record.transition is not None
    cause, message = record.transition.cause, record.transition.message
    limit = f"spec.runPolicy.jobMaxRetryCount {scene.policy.max_retries} is used up"
    return _finish(record, scene, "Failed", cause, f"{message}; {limit}")


def _announcement(transition: Transition) -> tuple[Note, ...]:
    if transition.kind is Kind.RECOVERY:
        return ()
    aim = f"{transition.from_size} -> {transition.goal}" if transition.goal else "all workers stop"
    return (Note("Draining", f"{aim}: {transition.message}"),)


def _suspended(record: Record, scene: Scene) -> Step:
    if scene.policy.suspend:
        removals: list[Action] = []
        for replica in scene.view.by_id.values():
            removals += remove(replica, "the job is suspended")
        return Step(replace(record, members=()), tuple(removals))
    transition = record.transition
    assert transition is not None
    goal = scene.policy.sizes.fit(transition.from_size) or scene.policy.sizes.start
    # No deadline runs while a job is suspended (decision 16).
    started_at = record.started_at + (scene.now - transition.began_at) if record.started_at else None
    resumed = replace(
        transition, kind=Kind.START, cause="Resumed", message="the user resumed the job", goal=goal, from_size=0,
        began_at=scene.now, detected_at=scene.now, deadline=scene.now + STOP_TIME, graceful=False,
    )  # fmt: skip
    return Step(
        replace(record, transition=resumed, members=(), window_since=None, started_at=started_at, incident_at=None),
        notes=(Note("Resumed", resumed.message),),
        wake_at=scene.now,
    )


def _gather(record: Record, scene: Scene) -> Step:
    """All old workers are stopped: wait for enough ready replicas, then allocate the next generation."""
    transition, sizes, now = record.transition, scene.policy.sizes, scene.now
    assert transition is not None
    if scene.policy.suspend:
        return _suspended(_begin(record, scene, Kind.SUSPEND, "Suspended", "the user suspended the job", goal=0), scene)
    ready = rank_order(scene.view.candidates(), record, scene.policy)
    size = sizes.fit(min(len(ready), sizes.maximum))
    if not size:
        return Step(replace(record, window_since=None))
    if transition.not_before is not None and now < transition.not_before:
        return Step(record, wake_at=transition.not_before)
    record = replace(record, window_since=record.window_since or now)
    patience = _patience(record, transition, scene.policy)
    if size < sizes.fit(min(transition.goal, sizes.maximum)) and now < patience:
        return Step(record, wake_at=patience)
    return _start(record, scene, ready[:size])


def _patience(record: Record, transition: Transition, policy: Policy) -> datetime:
    """Until when fewer replicas than wanted are not good enough (decision 12; faultyScaleDownTimeoutInSeconds)."""
    if transition.kind is Kind.RECOVERY:
        return transition.detected_at + policy.faulty_timeout
    if transition.kind is Kind.START:
        assert record.window_since is not None
        return record.window_since + policy.scaling_timeout
    return transition.began_at


def _start(record: Record, scene: Scene, chosen: list[Replica]) -> Step:
    transition = record.transition
    assert transition is not None
    generation = 1 + max(record.generation, scene.view.highest_generation())
    started = replace(
        record, generation=generation, members=tuple(r.id for r in chosen), master_addr=chosen[0].pod.ip,
        transition=None, window_since=None, settled_at=None,
    )  # fmt: skip
    entry = HistoryEntry(
        generation=generation, from_size=transition.from_size, to_size=len(chosen), kind=transition.kind,
        cause=transition.cause, at=scene.now, detected_at=transition.detected_at,
    )  # fmt: skip
    starts = tuple(StartWorkers(replica.pod.name, rank) for rank, replica in enumerate(chosen))
    reason = {Kind.START: "Started", Kind.RESIZE: "Resized", Kind.RECOVERY: "Recovered"}[transition.kind]
    note = Note(
        reason, f"{transition.from_size} -> {len(chosen)} replicas, generation {generation}: {transition.message}"
    )
    return Step(started, starts, notes=(note,), history=(entry,))


# ---- common parts --------------------------------------------------------------------------------------------------


def _first_record(seen: Observed, view: View) -> Record:
    """A new job, or one whose record was lost: then everything that runs is stopped and started in a higher generation."""
    goal = seen.job.policy.sizes.start if seen.job.policy else 1
    known = view.highest_generation()
    kind, cause, message = Kind.START, "JobCreated", "the job was accepted"
    if known:
        kind, cause, message = Kind.RECOVERY, "RecordLost", "the job's state record was lost"
    begun = Transition(
        kind=kind, cause=cause, message=message, from_size=0, goal=goal, began_at=seen.now, detected_at=seen.now,
        deadline=seen.now + STOP_TIME,
    )  # fmt: skip
    members = tuple(sorted(pod for pod, r in view.by_id.items() if (r.agent.generation or 0) > 0))
    return Record(generation=known, members=members, transition=begun)


def _forget_the_gone(record: Record, view: View) -> Record:
    lost = tuple(pod for pod in record.lost if pod in view.by_id)
    return record if lost == record.lost else replace(record, lost=lost)


def _finish(record: Record, scene: Scene, outcome: str, reason: str, message: str) -> Step:
    ended = replace(
        record, outcome=outcome, outcome_reason=reason, outcome_message=message, ended_at=scene.now, transition=None,
        window_since=None, incident_at=None,
    )  # fmt: skip
    step = _as_step(plan_end(scene.seen, ended, scene.view))
    return replace(step, notes=(Note(outcome, message, warning=outcome == "Failed"),))


def _with_supply(step: Step, scene: Scene) -> Step:
    """Add what keeps the right pods in being."""
    record = step.record
    idle = record.transition is not None and record.transition.kind is Kind.SUSPEND
    if record.outcome or idle or scene.policy.suspend:
        return step
    incarnations, actions, wake = supply(scene.policy, record, scene.view, scene.now)
    if incarnations:
        step = replace(step, record=replace(record, incarnations={**record.incarnations, **incarnations}))
    known = {action for action in step.actions}
    fresh = tuple(action for action in actions if action not in known)
    if fresh:
        wake = soonest(wake, scene.now + LOOK_AGAIN)  # the status tells of pods as they are after the changes
    listing, due = _listing(record, scene)
    return replace(step.also(*fresh, *listing), wake_at=soonest(step.wake_at, wake, due))


def _listing(record: Record, scene: Scene) -> tuple[tuple[Action, ...], datetime | None]:
    """While pods are waited for, or do not answer, ask now and then whether they still exist.

    A broken watch may have missed their end: a pod that never gets an agent would hold its place for ever, and one that
    fell silent with all others would never be missed.
    """
    is_waiting = record.transition is not None or len(record.members) < scene.policy.sizes.maximum
    is_silent = any(replica.health is Health.SILENT for replica in scene.view.by_id.values())
    if scene.seen.listed_at is None or not (is_waiting or is_silent):
        return ((VerifyPods(),) if scene.view.all_silent else ()), None
    due = scene.seen.listed_at + (LIST_SILENT if is_silent else LIST_AGAIN)
    return ((VerifyPods(),), scene.now + LOOK_AGAIN) if scene.now >= due else ((), due)


def _as_step(parts: tuple[Record, tuple[Action, ...], datetime | None]) -> Step:
    record, actions, wake = parts
    return Step(record, actions, wake_at=wake)


def _whole(seen: Observed, view: View, step: Step) -> Plan:
    report = describe(seen, step.record, view)
    if not seen.job.has_finalizer and seen.job.deleting_since is None:
        step = replace(step, actions=(SetFinalizer(True), *step.actions))
    return Plan(
        record=step.record, actions=step.actions, conditions=report.conditions, size=report.size,
        notes=(*step.notes, *report.notes), history=step.history, running_since=step.running_since,
        wake_at=soonest(step.wake_at, report.wake_at, view.next_gone_at), status=report.status,
    )  # fmt: skip
