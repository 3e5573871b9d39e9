"""One life of the operator's process: the operator as it is shipped, over models of the API server and of the network to its agents.

It can die between any two calls; a new one begins with nothing but what the API server and the agents tell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from random import Random
from typing import Any

from tests.sim.cluster import Cluster
from tests.sim.commands import SimCommandSender
from tests.sim.idle_checker import IdleChecker
from tests.sim.invariant_state import JOB_UID
from tests.sim.invariants import InvariantChecker
from tests.sim.job_views import JobView, RoutedApi, SimEvents, Views
from tests.sim.kernel import EPOCH, Kernel, Process, Script
from tests.sim.objects import Body
from tests.sim.process import VirtualLoop
from tests.sim.status_cache import SimStatusCache
from tests.sim.watches import Watch

from elastipod_operator import clock, reconcile_pass
from elastipod_operator.agents.agent_ports import ConnectAgents, Wake
from elastipod_operator.agents.authentication import Authenticators
from elastipod_operator.agents.commands import Command
from elastipod_operator.clock import SteadyClock
from elastipod_operator.core.actions import Plan
from elastipod_operator.core.snapshot import Snapshot
from elastipod_operator.in_flight import WRITE_PARALLEL
from elastipod_operator.job_agents import JobAgents
from elastipod_operator.job_task import Decision, JobTask
from elastipod_operator.kube.job_keys import JobKeys
from elastipod_operator.kube.queue_api import QueueApi
from elastipod_operator.kube.store import Job, Store
from elastipod_operator.kube.workload_watch import WorkloadWatch
from elastipod_operator.reconcile_pass import ReconcilePass
from elastipod_operator.reconciler import NO_KEYS, Reconciler
from elastipod_operator.watch_events import WatchEvents

# Calls for pods at a time: few, so that the pods of small jobs wait for their turn, too, or as many as the operator's.
SLOTS = (1, 2, WRITE_PARALLEL)
EPOCH_S = EPOCH.timestamp()


class ObservedReconciler(Reconciler):
    """The Reconciler with its steps shown to the checker; nothing that it does is changed. slots: calls for pods at a time."""

    def __init__(self, shell: Shell, store: Store, slots: int, keys: JobKeys) -> None:
        super().__init__(RoutedApi(shell.views), store, shell.connect, SimEvents(shell.views), keys)
        self._agents = ObservedAgents(shell.connect, self.wake, shell, keys)
        self._control = replace(self._control, slots=asyncio.Semaphore(slots), forget=self._agents.forget)
        self._reconcile = ObservedPass(**{**vars(self._reconcile), "agents": self._agents}, shell=shell)


class ObservedAgents(JobAgents):
    """The calls to agents, of which the model is told whose job is being deleted."""

    def __init__(self, connect: ConnectAgents, wake: Callable[[str], None], shell: Shell, keys: JobKeys) -> None:
        super().__init__(connect, wake, keys)
        self._shell = shell

    async def send(self, job: Job, calls: list[Command]) -> None:
        self._shell.views.of_job(job.fact.uid).is_ending = job.fact.deleting_since is not None
        await super().send(job, calls)


@dataclass(kw_only=True, eq=False)
class ObservedPass(ReconcilePass):
    """The passes, counted for the shell."""

    shell: Shell

    async def _decide(self, job: Job, job_task: JobTask) -> Decision:
        view = self.shell.views.of_job(job.fact.uid)
        view.looks = 0
        view.passes += 1
        made = await super()._decide(job, job_task)
        view.checker.met["a decision waits for calls that it does not want"] += view.looks - 1
        view.last_plan = made.todo
        view.checker.decided(made.job.fact, made.todo, clock.now())
        agents = {pod.name: self.agents.fact(pod.uid) for pod in made.job.pods.values()}
        view.checker.depth_decided(made.job.fact, made.todo, agents, clock.now())
        return made

    def _progress(self, job: Job, todo: Plan) -> dict[str, str | None]:
        return super()._progress(job, todo) if self.shell.writes_progress else {}

    async def _write_progress(self, job: Job, todo: Plan) -> datetime | None:
        return await super()._write_progress(job, todo) if self.shell.writes_progress else None

    def observe(self, job: Job, job_task: JobTask) -> Snapshot:
        self.shell.views.of_job(job.fact.uid).looks += 1
        return super().observe(job, job_task)


class VirtualClock(SteadyClock):
    """The operator's clock, on the kernel's time: it is read hundreds of times in a moment, and calculates once."""

    def __init__(self, kernel: Kernel, offset_s: Callable[[], float]) -> None:
        super().__init__(wall=lambda: EPOCH_S + kernel.now + offset_s(), steady=lambda: kernel.now)
        self._kernel = kernel
        self._calculated_at = -1.0
        self._time = EPOCH

    def now(self) -> datetime:
        if self._calculated_at != self._kernel.now:
            self._calculated_at, self._time = self._kernel.now, super().now()
        return self._time


class Shell:
    """One life of the operator's process."""

    def __init__(
        self, kernel: Kernel, rng: Random, *jobs: tuple[Cluster, InvariantChecker], keys: JobKeys = NO_KEYS
    ) -> None:
        """jobs: all that it runs; the first one's machine is where it runs, with that clock."""
        self._kernel = kernel
        cluster, self.checker = jobs[0]
        steady = self._clock = VirtualClock(kernel, lambda: cluster.clock_offset_s)
        self.now = steady.now
        self.alive = True
        self.writes_progress = False
        """Without it nothing is written, and nobody wakes, while nothing happens but steps: then a forgotten time is found."""
        self.die_after: int | None = None
        """Die after so many further calls."""
        self.held_until = 0.0
        """It stands still until then, and goes on where it was."""
        self._loop = VirtualLoop(kernel, steady, self._held)  # type: ignore[abstract]  # sockets and processes: the core uses none
        self.views = Views([JobView(self, its, checker) for its, checker in jobs])
        self._rng = rng
        self.store = Store(steady.now)
        with self._loop.inside():
            self.reconciler = ObservedReconciler(self, self.store, rng.choice(SLOTS), keys)
        self._events = WatchEvents(self.store, self.reconciler)
        self._watches: list[Watch] = []
        for view in self.views.all:
            view.cluster.followers.append(self.statuses.agent_changed)
            self._watches.append(view.cluster.watch(self._watched))
        self._idle_checker = IdleChecker(self, kernel, self._loop)
        self._loop.at_rest = self._idle_checker.look
        self._second_looks: Process = kernel.spawn(self._idle_checker.second_looks(), self._held)
        if cluster.tenant is not None:
            self._watch_workloads()

    @property
    def passes(self) -> int:
        """How many passes over its jobs it has begun."""
        return sum(view.passes for view in self.views.all)

    def connect(self, wake: Wake) -> tuple[SimStatusCache, SimCommandSender]:
        """Connect to the agents; the last connection is the one that is used."""
        known = Authenticators()
        self.statuses = SimStatusCache(self.views, self._kernel, self._rng, wake, known)
        return self.statuses, SimCommandSender(self.views, self._kernel, self._rng, known)

    def _watch_workloads(self) -> None:
        of = self.reconciler
        watch = WorkloadWatch(QueueApi(RoutedApi(self.views)), self.store, of.wake, of.retry_queues, of.queues_needed)
        with self._loop.inside():
            self._workload_watch = asyncio.create_task(watch._follow(""))

    def die(self) -> None:
        """The process ends between two calls."""
        if not self.alive:
            return
        self.alive = False
        for view, watch in zip(self.views.all, self._watches, strict=True):
            view.cluster.unwatch(watch)
            view.cluster.followers.remove(self.statuses.agent_changed)
        self._second_looks.kill()
        self._loop.end()
        for view in self.views.all:
            view.api.close()

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

    def may_die(self, cluster: Cluster) -> Script:
        """A call to the API server or to an agent is about to be made."""
        cluster.called_at.append(self._kernel.now)
        if self.die_after is None:
            return
        if self.die_after <= 0:
            self.checker.met["the operator dies before a call"] += 1
            self._kernel.at(self._kernel.now, self.die)
            yield 1e9
        self.die_after -= 1

    def _held(self) -> float:
        return self.held_until

    def _watched(self, kind: str, change: str, body: Body) -> None:
        if self._kernel.now < self.held_until:
            self._kernel.at(self.held_until, lambda: self._watched(kind, change, body))
            return
        takes: Any = {"job": self._events.job, "pod": self._events.pod, "node": self._events.node}[kind]
        with self._loop.inside():
            takes(body, is_gone=change == "DELETED")
