"""Runs a schedule in virtual time."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial
from random import Random

from tests.sim import faults, plain_workloads
from tests.sim.events import Event
from tests.sim.fault_targets import OF_OPERATORS
from tests.sim.invariant_state import Violation
from tests.sim.invariants import lineage
from tests.sim.job_in_simulation import JobInSimulation
from tests.sim.kueue_server import LOCAL_QUEUE, KueueServer, priority_label
from tests.sim.random_schedules import CHAOS_S, Containers, InQueue

from elastipod_operator.core.actions import ListPods
from elastipod_operator.core.names import LABEL_QUEUE, pod_id_of

CONVERGE_S = 1500.0
# Longer than an incomplete increment is held; the rests between get longer than that after six tries.
STEADY_S = 190.0
SETTLE_S = 4000.0
END_S = 200.0
DEAD_NODE_S = 700.0
LONGEST_DRAIN_S = 600.0  # gracefulShutdownTimeoutInSeconds where it is not set
LOOKS = 3


class Simulation(JobInSimulation):
    """The run of one schedule."""

    def __post_init__(self) -> None:
        self.rivals: list[Simulation] = []
        self.unfenced_until = 0.0
        """Until when an operator may act on what it saw before others went on."""
        super().__post_init__()

    def _invite(self) -> None:
        shared = [event for event in self.schedule.events if event.what in OF_OPERATORS]
        others = (
            replace(
                one,
                events=tuple(sorted([*one.events, *shared], key=lambda event: event.at)),
                has_keys=self.schedule.has_keys,
            )
            for one in self.schedule.neighbours
        )
        self.guests = [
            Simulation(one, log=self.log, name=f"neighbour-{number}", host=self, number=number)
            for number, one in enumerate(others, 1)
        ]
        self.neighbours = self.guests

    def _join(self, queue: InQueue) -> None:
        """Put the job into its queue, beside the others."""
        if self.server is None:
            self.server = KueueServer(self.kernel, Random(self.schedule.seed + 1), queue.settings, self.say)
        self.cluster.tenant = self.server.tenant(self.name, queue.at, self.cluster)
        self.cluster.labels = {LABEL_QUEUE: LOCAL_QUEUE, **priority_label(queue.priority)}
        for at, rival in enumerate(queue.rivals):
            self.rivals.append(Simulation(rival, log=self.log, name=f"rival-{at}", host=self))
        for at, gang in enumerate(queue.plain_gangs):
            self.kernel.spawn(plain_workloads.live(self.server, gang, f"gang-{at}"))

    def run(self) -> Simulation:
        """Simulation to the end; raises Violation, or what the code under test raises."""
        try:
            return self._run()
        finally:
            for sim in (self, *self.rivals):
                for shell in sim.shells:
                    shell.die()

    def _inject(self, event: Event) -> None:
        if self.is_neighbour and event.what in OF_OPERATORS:
            faults.note(self, event)  # it happens to its host
        else:
            faults.inject(self, event)

    def _run(self) -> Simulation:
        sims = [self, *self.guests, *self.rivals]
        for sim in sims:
            for event in sim.schedule.events:
                self.kernel.at(event.at, partial(sim._inject, event))
            if sim.schedule.completes_at is not None:
                self.kernel.at(sim.schedule.completes_at, sim._finish_soon)
        self.kernel.run(CHAOS_S)
        if self.server is not None:
            self.server.heal()
        for sim in sims:
            faults.heal(sim)
        if self.server is not None:
            self.server.watch.hindered_until = self.kernel.now
        while sims:
            sim = sims[0] if len(sims) == 1 else self._next(sims)
            sim._end_well()
            sims.remove(sim)
        for sim in (*self.guests, *self.rivals):
            self.met.update(sim.met)
        self.met["several jobs of one operator"] += bool(self.guests)
        if self.server is not None:
            self.met.update(self.server.watch.met)
            self.met["quota: looks"] += self.server.watch.num_looks
            self.met["quota: excused looks"] += self.server.watch.num_excused
        return self

    def _finish_soon(self) -> None:
        if self.training.finish_soon(self.schedule.seed % 3):
            self.say(f"** the training ends at step {self.training.total}")

    def _next(self, sims: list[Simulation]) -> Simulation:
        """Give the job that has its quota, of several: others may wait until it ends."""
        limit = self.kernel.now + CONVERGE_S
        if not self.kernel.run(limit, lambda: all(p.is_over() or p._is_converged() or p.waits() for p in sims)):
            raise Violation(f"jobs do not converge: {[p._situation() for p in sims]}")
        found = next((p for p in sims if not p.waits()), None)
        if found is None:
            raise Violation(f"nobody gets quota: {[p._situation() for p in sims]}")
        self.met["waits while another job has the quota"] += sum(p.waits() for p in sims)
        return found

    def _end_well(self) -> None:
        """See the job through to its end, and to its deletion."""
        if self._is_wanted():
            self._converge()
        if self._is_wanted() and self._is_alive():
            self._stay()
        if self._is_wanted() and self._is_alive():
            self._complete()
        elif self._is_wanted() and self.checker.record.outcome == "Completed":
            self._has_completed_in_trouble()
        self.checker.balanced(self.kernel.utc() + timedelta(seconds=self.cluster.clock_offset_s))
        if self.cluster.job is not None and self.cluster.job.deleted_at is None:
            self.say("the job is deleted")
            self.cluster.delete_job()
        self._vanish()

    def _converge(self) -> None:
        self.say("all faults are over")
        if not self.kernel.run(self.kernel.now + CONVERGE_S, self._is_converged):
            raise Violation(f"the job does not converge: {self._situation()}")
        self.say(f"converged: {self._situation()}")

    def _stay(self) -> None:
        """Nothing is written and nothing is done while nothing happens; dead nodes may take minutes to be done with.

        Now and then the look falls upon the end of a window or of a wait, which is written once.
        """
        for _ in range(LOOKS):
            problem = self._look_again()
            if not problem:
                return
        raise Violation(f"a second look at the same facts writes or does something: {problem}")

    def _look_again(self) -> str:
        writes, quiet_since = self.cluster.writes, self.kernel.now
        limit = self.kernel.now + SETTLE_S
        while self.kernel.now - quiet_since < STEADY_S:
            self.kernel.run(self.kernel.now + 5.0)
            if not self._is_wanted() or not self._is_alive():
                return ""  # a deadline of the job passed
            if self.cluster.writes != writes:
                writes, quiet_since = self.cluster.writes, self.kernel.now
            if self.kernel.now > limit:
                raise Violation(f"the operator goes on writing though nothing happens; last: {self.cluster.last_write}")
        shell = self.operator()
        shell.wake(self.cluster.job_uid)
        self.kernel.run(self.kernel.now + 5.0)
        todo = shell.views.of_job(self.cluster.job_uid).last_plan
        assert todo is not None
        actions = [a for a in todo.actions if not isinstance(a, ListPods)]
        return f"{actions}; last: {self.cluster.last_write}" if self.cluster.writes != writes or actions else ""

    def _complete(self) -> None:
        run = max(self.training.runs.values(), key=lambda r: r.generation)
        self.training.total = run.step + 5
        if not self.kernel.run(self.kernel.now + END_S, lambda: self.checker.record.outcome != ""):
            raise Violation(f"the job does not complete: {self._situation()}")
        if self.checker.record.outcome_reason == "DeadlineExceeded":
            return
        if self.checker.record.outcome != "Completed":
            raise Violation(f"the job ended as {self.checker.record.outcome}: {self.checker.record.outcome_message}")
        lineage(self.training)
        self._ends_cleanly(self._finished_pods())

    def _has_completed_in_trouble(self) -> None:
        """The job has completed while faults went on: it left what it should, and what was being done then was done once."""
        if not self.met["agent: lies that its workers finished"]:
            lineage(self.training)
            self.met["completes in trouble"] += 1
        self._ends_cleanly({})

    def _ends_cleanly(self, finished: dict[str, str]) -> None:
        """The job leaves what its policy says. finished: names of pods that it ended with and nobody has deleted, by UID."""
        ttl_s = (
            self.cluster.job.spec["runPolicy"].get("ttlSecondsAfterFinished") if self.cluster.job is not None else None
        )
        clean = self.cluster.job.spec["runPolicy"]["cleanPodPolicy"] if self.cluster.job is not None else ""
        self.kernel.run(self.kernel.now + END_S)
        # Of a dead node's pods nobody knows that they are gone before its grace is over.
        self.kernel.run(self.kernel.now + DEAD_NODE_S, lambda: all(p.node_runs() for p in self.cluster.pods.values()))
        if bool(ttl_s) is self._is_wanted():
            raise Violation(f"the job should go {ttl_s} s after its end, and {'stays' if ttl_s else 'goes'}")
        self.met["ttlSecondsAfterFinished"] += bool(ttl_s)
        self.met[f"cleanPodPolicy {clean}"] += 1
        left = [p for p in self.cluster.pods.values() if not p.ended]
        if self.server is not None and any(one.holds for one in self.server.kueue.of(self.name)):
            raise Violation(f"the job keeps quota after its end: {self._situation()}")
        if left:
            raise Violation(f"pods still run long after the end: {[p.name for p in left]}")
        if clean in ("All", "OnlyComplete") and self.cluster.pods:
            raise Violation(f"pods are left: {self._situation()}")
        taken = sorted(name for uid, name in finished.items() if uid not in self.cluster.pods)
        has_end = self.schedule.containers is not Containers.SIDECAR  # else a minute after the job's end its pods go
        if clean in ("None", "Running") and self._is_wanted() and taken and has_end:
            raise Violation(f"cleanPodPolicy {clean} keeps pods that finished, but {taken} are gone")
        self.met[f"cleanPodPolicy {clean} keeps pods"] += bool(finished) and self._is_wanted()

    def _finished_pods(self) -> dict[str, str]:
        """Give the names of the pods whose workers have just finished, by UID: those that nobody has deleted, on living nodes."""
        members = self.checker.record.members
        return {
            uid: pod.name
            for uid, pod in self.cluster.pods.items()
            if pod.deleted_at is None and pod.node_runs() and pod_id_of(pod.labels) in members
        }

    def _vanish(self) -> None:
        # Workers that do not heed the event have all the time that a drain gives them, also in a deletion that drains.
        gone = self.kernel.run(self.kernel.now + LONGEST_DRAIN_S + END_S, lambda: self.cluster.job is None)
        self.kernel.run(self.kernel.now + 10.0)
        if not gone or self.cluster.pods or (self.server is not None and self.server.kueue.of(self.name)):
            raise Violation(f"deletion leaves something: {self._situation()}")
