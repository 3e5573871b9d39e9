"""The recovery from a fault: what it costs, how far the restart reaches, how long it waits."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from .backoff import backoff
from .depth import count_failures_in_place, deepened, depth_of_recovery, failed_in_place, mode_of
from .faults import PROOF_OF_LIFE, STOP_TIME, Fault
from .first_step import steps_of_members
from .record import Depth, Record, RestartMode, RestartWindow, Transition, TransitionKind
from .replica import Replicas
from .snapshot import AgentState, Policy

MINIMUM_RESTART = {False: RestartMode.IN_PROCESS, True: RestartMode.PROCESSES}


def begin_recovery(
    record: Record, replicas: Replicas, policy: Policy, now: datetime, fault: Fault, key: str = ""
) -> Record:
    """Count a fault once and begin the recovery: every worker that still runs is stopped hard.

    Consecutive failures without progress back off exponentially, so that a script that crashes at its start does not restart
    in a loop. key: seeds the jitter.
    """
    old = record.transition
    newest, made_step, progressed = _progress(record, replicas, now)
    failures = 1 if progressed else record.consecutive_failures + 1
    wait = timedelta(0) if failures < 2 else backoff(policy.backoff_base, policy.backoff_max, failures - 1, key)
    # A fault during a drain keeps the target size of the drain.
    target_size = old.target_size if old is not None and old.target_size else len(record.members)
    in_place = count_failures_in_place(record, replicas, fault, has_made_step=made_step)
    without_step = (0 if made_step else record.faults_without_step) + fault.uses_budget
    stalled = 0 if progressed else record.stalled_recoveries + fault.uses_budget
    asked = requested_restart(record, replicas)
    counted = replace(
        record, failures_in_place=in_place, faults_without_step=without_step, stalled_recoveries=stalled,
        best_step=max(record.best_step, newest),
    )  # fmt: skip
    choice = depth_of_recovery(counted, replicas, policy, fault, asked)
    reach = _farthest(asked, MINIMUM_RESTART[policy.new_processes], mode_of(choice.depth if in_place else Depth.MEMORY))
    transition = Transition(
        kind=TransitionKind.RECOVERY, cause=fault.cause, message=fault.message, from_size=len(record.members), target_size=target_size,
        began_at=now, detected_at=now, deadline=now + STOP_TIME, graceful=False, not_before=now + wait if wait else None,
        uses_budget=fault.uses_budget, reach=reach, depth=choice.depth, depth_reason=choice.reason,
        depth_code=choice.code,
    )  # fmt: skip
    known = frozenset(record.lost)
    return replace(
        record, transition=transition, window_since=None, fault_at=record.fault_at or now,
        lost=(*record.lost, *(pod for pod in fault.lost if pod not in known)),
        restarts=record.restarts + 1, retries=record.retries + fault.uses_budget,
        window=_counted(record.window, now) if fault.uses_budget else record.window,
        consecutive_failures=failures, best_step=max(record.best_step, newest),
        stalled_recoveries=stalled, faults_without_step=without_step, step_at_fault=record.step_at_fault if newest < 0 else newest,
        faulty_replicas=fault.faulty_replicas, is_full_restart=False, failures_in_place=in_place,
        failed_in_place=failed_in_place(record, fault, has_made_step=made_step),
    )  # fmt: skip


def count_progress(record: Record, replicas: Replicas, now: datetime) -> Record:
    """Forget the faults before a planned change if there have been steps since: after it, agents know of none at first.

    A fault that comes before the first one would otherwise follow directly on the last, however long ago that was.
    """
    newest, made_step, progressed = _progress(record, replicas, now)
    if record.consecutive_failures and made_step:
        step = record.step_at_fault if newest < 0 else newest
        record = replace(record, failures_in_place=0, failed_in_place=(), faults_without_step=0, step_at_fault=step)
    if record.consecutive_failures and progressed:
        record = replace(record, consecutive_failures=0, stalled_recoveries=0, best_step=max(record.best_step, newest))
    return record


def _progress(record: Record, replicas: Replicas, now: datetime) -> tuple[int, bool, bool]:
    """Give the newest step, -1 for none; whether the job has made any since the last fault; and whether one is newer than all before.

    Steps that are computed again count as made: a job that went back to a checkpoint does not fail in place. The newest one is then
    often older than that of the last fault. A script that reports no steps has made some if it has run for a while.
    """
    newest = max(steps_of_members(record, replicas), default=-1)
    ran_long = newest < 0 and record.running_since is not None and now - record.running_since > PROOF_OF_LIFE
    made_step = newest >= 0 and newest != record.step_at_fault
    return newest, made_step or ran_long, newest > record.best_step or ran_long


def requested_restart(record: Record, replicas: Replicas) -> RestartMode:
    """Give the farthest restart that failed workers request; an unknown mode means new processes."""
    asked = {
        r.agent.restart_mode
        for m in record.members
        if (r := replicas.get(m)) is not None and r.agent.state is AgentState.FAULTED and r.runs(record.generation)
    }
    known = tuple(RestartMode)
    reaches = [RestartMode(word) if word in known else RestartMode.PROCESSES for word in asked if word]
    return max(reaches, key=known.index, default=RestartMode.IN_PROCESS)


def _farthest(*reaches: RestartMode) -> RestartMode:
    return max(reaches, key=tuple(RestartMode).index)


def widen_restart(record: Record, replicas: Replicas) -> Record:
    """Widen the restart when workers that failed later request more; never after the budgets were checked."""
    transition = record.transition
    if transition is None or transition.kind is not TransitionKind.RECOVERY or transition.is_budget_checked:
        return record
    reach = _farthest(transition.reach, requested_restart(record, replicas))
    return record if reach is transition.reach else replace(record, transition=deepened(transition, reach))


def _counted(window: RestartWindow, now: datetime) -> RestartWindow:
    return replace(window, since=window.since or now, restarts=window.restarts + 1)


def uncounted(window: RestartWindow) -> RestartWindow:
    """Take one restart out of the window again."""
    left = max(0, window.restarts - 1)
    return replace(window, restarts=left, since=window.since if left or window.full_restarts else None)
