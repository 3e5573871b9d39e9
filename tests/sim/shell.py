"""One life of the operator's process: the Reconciler as it is shipped, over models of all that it reaches the world through.

It can die between any two calls; a new one begins with nothing but what the API server and the agents tell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from random import Random
from typing import Any

from tests.sim.api_calls import ApiCalls
from tests.sim.cluster import Cluster
from tests.sim.commands import SimCommandSender
from tests.sim.idle_checker import IdleChecker
from tests.sim.invariant_state import JOB_UID
from tests.sim.invariants import InvariantChecker
from tests.sim.kernel import EPOCH, Kernel, Process, Script
from tests.sim.objects import Body
from tests.sim.process import VirtualLoop
from tests.sim.status_cache import SimStatusCache

from elastipod_operator import clock, reconcile_pass
from elastipod_operator.agents.agent_ports import ConnectAgents
from elastipod_operator.agents.commands import Command
from elastipod_operator.clock import SteadyClock
from elastipod_operator.core.actions import JobEvent, Plan
from elastipod_operator.core.snapshot import ObservedJob, Snapshot
from elastipod_operator.in_flight import WRITE_PARALLEL
from elastipod_operator.job_agents import JobAgents
from elastipod_operator.job_task import Decision, JobTask
from elastipod_operator.kube.queue_api import QueueApi
from elastipod_operator.kube.store import Job, Store
from elastipod_operator.kube.workload_watch import WorkloadWatch
from elastipod_operator.reconcile_pass import ReconcilePass
from elastipod_operator.reconciler import NO_KEYS, Reconciler
from elastipod_operator.watch_events import WatchEvents

# Calls for pods at a time: few, so that the pods of small jobs wait for their turn, too, or as many as the operator's.
SLOTS = (1, 2, WRITE_PARALLEL)


class SimEvents:
    """Where Events go: the checker of the invariants notes them, and the cluster keeps the newest."""

    def __init__(self, checker: InvariantChecker, cluster: Cluster) -> None:
        self._checker = checker
        self._cluster = cluster

    def record(self, job: ObservedJob, events: Iterable[JobEvent]) -> None:
        for note in events:
            self._checker.met[f"Event: {note.reason}"] += 1
            self._cluster.keep_event(str(note.reason), note.message)

    async def close(self) -> None:
        """Nothing waits here."""


class ObservedReconciler(Reconciler):
    """The Reconciler with its steps shown to the checker; nothing that it does is changed. slots: calls for pods at a time."""

    def __init__(self, shell: Shell, store: Store, slots: int) -> None:
        connect: ConnectAgents = lambda _: (shell.statuses, shell.commander)  # noqa: E731
        super().__init__(shell.api, store, connect, SimEvents(shell.checker, shell.cluster))
        self._agents = ObservedAgents(connect, self.wake, shell)
        self._control = replace(self._control, slots=asyncio.Semaphore(slots), forget=self._agents.forget)
        self._reconcile = ObservedPass(**{**vars(self._reconcile), "agents": self._agents}, shell=shell)


class ObservedAgents(JobAgents):
    """The calls to agents, of which the model is told whose job is being deleted."""

    def __init__(self, connect: ConnectAgents, wake: Callable[[str], None], shell: Shell) -> None:
        super().__init__(connect, wake, NO_KEYS)
        self._shell = shell

    async def send(self, job: Job, calls: list[Command]) -> None:
        self._shell.commander.is_ending = job.fact.deleting_since is not None
        await super().send(job, calls)


@dataclass(kw_only=True, eq=False)
class ObservedPass(ReconcilePass):
    """The passes, counted for the shell."""

    shell: Shell

    async def _decide(self, job: Job, job_task: JobTask) -> Decision:
        self.shell.looks = 0
        self.shell.passes += 1
        made = await super()._decide(job, job_task)
        self.shell.checker.met["a decision waits for calls that it does not want"] += self.shell.looks - 1
        self.shell.last_plan = made.todo
        self.shell.checker.decided(made.job.fact, made.todo, clock.now())
        agents = {pod.name: self.agents.fact(pod.uid) for pod in made.job.pods.values()}
        self.shell.checker.depth_decided(made.job.fact, made.todo, agents, clock.now())
        return made

    def _progress(self, job: Job, todo: Plan) -> dict[str, str | None]:
        return super()._progress(job, todo) if self.shell.writes_progress else {}

    async def _write_progress(self, job: Job, todo: Plan) -> datetime | None:
        return await super()._write_progress(job, todo) if self.shell.writes_progress else None

    def observe(self, job: Job, job_task: JobTask) -> Snapshot:
        self.shell.looks += 1
        return super().observe(job, job_task)


class Shell:
    """One life of the operator's process."""

    def __init__(self, kernel: Kernel, rng: Random, cluster: Cluster, checker: InvariantChecker) -> None:
        self._kernel = kernel
        self._cluster = self.cluster = cluster
        self.checker = checker
        steady = self._clock = SteadyClock(
            wall=lambda: EPOCH.timestamp() + kernel.now + cluster.clock_offset_s, steady=lambda: kernel.now
        )
        self.alive = True
        self.last_plan: Plan | None = None
        self.passes = 0
        self.writes_progress = False
        """Without it nothing is written, and nobody wakes, while nothing happens but steps: then a forgotten time is found."""
        self.looks = 0
        """How often the decision that is under way was made."""
        self.die_after: int | None = None
        """Die after so many further calls."""
        self.held_until = 0.0
        """It stands still until then, and goes on where it was."""
        self._loop = VirtualLoop(kernel, steady, self._held)  # type: ignore[abstract]  # sockets and processes: the core uses none
        self.statuses = SimStatusCache(kernel, rng, cluster, steady.now, self.wake, self._held)
        self.commander = SimCommandSender(self, kernel, rng, cluster, checker)
        self.api = ApiCalls(self, cluster)
        self.store = Store(steady.now)
        with self._loop.inside():
            self.reconciler = ObservedReconciler(self, self.store, rng.choice(SLOTS))
        self._events = WatchEvents(self.store, self.reconciler)
        cluster.followers.append(self.statuses.agent_changed)
        self._watch = cluster.watch(self._watched)
        self._idle_checker = IdleChecker(self, kernel, self._loop)
        self._loop.at_rest = self._idle_checker.look
        scripts = (self.statuses.beat(), self._idle_checker.second_looks())
        self._beside: list[Process] = [kernel.spawn(script, self._held) for script in scripts]
        if cluster.tenant is not None:
            self._watch_workloads()

    def _watch_workloads(self) -> None:
        of = self.reconciler
        watch = WorkloadWatch(QueueApi(self.api), self.store, of.wake, of.retry_queues, of.queues_needed)
        with self._loop.inside():
            self._workload_watch = asyncio.create_task(watch._follow(""))

    def die(self) -> None:
        """The process ends between two calls."""
        if not self.alive:
            return
        self.alive = False
        self._cluster.unwatch(self._watch)
        self._cluster.followers.remove(self.statuses.agent_changed)
        self.statuses.is_open = False
        for process in self._beside:
            process.kill()
        self._loop.end()
        self.api.close()

    def wake(self, uid: str = JOB_UID) -> None:
        """Have the job looked at soon."""
        if self.alive:
            with self._loop.inside():
                self.reconciler.wake(uid)

    def decide(self, job: Job, job_task: JobTask) -> Plan:
        """Decide about a job as it is known now, and do nothing."""
        with self._loop.inside():
            observed = ReconcilePass.observe(self.reconciler._reconcile, job, job_task)
            return reconcile_pass.plan(observed)  # type: ignore[attr-defined]  # a test may have put another in its place

    def is_due_soon(self, job_task: JobTask, seconds: float) -> bool:
        """Whether a job is looked at within some seconds in any case."""
        return job_task.due is not None and (job_task.due - self._clock.now()).total_seconds() < seconds

    def may_die(self) -> Script:
        """A call to the API server or to an agent is about to be made."""
        self._cluster.called_at.append(self._kernel.now)
        if self.die_after is None:
            return
        if self.die_after <= 0:
            self.checker.met["the operator dies before a call"] += 1
            self._kernel.at(self._kernel.now, self.die)
            yield 1e9
        self.die_after -= 1

    def note_sent_away(self, name: str, uid: str) -> None:
        """From here on a pod ends because the operator wants it, unless its container has ended already."""
        real = self._cluster.pods.get(uid)
        if real is None or real.exit_code is None:
            self.checker.sent_away(name)

    def _held(self) -> float:
        return self.held_until

    def _watched(self, kind: str, change: str, body: Body) -> None:
        if self._kernel.now < self.held_until:
            self._kernel.at(self.held_until, lambda: self._watched(kind, change, body))
            return
        takes: Any = {"job": self._events.job, "pod": self._events.pod, "node": self._events.node}[kind]
        with self._loop.inside():
            takes(body, is_gone=change == "DELETED")
