"""The workers of a generation run: what ends it, what changes it, and who is to be started yet."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from .actions import Action, HoldSpare, Note, StartWorkers
from .avoided_nodes import forget_old, next_pardon
from .context import Scene, Step, awaits_start, begin, finish, latest_end, suspension
from .escalation import close_window, next_window_end
from .faults import find_incident, news_from, start_limit
from .growth import growth_window
from .health import Health, Replica
from .membership import room_for, soonest
from .partial_gangs import next_look, watch_gang
from .payback import with_pause
from .record import Record, TransitionKind
from .snapshot import AgentState
from .stopping import hard_stop, takes_part
from .transition import in_transition, recover

LOOK_AGAIN = timedelta(seconds=1)


def running(record: Record, scene: Scene) -> Step:
    """Decide for a job whose workers run, or were told to."""
    record = close_window(record, scene.policy, scene.now)
    incident = find_incident(record, scene.view)
    if incident is not None:
        return recover(record, scene, incident)
    members = [replica for member in record.members if (replica := scene.view.get(member)) is not None]
    if _all_completed(members, record):
        message = f"all {len(members)} replicas finished"
        return finish(record, scene, "Completed", "Completed", message)
    planned = _planned_change(record, scene, members)
    if planned is not None:
        return in_transition(planned, scene)
    record, wake = growth_window(record, scene, members)
    if record.transition is not None:
        return in_transition(record, scene)
    return _keep_running(record, scene, members, wake)


def _all_completed(members: list[Replica], record: Record) -> bool:
    return len(members) == len(record.members) and all(r.finished(record.generation) for r in members)


def _planned_change(record: Record, scene: Scene, members: list[Replica]) -> Record | None:
    """Begin a drain when the user, a node or the API server asks for one; None when nobody does."""
    policy = scene.policy
    size = len(record.members)
    if policy.suspend:
        return suspension(record, scene)
    doomed = [r for r in (_without_quota(r, scene) for r in members) if r.health is Health.DOOMED]
    if doomed:
        healthy = {r.id for r in members}.difference(r.id for r in doomed)
        ready = {r.id for r in scene.view.candidates()}
        goal = policy.sizes.fit(room_for(healthy | ready, policy)) or policy.sizes.minimum
        limit = latest_end(doomed, scene)
        return begin(record, scene, TransitionKind.RESIZE, doomed[0].why, _several(doomed), goal=goal, limit=limit)
    if 0 < policy.sizes.fit(size) < size:
        return begin(record, scene, TransitionKind.RESIZE, *_why_too_many(size, scene), goal=policy.sizes.fit(size))
    drained = [
        r for r in members if r.agent.state is AgentState.READY and r.agent.drained and r.runs(record.generation)
    ]
    if drained:
        message = f"the workers of pod {drained[0].pod.name} were asked to stop by somebody else and did"
        return begin(record, scene, TransitionKind.RESIZE, "DrainedFromOutside", message, goal=size)
    return None


def _why_too_many(size: int, scene: Scene) -> tuple[str, str]:
    """Say why so many may not train any more: the user's wish, or quota that goes while a spare trains in its pods' places."""
    policy = scene.policy
    if policy.wished_sizes.fit(size) < size:
        return (
            "ScaledByUser",
            f"{size} replicas are not an allowed size any more; the next one is {policy.sizes.fit(size)}",
        )
    taken = next((w for w in scene.seen.workloads if w.number and w.evicted), None)
    if taken is not None:
        return taken.evicted, f"Kueue takes quota back: {taken.what_evicted}"
    return "QuotaLost", f"there is only quota for {policy.sizes.fit(size)} of {size} replicas"


def _without_quota(replica: Replica, scene: Scene) -> Replica:
    """Give a member whose quota is taken back as doomed, also while its agent does not answer: it must leave all the same."""
    withdrawn = scene.seen.withdrawn.get(replica.id.slot)
    if withdrawn is None or replica.health is not Health.SILENT:
        return replica
    cause, sentence = withdrawn
    return replace(replica, health=Health.DOOMED, why=cause, detail=sentence)


def _several(doomed: list[Replica]) -> str:
    more = f" (and {len(doomed) - 1} more)" if len(doomed) > 1 else ""
    return doomed[0].detail + more


def _keep_running(record: Record, scene: Scene, members: list[Replica], wake: datetime | None) -> Step:
    """Start what has not started yet; note the moment at which everybody runs; follow what runs out by itself."""
    actions: list[Action] = []
    for rank, member in enumerate(record.members):
        replica = scene.view.get(member)
        if replica is None or not awaits_start(replica, record):
            if replica is not None and record.running_since is None:
                wake = soonest(wake, start_limit(replica, record))  # it is told nothing as long as it stops
            continue
        if record.running_since is None or replica.agent.generation is None:
            actions.append(StartWorkers(replica.pod.name, rank))
        else:  # it has run this generation: if it is a new process, it must never run it a second time
            wake = soonest(wake, max(news_from(record), scene.now + LOOK_AGAIN))
    ids = frozenset(record.members)
    for replica in scene.view.by_id.values():
        if replica.busy and not takes_part(replica, record, ids):
            actions.append(hard_stop(replica, record))
    actions += _spares(record, scene)
    policy, now = scene.policy, scene.now
    record = forget_old(record, policy, now)
    record, notes = watch_gang(record, scene.view, policy, now, scene.key, refused=scene.is_refused)
    due = soonest(
        wake,
        next_window_end(record, policy, now),
        next_pardon(record, policy, now),
        next_look(record, scene.key, now),
    )
    step = Step(record, tuple(actions), notes, wake_at=due)
    if record.running_since is None and _all_run(members, record):
        return replace(_settle(step, scene), wake_at=now)  # what is ready already may open the growth window
    return step


def _spares(record: Record, scene: Scene) -> list[Action]:
    """Tell the spares of each spec what they are, so that they may prepare; they stay ready."""
    found: list[Action] = []
    if record.running_since is None or not any(spec.spares for spec in scene.policy.specs):
        return found
    members = frozenset(record.members)
    for spec in scene.policy.specs:
        idle = [r for r in scene.view.candidates() if r.id.spec == spec.name and r.id not in members]
        for number, replica in enumerate(sorted(idle, key=lambda r: r.id)[: spec.spares]):
            agent = replica.agent
            is_told = agent.is_spare and agent.generation == record.generation
            if agent.generation is not None and not is_told:  # agents of another make would start their workers
                found.append(HoldSpare(replica.pod.name, len(record.members) + number))
    return found


def _all_run(members: list[Replica], record: Record) -> bool:
    return len(members) == len(record.members) and all(
        r.agent.state in (AgentState.RUNNING, AgentState.COMPLETED) and r.runs(record.generation) for r in members
    )


def _settle(step: Step, scene: Scene) -> Step:
    record = step.record
    recovered = record.incident_at is not None
    settled = replace(
        with_pause(record, scene.now),
        running_since=scene.now,
        started_at=record.started_at or scene.now,
        recovered_at=scene.now if recovered else record.recovered_at,
        resized_at=scene.now if record.generation > 1 and not recovered else record.resized_at,
        incident_at=None,
    )
    if record.size_before_growth:
        settled = replace(settled, size_before_growth=0, resize_failures=0, resize_failed_at=None)
    note = Note("Running", f"{len(record.members)} replicas train in generation {record.generation}")
    return replace(step, record=settled, running_since=scene.now, notes=(*step.notes, note))
