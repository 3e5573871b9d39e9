"""While the operator rests: its jobs are cared for, and whatever state one rests in, something will have it looked at again.

Three things are looked at. Of every job that is there the task lives, or is about to be replaced. A job for which no time is
set rests in a state that the table below knows, and what can still change that state is really on its way. And whoever looks
again while nothing happens finds nothing to do: a time that was forgotten is one at which a decision would have done something.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.sim.invariant_state import Violation
from tests.sim.kernel import Kernel, Script
from tests.sim.process import VirtualLoop

from elastipod_operator.core.actions import Plan
from elastipod_operator.core.snapshot import ObservedPod
from elastipod_operator.kube.store import Job
from elastipod_operator.metrics import EVICTION_CAUSES

if TYPE_CHECKING:
    from tests.sim.shell import Shell

# A second look at what was decided is taken once in so many times: it costs as much as the operator's own, and a time that is
# forgotten stays so. 7.3 falls anywhere between the whole seconds of other times.
LOOK_EVERY_S = 7.3
DECIDES_EACH = 4
# What is still to be done then is no matter of moments.
PATIENCE_S = 2.0
# A look that comes within this time anyway need not be told of: the longest retry of a pass.
SOON_S = 16.0


@dataclass(frozen=True, slots=True)
class IdleJob:
    """A job at rest. heard: whether the agent of a pod is polled."""

    job: Job
    todo: Plan
    heard: Callable[[str], bool]

    @property
    def pods(self) -> list[ObservedPod]:
        return list(self.job.pods.values())


def an_edit(at: IdleJob) -> bool:
    """The user, who must do something: the job says so, and no pod is left that would have to go first."""
    fact = at.job.fact
    return fact.policy is None or bool(fact.unmanaged) or fact.policy.suspend


def its_agents(at: IdleJob) -> bool:
    """The agents of all members: their answers, or their silence, which is looked for as long as they are asked."""
    members = set(at.todo.record.members)
    heard = {pod.id for pod in at.pods if at.heard(pod.uid)}
    return bool(members) and members <= heard


def its_pods(at: IdleJob) -> bool:
    """The end of pods that are being deleted."""
    return any(pod.kill_at is not None for pod in at.pods)


def kueue(at: IdleJob) -> bool:
    """What Kueue says of a Workload of the job."""
    return any(not one.fact.finished for one in at.job.workloads.items)


def nothing(at: IdleJob) -> bool:
    """Nothing: the job has ended, and no pod lives that nobody sent away."""
    return all(pod.ended or pod.kill_at is not None or _has_ended(pod) for pod in at.pods)


def _has_ended(pod: ObservedPod) -> bool:
    return pod.container is not None and pod.container.ended


Event = Callable[[IdleJob], bool]
ENDED = {"Completed": nothing, "Failed": nothing}
WAITS_FOR: Mapping[tuple[str, str], tuple[Event, ...]] = {
    **{("Running", reason): (its_agents,) for reason in ("Training", "Starting")},
    ("Faulted", "Recovering"): (its_agents,),
    ("Suspended", "SuspendedByUser"): (an_edit,),
    ("Suspended", "InvalidSpec"): (an_edit,),
    **{("Suspended", reason): (kueue,) for reason in ("Queued", *EVICTION_CAUSES)},
}
"""By type and reason of the state: the events any of which can change it. Whatever else has a time to be looked at."""


class IdleChecker:
    """Looks at one operator whenever it rests."""

    def __init__(self, shell: Shell, kernel: Kernel, loop: VirtualLoop) -> None:
        self._shell = shell
        self._kernel = kernel
        self._loop = loop

    def look(self) -> None:
        """Look at all jobs. Raises Violation."""
        if not self._is_at_rest():
            return
        for uid, job in self._shell.store.jobs.items():
            self._is_cared_for(uid, job)

    def second_looks(self) -> Script:
        """Decide again now and then, without carrying it out. A time that is forgotten stays so until the next look."""
        for number in itertools.count(1):
            yield LOOK_EVERY_S
            if not (first := self._left_undone(decides=number % DECIDES_EACH == 0)):
                continue
            passes = self._shell.passes
            yield PATIENCE_S
            if self._shell.passes == passes and (second := self._left_undone()):
                raise Violation(f"the operator rests though a look would find something to do: {first}; then {second}")

    def _is_at_rest(self) -> bool:
        return self._shell.alive and not self._loop.is_busy and self._kernel.now >= self._shell.held_until

    def _is_cared_for(self, uid: str, job: Job) -> None:
        job_task = self._shell.reconciler._job_tasks.get(uid)
        will_wake = self._loop.will_call(self._shell.reconciler.wake)
        if job_task is None or job_task.task is None or job_task.task.done():
            if not will_wake:
                raise Violation(f"nobody cares for the job: {uid} has no task, and nothing will make one")
            return
        view = self._shell.views.of_job(uid)
        todo = view.last_plan
        if job_task.due is not None or will_wake or todo is None:
            return
        state = todo.conditions[-1]
        events = (ENDED[state.type],) if state.type in ENDED else WAITS_FOR.get((state.type, state.reason), ())
        at = IdleJob(job, todo, self._shell.statuses.asks)
        if not any(event(at) for event in events):
            awaited = ", ".join(event.__name__ for event in events) or "nothing that is known here"
            raise Violation(
                f"the job rests as {state.type} {state.reason} without a time to look again; it waits for {awaited}, which "
                f"cannot come: {state.message}; {[(pod.name, pod.phase) for pod in at.pods]}"
            )

    def _left_undone(self, *, decides: bool = True) -> str:
        """Say what a decision would do now; empty for nothing, or when one comes soon anyway.

        decides: without it only the clock is read, whose last digits depend on when that is done.
        """
        if not self._is_at_rest() or self._loop.will_call(self._shell.reconciler.wake):
            return ""
        for uid, job in self._shell.store.jobs.items():
            job_task = self._shell.reconciler._job_tasks.get(uid)
            if job_task is None or self._shell.is_due_soon(job_task, SOON_S):
                continue
            self._shell.now()
            if not decides:
                continue
            todo = self._shell.decide(job, job_task)
            if todo.actions or _is_new(job, todo):
                state = todo.conditions[-1]
                return f"{[*todo.actions]} in {state.type} {state.reason}, record {todo.record}"
        return ""


def _is_new(job: Job, todo: Plan) -> bool:
    """Whether the record would be another one; when repeated steps are over is estimated, so the phase_times does not count."""
    before = job.fact.record
    if before is None or todo.skips_record or todo.record == before:
        return before is None
    return replace(todo.record, phase_times=before.phase_times) != before
