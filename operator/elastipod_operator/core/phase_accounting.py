"""The ledger: every second of a job's life is booked to one phase, and the phases add up to the job's age.

The time of a resize or recovery, until new steps are made, is also booked to the depth of the change. The record holds the sums,
so they survive the operator. A phase may become known a little after it began: fault detection is booked back to the last
observed step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from enum import StrEnum

from .first_step import steps_of_members
from .record import RECORD_LOST, SUSPENDED_BY_USER, Depth, PhaseTimes, Record, Transition, TransitionKind
from .replica import Health, Replica, Replicas
from .snapshot import Snapshot

MILLISECOND = timedelta(milliseconds=1)


class Phase(StrEnum):
    """What a job does, or waits for."""

    QUEUED = "queued"
    SCHEDULING = "scheduling"  # too few pods have a node
    STARTING = "starting"  # enough pods have a node; waiting for their agents
    RENDEZVOUS = "rendezvous"  # the workers are started, until all agents answer RUNNING
    LOADING = "loading"  # until the first step, of jobs that report steps
    TRAINING = "training"
    RECOMPUTING = "recomputing"  # steps that had been made before the last fault
    DRAINING = "draining"  # until all workers have acknowledged the drain (or have ended, if agents do not report it)
    SAVING = "saving"  # from the acknowledgement until the workers have ended: they save a checkpoint
    DETECTING = "detecting"  # from the last step before a fault until all workers are stopped
    WAITING = "waiting for replacement"
    SUSPENDED = "suspended"
    UNKNOWN = "unknown"  # before the record was lost, and phases of other versions of the operator


TRAINING_PHASES = (Phase.TRAINING, Phase.RECOMPUTING)
UNCOUNTED = (Phase.QUEUED, Phase.SUSPENDED, Phase.UNKNOWN)
# A change of the world is over, or is none.
OUTSIDE_CHANGES = (Phase.TRAINING, Phase.QUEUED, Phase.SUSPENDED)
PHASES = frozenset(Phase)
DEPTHS = frozenset(Depth)


def account_phases(record: Record, snapshot: Snapshot, replicas: Replicas) -> Record:
    """Book the time until now if the phase changed. Accounting stops with the end of the job."""
    phase_times = record.phase_times
    if phase_times.since is None:
        if phase_times.phase or phase_times.booked:
            return record  # accounting has stopped
        phase_times = PhaseTimes(_first_phase(record), _cut(record.accepted_at or snapshot.job.created_at))
    phase = "" if record.outcome else phase_of(record, replicas)
    depth = _depth_of(record, phase)
    if phase == phase_times.phase:
        is_same = phase_times is record.phase_times and depth == phase_times.depth
        return record if is_same else replace(record, phase_times=replace(phase_times, depth=depth))
    at = _changed_at(phase, phase_times, record.ended_at or snapshot.now, replicas)
    since = None if record.outcome else at
    booked = replace(_booked(phase_times, at), phase=phase or "ended", since=since, depth=depth)
    return replace(record, phase_times=booked)


def total(phase_times: PhaseTimes, now: datetime) -> dict[str, timedelta]:
    """Give the time of each phase so far, the present one included."""
    return _as_times(_booked(phase_times, _cut(now)).booked)


def total_by_depth(phase_times: PhaseTimes, now: datetime) -> dict[str, timedelta]:
    """Give the time that resizes and recoveries of each depth took so far, until new steps were made."""
    return _as_times(_booked(phase_times, _cut(now)).by_depth)


def phase_times_since(before: PhaseTimes, after: PhaseTimes) -> dict[tuple[str, str], timedelta]:
    """Give the time that was booked between two states of a job's phase_times, by phase and depth (empty outside changes).

    At most one phase ends between a record and the next one, so all of the time has the same depth.
    """
    depth = next(iter(_increase(before.by_depth, after.by_depth)), "")
    return {(phase, depth): time for phase, time in _as_times(_increase(before.booked, after.booked).items()).items()}


def goodput(phase_times_of_jobs: Iterable[PhaseTimes], now: datetime) -> float | None:
    """Give the share of training in the time of these jobs; None before there is any.

    Time in a queue or in suspension does not count. Repeated steps do not count as training.
    """
    sums: Counter[str] = Counter()
    for phase_times in phase_times_of_jobs:
        sums.update(
            {phase: time // MILLISECOND for phase, time in total(phase_times, now).items() if phase not in UNCOUNTED}
        )
    return sums[Phase.TRAINING] / sums.total() if sums.total() else None


def _first_phase(record: Record) -> Phase:
    """Give what a job without a ledger did since its creation: a new one waited for its pods; of others nobody knows."""
    cause = record.transition.cause if record.transition is not None else ""
    return Phase.UNKNOWN if record.generation or record.outcome or cause == RECORD_LOST else Phase.SCHEDULING


def _depth_of(record: Record, phase: str) -> str:
    """Give the depth of the change that the job is in; empty outside changes. A new generation keeps it until new steps are made."""
    transition = record.transition
    if phase in OUTSIDE_CHANGES or record.outcome:
        return ""
    if transition is None:
        return record.phase_times.depth
    if transition.kind not in (TransitionKind.RESIZE, TransitionKind.RECOVERY):
        return ""
    return Depth.JOB if transition.recreates_pods else transition.depth


def _booked(phase_times: PhaseTimes, until: datetime) -> PhaseTimes:
    """Book the present phase until a time. What another version named is unknown here, so that names stay few."""
    spent = max(0, (until - phase_times.since) // MILLISECOND) if phase_times.since is not None else 0
    phases = Counter({phase_times.phase: spent})
    for phase, ms in phase_times.booked:
        phases[phase] += ms
    known = {phase: ms for phase, ms in phases.items() if phase in PHASES}
    known[Phase.UNKNOWN] = known.get(Phase.UNKNOWN, 0) + phases.total() - sum(known.values())
    depths = Counter({depth: ms for depth, ms in phase_times.by_depth if depth in DEPTHS})
    if phase_times.depth in DEPTHS:
        depths[phase_times.depth] += spent
    return replace(phase_times, booked=_sorted(known), by_depth=_sorted(depths))


def _sorted(sums: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((str(name), ms) for name, ms in sums.items() if ms))


def _increase(before: tuple[tuple[str, int], ...], after: tuple[tuple[str, int], ...]) -> dict[str, int]:
    known = dict(before)
    return {name: ms - known.get(name, 0) for name, ms in after if ms > known.get(name, 0)}


def _as_times(sums: Iterable[tuple[str, int]]) -> dict[str, timedelta]:
    return {name: ms * MILLISECOND for name, ms in sums}


def _changed_at(phase: str, phase_times: PhaseTimes, at: datetime, replicas: Replicas) -> datetime:
    """Give when a phase began: `at`, or for a fault the last observed step, but never before the phase that it follows."""
    assert phase_times.since is not None
    if phase == Phase.DETECTING and phase_times.phase in TRAINING_PHASES:
        steps = [r.agent.step_at for r in replicas.by_id.values() if r.agent.step_at is not None]
        at = min(at, max(steps, default=at))
    return max(_cut(at), phase_times.since)


def _cut(at: datetime) -> datetime:
    """Cut a time to milliseconds, as it is stored, so that sums stay exact."""
    return at.replace(microsecond=at.microsecond // 1000 * 1000)


def phase_of(record: Record, replicas: Replicas) -> Phase:
    """Say what the job does now."""
    transition = record.transition
    if transition is None:
        return _running_phase(record, replicas)
    at_work = [r for m in record.members if (r := replicas.get(m)) is not None and not r.is_idle and _may_work(r)]
    if transition.kind is TransitionKind.SUSPEND:
        if at_work:
            return _draining_phase(transition, at_work)
        return Phase.SUSPENDED if transition.cause == SUSPENDED_BY_USER else Phase.QUEUED
    if transition.kind is TransitionKind.RECOVERY:
        if not transition.is_budget_checked:
            return Phase.DETECTING
        return Phase.WAITING
    if transition.kind is TransitionKind.RESIZE and at_work:
        return _draining_phase(transition, at_work)
    bound = [r for r in replicas.newest.values() if _may_work(r) and r.pod.node]
    return Phase.SCHEDULING if len(bound) < transition.target_size else Phase.STARTING


def _draining_phase(transition: Transition, at_work: list[Replica]) -> Phase:
    """Say whether a drain saves. In memory it does not, and to book the moment in which its workers stop would cost a write then."""
    if transition.depth is Depth.MEMORY:
        return Phase.DRAINING
    return Phase.SAVING if all(replica.agent.saving for replica in at_work) else Phase.DRAINING


def _may_work(replica: Replica) -> bool:
    return replica.health not in (Health.LOST, Health.ENDED)


def _running_phase(record: Record, replicas: Replicas) -> Phase:
    if record.running_since is None:
        return Phase.RENDEZVOUS
    steps = steps_of_members(record, replicas)
    if not steps:
        # Workers that report no steps count as training, and so do silent ones.
        is_awaited = record.best_step >= 0 and record.phase_times.phase in (Phase.RENDEZVOUS, Phase.LOADING)
        return Phase.LOADING if is_awaited else Phase.TRAINING
    if record.phase_times.phase == Phase.TRAINING:
        return Phase.TRAINING
    return Phase.RECOMPUTING if max(steps) <= record.best_step else Phase.TRAINING


def next_phase_change(record: Record, replicas: Replicas, now: datetime) -> datetime | None:
    """Give when repeated steps should be over, because no event announces the first new step."""
    if record.phase_times.phase != Phase.RECOMPUTING:
        return None
    members = [r.agent for m in record.members if (r := replicas.get(m)) is not None and r.agent.step is not None]
    if not members:
        return None
    newest = max(members, key=lambda agent: agent.step or 0)
    pace = newest.step_pace or timedelta(seconds=5)
    left = max(1, record.best_step + 1 - (newest.step or 0))
    return now + max(timedelta(seconds=1), left * pace)
