"""Between two generations: the workers are stopped, enough replicas are gathered, the next generation begins."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from .actions import Action, Note, StartWorkers
from .context import Scene, Step, finish, latest_end, suspension
from .escalation import weigh
from .faults import STOP_TIME, Incident, begin_recovery, find_incident
from .growth import CAUSE, growth_failed, note_broken_growth, warm
from .health import AGENT_EXPECTED, Health, Replica
from .history import HistoryEntry
from .membership import remember, remove, usable
from .partial_gangs import next_look, watch_gang
from .payback import with_pace
from .record import RECORD_LOST, SUSPENDED_BY_USER, Record, Transition, TransitionKind
from .snapshot import Policy
from .stopping import LOOK_AGAIN, is_forced, stop_members


def recover(record: Record, scene: Scene, incident: Incident) -> Step:
    """Book an incident and begin its recovery."""
    record = replace(note_broken_growth(with_pace(record, scene.view), scene.now), gang=None, resize_began_at=None)
    begun = begin_recovery(record, scene.view, scene.policy, scene.now, incident, scene.key)
    note = Note(incident.cause, incident.message, warning=True)
    step = in_transition(begun, scene)
    given_up = (scene.view.get(pod) for pod in incident.lost)
    # Who is only given up here was judged before that: what follows for its pod is found by the next look.
    is_new = any(replica is not None and replica.health is not Health.LOST for replica in given_up)
    return replace(step, notes=(note, *step.notes), wake_at=scene.now if is_new else step.wake_at)


def in_transition(record: Record, scene: Scene) -> Step:
    """Decide for a job whose workers are being stopped or gathered."""
    transition = record.transition
    assert transition is not None
    hurry: tuple[Note, ...] = ()
    if transition.graceful and not is_forced(record, scene.now):
        incident = find_incident(record, scene.view)
        if incident is not None:  # decision 18
            return recover(record, scene, incident)
        record, hurry = _shortened(*_unanswered(record, scene), scene)
    record, stops, wake = stop_members(record, scene.view, scene.policy, scene.now)
    if wake is not None:
        announce = _announcement(transition) if scene.now == transition.began_at else ()
        return Step(record, tuple(stops), wake_at=wake, notes=(*announce, *hurry))
    assert record.transition is not None
    record = replace(record, transition=replace(record.transition, graceful=False))  # nothing can break the drain now
    if transition.kind is TransitionKind.SUSPEND:
        return _suspended(record, scene)
    weighed = weigh(record, scene.view, scene.policy, scene.now)
    if weighed.reason:
        step = finish(weighed.record, scene, "Failed", weighed.reason, weighed.message)
        return replace(step, notes=(*weighed.notes, *step.notes))
    if weighed.actions:  # who is given up must be on record before the pods go
        return Step(weighed.record, weighed.actions, weighed.notes, wake_at=scene.now)
    step = _gather(weighed.record, scene)
    return replace(step, notes=(*weighed.notes, *step.notes))


def _unanswered(record: Record, scene: Scene) -> tuple[Record, tuple[Note, ...]]:
    """End a drain of which no worker can know: their time would pass in vain, and they are ended without a checkpoint now.

    All members must say so. A script may ask for events on one rank and tell the others itself, so a single pod does not know.
    """
    transition = record.transition
    assert transition is not None
    members = [r for m in record.members if (r := scene.view.get(m)) is not None and r.health is not Health.ENDED]
    busy = [r for r in members if not r.parked]
    if not busy or not all(r.agent.unanswered and r.health is not Health.SILENT for r in busy):
        return record, ()
    if any(r.agent.drained for r in members):
        return record, ()
    text = (
        f"the workers of {len(busy)} replicas neither ask elastic_event_detected() nor handle SIGUSR1: they are ended now, and go on "
        "from their last checkpoint"
    )
    deadline = min(transition.deadline, scene.now + STOP_TIME)
    ended = replace(record, transition=replace(transition, graceful=False, deadline=deadline))
    return ended, (Note("EventUnanswered", text, warning=True),)


def _shortened(record: Record, notes: tuple[Note, ...], scene: Scene) -> tuple[Record, tuple[Note, ...]]:
    """Give a drain less time where a member is killed sooner than its deadline by now; it never gets more."""
    transition = record.transition
    assert transition is not None
    members = (r for m in record.members if (r := scene.view.get(m)) is not None and not r.parked)
    doomed = [r for r in members if r.health is Health.DOOMED]
    end = latest_end(doomed, scene)
    if not transition.graceful or end is None or max(end, scene.now) >= transition.deadline:
        return record, notes
    deadline = max(end, scene.now)
    left_s = (deadline - scene.now).total_seconds()
    note = Note("DrainShortened", f"the workers have {left_s:.0f} s left to save: {doomed[0].detail}")
    return replace(record, transition=replace(transition, deadline=deadline, is_shortened=True)), (*notes, note)


def _announcement(transition: Transition) -> tuple[Note, ...]:
    if transition.kind is TransitionKind.RECOVERY:
        return ()
    aim = f"{transition.from_size} -> {transition.goal}" if transition.goal else "all workers stop"
    return (Note("Draining", f"{aim}: {transition.message}"),)


def _suspended(record: Record, scene: Scene) -> Step:
    if scene.policy.suspend:
        removals: list[Action] = []
        for replica in scene.view.by_id.values():
            removals += remove(
                replica, "the job is suspended" if scene.policy.held is None else scene.policy.held.message
            )
        return Step(replace(remember(record, scene.view.by_id), members=()), tuple(removals))
    transition = record.transition
    assert transition is not None
    sizes = scene.policy.wished_sizes  # a queue grants the rest later
    goal = sizes.fit(transition.from_size) or sizes.start
    cause, message = "Resumed", "the user resumed the job"
    if transition.cause != SUSPENDED_BY_USER:
        cause, message = "Admitted", f"queue {record.queue} granted the job its quota"
    resumed = replace(
        transition, kind=TransitionKind.START, cause=cause, message=message, goal=goal, from_size=0,
        began_at=scene.now, detected_at=scene.now, deadline=scene.now + STOP_TIME, graceful=False,
    )  # fmt: skip
    record = replace(
        remember(record, scene.view.by_id), transition=resumed, members=(), window_since=None, incident_at=None,
        suspended_time=record.suspended_time + (scene.now - transition.began_at),  # no deadline runs meanwhile (decision 16)
    )  # fmt: skip
    step = Step(record, notes=(Note(cause, message),), wake_at=scene.now, takes_spec=True)
    # Who resumes the job before its pods were gone finds them made from the old template.
    return give_up_all(step, scene, "made from a template that was edited") if scene.seen.job.pending_edits else step


def give_up_all(step: Step, scene: Scene, why: str) -> Step:
    """Have every pod made anew."""
    known = frozenset(step.record.lost)
    pods = [r for r in scene.view.by_id.values() if r.id not in known]
    removals: list[Action] = []
    for replica in pods:
        removals += remove(replica, why)
    lost = (*step.record.lost, *(r.id for r in pods))
    return replace(step.also(*removals), record=replace(remember(step.record, lost), lost=lost))


def _gather(record: Record, scene: Scene) -> Step:
    """All old workers are stopped: wait for enough ready replicas, then allocate the next generation."""
    transition, sizes, now = record.transition, scene.policy.sizes, scene.now
    assert transition is not None
    if scene.policy.suspend:
        return _suspended(suspension(record, scene), scene)
    if transition.cause == RECORD_LOST and any(_may_yet_tell(r, now) for r in scene.view.by_id.values()):
        return Step(record, wake_at=now + LOOK_AGAIN)
    candidates = scene.view.candidates()
    if transition.kind is TransitionKind.RESIZE and transition.cause == CAUSE:
        candidates = warm(candidates, now)
    ready = usable(candidates, record, scene.policy)
    # The first start takes `replicas` and grows later; every other one takes all that is ready (decision 12).
    is_first = transition.kind is TransitionKind.START and not record.generation
    goal = sizes.fit(transition.goal) or sizes.minimum
    size = sizes.fit(min(len(ready), goal if is_first else sizes.maximum))
    if not size:
        record, notes = watch_gang(
            replace(record, window_since=None), scene.view, scene.policy, now, scene.key, refused=scene.is_refused
        )
        return Step(record, notes=notes, wake_at=next_look(record, scene.key, now))
    if transition.not_before is not None and now < transition.not_before:
        return Step(record, wake_at=transition.not_before)
    record = replace(record, window_since=record.window_since or now)
    patience = _patience(record, transition, scene.policy)
    if size < goal and now < patience:
        return Step(record, wake_at=patience)
    return _start(record, scene, ready[:size])


def _may_yet_tell(replica: Replica, now: datetime) -> bool:
    """Whether an agent was not heard yet that may know of a generation which nothing else tells of any more (decision 1)."""
    agent, pod = replica.agent, replica.pod
    is_expected = agent.trying_since is None or now - agent.trying_since < AGENT_EXPECTED
    return pod.started and not pod.ended and replica.health is not Health.LOST and agent.state is None and is_expected


def _patience(record: Record, transition: Transition, policy: Policy) -> datetime:
    """Until when fewer replicas than wanted are not good enough (decision 12; faultyScaleDownTimeoutInSeconds)."""
    if transition.kind is TransitionKind.START or transition.recreates_pods:
        assert record.window_since is not None
        return record.window_since + policy.scaling_timeout
    if transition.kind is TransitionKind.RECOVERY:
        return transition.detected_at + policy.faulty_timeout
    return transition.began_at


def _is_faulty_shrink(record: Record, transition: Transition, size: int) -> bool:
    """Whether the last change of size was a shrink for which a fault, and nobody's wish, was the reason."""
    if size == transition.from_size:
        return record.shrank_after_fault
    return size < transition.from_size and transition.kind is TransitionKind.RECOVERY


def _start(record: Record, scene: Scene, chosen: list[Replica]) -> Step:
    transition = record.transition
    assert transition is not None
    generation = 1 + max(record.generation, scene.view.highest_generation())
    started = replace(
        record, generation=generation, members=tuple(r.id for r in chosen), master_addr=chosen[0].pod.ip,
        transition=None, window_since=None, generation_began_at=scene.now, running_since=None, gang=None, size_before_growth=0,
        resize_began_at=transition.began_at if transition.kind is TransitionKind.RESIZE else None,
        shrank_after_fault=_is_faulty_shrink(record, transition, len(chosen)),
    )  # fmt: skip
    if transition.kind is TransitionKind.RESIZE and transition.cause == CAUSE:
        grew = len(chosen) > transition.from_size
        started = (
            replace(started, size_before_growth=transition.from_size) if grew else growth_failed(started, scene.now)
        )
    entry = HistoryEntry(
        generation=generation, from_size=transition.from_size, to_size=len(chosen), kind=transition.kind,
        cause=transition.cause, at=scene.now, detected_at=transition.detected_at,
    )  # fmt: skip
    starts = tuple(StartWorkers(replica.pod.name, rank) for rank, replica in enumerate(chosen))
    reason = {TransitionKind.START: "Started", TransitionKind.RESIZE: "Resized", TransitionKind.RECOVERY: "Recovered"}[
        transition.kind
    ]
    # Why was told when it began, at length where Kueue says why.
    was_told = transition.kind is TransitionKind.RESIZE and scene.now > transition.began_at
    why = f" ({transition.cause})" if was_told else f": {transition.message}"
    note = Note(reason, f"{transition.from_size} -> {len(chosen)} replicas, generation {generation}{why}")
    return Step(started, starts, notes=(note,), history=(entry,))
