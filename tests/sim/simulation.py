"""Runs a schedule in virtual time, and shrinks one that fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from random import Random

from tests.sim import faults, plain_workloads
from tests.sim.cluster import Cluster
from tests.sim.copied_annotations import copied_annotations
from tests.sim.events import Event
from tests.sim.fault_targets import BLINDNESS, QUOTA_HINDRANCES
from tests.sim.invariants import InvariantChecker, Violation, lineage
from tests.sim.kernel import Kernel
from tests.sim.kueue_server import LOCAL_QUEUE, KueueServer, priority_label
from tests.sim.kueue_workload import Workload
from tests.sim.operator_errors import forget_operator_errors
from tests.sim.quota_invariants import is_base
from tests.sim.random_schedules import CHAOS_S, Containers, InQueue, Schedule
from tests.sim.shell import Shell
from tests.sim.training import Phase, Training
from tests.sim.user_edits import sizes

from elastipod_operator.api import JobSpec
from elastipod_operator.core import avoided_nodes
from elastipod_operator.core.actions import ListPods
from elastipod_operator.core.names import LABEL_INCREMENT, LABEL_QUEUE, pod_id_of
from elastipod_operator.core.quota import QuotaRequest, effective_quota_requests
from elastipod_operator.kube.job_policy import policy_of
from elastipod_operator.kube.workloads import workload_fact

CONVERGE_S = 1500.0
# Longer than an incomplete increment is held; the rests between get longer than that after six tries.
STEADY_S = 190.0
SETTLE_S = 4000.0
END_S = 200.0
DEAD_NODE_S = 700.0
LONGEST_DRAIN_S = 600.0  # gracefulShutdownTimeoutInSeconds where it is not set
LOOKS = 3


@dataclass
class Simulation:
    """The run of one schedule."""

    schedule: Schedule
    log: list[str] = field(default_factory=list)
    is_healed: bool = False
    is_spec_broken: bool = False
    name: str = "team"
    host: Simulation | None = None
    """The simulation in which this job is a rival."""

    def __post_init__(self) -> None:
        forget_operator_errors()
        self.kernel: Kernel = Kernel() if self.host is None else self.host.kernel
        self.rng = Random(self.schedule.seed * 7919 + 13)
        self.checker = InvariantChecker(self.say, heeds_events=self.schedule.heeds_events)
        self.training = Training(
            self.kernel, self.rng, self.checker,
            heeds_events=self.schedule.heeds_events, timeout_s=self.schedule.collective_timeout_s,
        )  # fmt: skip
        self.cluster = Cluster(self.kernel, self.rng, self.checker, self.training, self.schedule.spec())
        self.cluster.make = self.schedule.make
        self.cluster.preparing = self.schedule.preparing if self.schedule.make.keeps_state else None
        if self.schedule.copied is not None:
            self.cluster.copy_annotations(copied_annotations(self.schedule.copied, self.schedule.spec()))
        self.cluster.api_clock_s = self.schedule.api_clock_s
        self.cluster.is_seen = not any(event.what in BLINDNESS for event in self.schedule.events)
        self.cluster.agents_tell_of_others = self.schedule.agents_tell_of_others
        for _ in range(self.schedule.nodes):
            self.cluster.add_node()
        self.met = self.checker.met
        if self.schedule.api_clock_s:
            self.met[f"the API server's clock is {'ahead' if self.schedule.api_clock_s > 0 else 'behind'}"] += 1
        self.shell: Shell | None = None
        self.shells: list[Shell] = []
        """All lives of operators."""
        self.server: KueueServer | None = self.host.server if self.host is not None else None
        self.rivals: list[Simulation] = []
        if self.schedule.queue is not None:
            self._join(self.schedule.queue)
        self.start_operator()

    def _join(self, queue: InQueue) -> None:
        """Put the job into its queue, beside the others."""
        if self.server is None:
            self.server = KueueServer(self.kernel, Random(self.schedule.seed + 1), queue.settings, self.say)
            self.server.watch.is_hindered = any(event.what in QUOTA_HINDRANCES for event in self.schedule.events)
        self.cluster.tenant = self.server.tenant(self.name, queue.at, self.cluster)
        self.cluster.labels = {LABEL_QUEUE: LOCAL_QUEUE, **priority_label(queue.priority)}
        for at, rival in enumerate(queue.rivals):
            self.rivals.append(Simulation(rival, log=self.log, name=f"rival-{at}", host=self))
        for at, gang in enumerate(queue.plain_gangs):
            self.kernel.spawn(plain_workloads.live(self.server, gang, f"gang-{at}"))

    def say(self, text: str) -> None:
        """Write a line of the log."""
        who = f"{self.name}: " if self.host is not None else ""
        self.log.append(f"{self.kernel.now:8.2f}  {who}{text}")

    def told(self) -> str:
        """Give the whole log of the run."""
        return "\n".join([str(self.schedule), "", *self.log])

    def start_operator(self) -> None:
        """Begin a life of the operator, if none is under way."""
        if self.shell is None or not self.shell.alive:
            self.shell = self.another_operator()

    def another_operator(self) -> Shell:
        """Begin a life of an operator, whoever else may be there."""
        self.shells.append(Shell(self.kernel, self.rng, self.cluster, self.checker))
        return self.shells[-1]

    def run(self) -> Simulation:
        """Simulation to the end; raises Violation, or what the code under test raises."""
        try:
            return self._run()
        finally:
            for sim in (self, *self.rivals):
                for shell in sim.shells:
                    shell.die()

    def _inject(self, event: Event) -> None:
        faults.inject(self, event)

    def _run(self) -> Simulation:
        for event in self.schedule.events:
            self.kernel.at(event.at, partial(self._inject, event))
        self.kernel.run(CHAOS_S)
        sims = [self, *self.rivals]
        if self.server is not None:
            self.server.heal()
        for sim in sims:
            faults.heal(sim)
        if self.server is not None:
            self.server.watch.is_hindered = False
        while sims:
            sim = sims[0] if len(sims) == 1 else self._next(sims)
            sim._end_well()
            sims.remove(sim)
        for sim in self.rivals:
            self.met.update(sim.met)
        if self.server is not None:
            self.met.update(self.server.watch.met)
        return self

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

    def is_over(self) -> bool:
        """Whether nothing is to be waited for any more."""
        return not self._is_wanted() or not self._is_alive()

    def waits(self) -> bool:
        """Whether the job waits for quota that others have, and says so."""
        if self.server is None or self.is_over() or not self.server.is_at_rest:
            return False
        base = next((one for one in self.server.kueue.of(self.name) if is_base(one)), None)
        if base is None or base.phase != "Pending" or not base.is_active or self.cluster.pods:
            return False
        if base.conditions.get("Requeued", {}).get("status") == "False":
            return False
        said = self.cluster.job.status["conditions"][-1] if self.cluster.job and self.cluster.job.status else {}
        return base.said("QuotaReserved") != "" and base.said("QuotaReserved") in said.get("message", "")

    def _end_well(self) -> None:
        """See the job through to its end, and to its deletion."""
        if self._is_wanted():
            self._converge()
        if self._is_wanted() and self._is_alive():
            self._stay()
        if self._is_wanted() and self._is_alive():
            self._complete()
        self.checker.balanced(self.kernel.utc() + timedelta(seconds=self.cluster.clock_offset_s))
        if self.cluster.job is not None and self.cluster.job.deleted_at is None:
            self.say("the job is deleted")
            self.cluster.delete_job()
        self._vanish()

    def _is_wanted(self) -> bool:
        return self.cluster.job is not None and self.cluster.job.deleted_at is None

    def _is_alive(self) -> bool:
        return not self.checker.record.outcome

    def capacity(self, *, avoiding: bool = True) -> int:
        """How many pods can run: not on nodes that new ones avoid, unless one is there already."""
        avoided: tuple[str, ...] = ()
        if self.cluster.job is not None and avoiding:
            policy = policy_of(JobSpec.model_validate(self.cluster.spec_in_force()))
            avoided = avoided_nodes.avoided(self.checker.record, policy, self.kernel.utc())
        usable = [node for node in self.cluster.nodes.values() if self.cluster.usable(node)]
        return sum(n.name not in avoided or any(not p.ended for p in self.cluster.on_node(n)) for n in usable)

    def _converge(self) -> None:
        self.say("all faults are over")
        if not self.kernel.run(self.kernel.now + CONVERGE_S, self._is_converged):
            raise Violation(f"the job does not converge: {self._situation()}")
        self.say(f"converged: {self._situation()}")

    def _is_converged(self) -> bool:
        record, job = self.checker.record, self.cluster.job
        if record.outcome == "Completed" and not self.met["agent: lies that its workers finished"]:
            raise Violation("the job is completed though its workers never finished")
        if record.outcome or job is None:
            return True
        if record.transition is not None or record.running_since is None or not record.members:
            return False
        allowed = sizes(self.cluster.spec_in_force())
        run = self.training.runs.get(record.generation)
        at_work = (
            run is not None and run.phase is Phase.STEPPING and all(m.works(m.generation) for m in run.members.values())
        )
        if not at_work or (self.server is not None and not self._has_its_quota()):
            return False
        return len(record.members) == allowed.fit(min(self.capacity(), self._most(allowed.maximum)))

    def _shares(self) -> tuple[QuotaRequest, ...]:
        assert self.cluster.job is not None
        base = self._workloads().get(0)
        return effective_quota_requests(
            policy_of(JobSpec.model_validate(self.cluster.spec_in_force())),
            workload_fact(base.body()) if base else None,
        )

    def _workloads(self) -> dict[int, Workload]:
        assert self.server is not None
        return {int(one.meta["labels"][LABEL_INCREMENT]): one for one in self.server.kueue.of(self.name)}

    def _has_its_quota(self) -> bool:
        """Whether Kueue has decided about all that the job could ask for, as far as there are nodes for it."""
        assert self.server is not None
        requests, present = self._shares(), self._workloads()
        if not self.server.is_at_rest:
            return False
        is_all_asked = all(request.number in present for request in requests)
        if not is_all_asked and all(one.has("QuotaReserved") for one in present.values()):
            return self.capacity() < sum(len(request.slots) for request in requests)
        at_work = Counter(member.spec for member in self.checker.record.members)
        for request in requests:  # replicas count for the base first
            one = present.get(request.number)
            if one is not None and one.holds:
                if Counter(request.trains) <= at_work and not one.has("PodsReady"):
                    return False
                at_work -= Counter(request.trains)
        return True

    def _most(self, maximum: int) -> int:
        """Give how many replicas quota is granted for."""
        if self.server is None:
            return maximum
        granted = {number for number, one in self._workloads().items() if one.holds and not one.must_release_quota}
        return sum(sum(request.trains.values()) for request in self._shares() if request.number in granted)

    def _situation(self) -> str:
        record, job = self.checker.record, self.cluster.job
        state = job.status["conditions"][-1] if job is not None and job.status else None
        pods = [
            f"{p.name}:{p.phase}{'(terminating)' if p.deleted_at is not None else ''}"
            f"{'/' + p.agent.state.value + str(p.agent.generation) if p.agent is not None else ''}"
            for p in self.cluster.pods.values()
        ]
        about = f"generation {record.generation}, {len(record.members)} members, {record.transition}"
        quota = ""
        if self.server is not None:
            held = [
                (one.name, one.phase, "evicted" * one.must_release_quota) for one in self.server.kueue.of(self.name)
            ]
            quota = f"; {held}"
        return f"{about}; {self.capacity()} nodes usable; {pods}{quota}; {state}"

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
        assert self.shell is not None
        self.shell.wake()
        self.kernel.run(self.kernel.now + 5.0)
        assert self.shell.last_plan is not None
        actions = [a for a in self.shell.last_plan.actions if not isinstance(a, ListPods)]
        return f"{actions}; last: {self.cluster.last_write}" if self.cluster.writes != writes or actions else ""

    def _complete(self) -> None:
        run = max(self.training.runs.values(), key=lambda r: r.generation)
        self.training.total = total = run.step + 5
        if not self.kernel.run(self.kernel.now + END_S, lambda: self.checker.record.outcome != ""):
            raise Violation(f"the job does not complete: {self._situation()}")
        if self.checker.record.outcome_reason == "DeadlineExceeded":
            return
        if self.checker.record.outcome != "Completed":
            raise Violation(f"the job ended as {self.checker.record.outcome}: {self.checker.record.outcome_message}")
        lineage(self.training, total)
        ttl_s = (
            self.cluster.job.spec["runPolicy"].get("ttlSecondsAfterFinished") if self.cluster.job is not None else None
        )
        clean = self.cluster.job.spec["runPolicy"]["cleanPodPolicy"] if self.cluster.job is not None else ""
        finished = self._finished_pods()
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


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """Leave events out, one after the other, as long as the schedule still fails."""
    at = 0
    while at < len(schedule.events):
        shorter = replace(schedule, events=schedule.events[:at] + schedule.events[at + 1 :])
        if fails(shorter):
            schedule = shorter
        else:
            at += 1
    return schedule


def failure_of(schedule: Schedule, met: Counter[str] | None = None) -> BaseException | None:
    """Run a schedule; give what went wrong. met: takes in what was met in it."""
    sim = Simulation(schedule)
    try:
        sim.run()
    except Exception as error:  # whatever the code under test raises is a finding
        return error
    if met is not None:
        met.update(sim.met)
    return None


def explain(schedule: Schedule) -> str:
    """Tell a failing schedule in its shortest form, with the log of its run."""
    short = shrink(schedule, lambda s: failure_of(s) is not None)
    sim = Simulation(short)
    try:
        sim.run()
    except Exception as error:  # as above
        text = f"{type(error).__name__}: {error}"
        return "\n".join([text, "", str(short), "", *sim.log[-60:]])
    return f"the schedule does not fail when it runs again:\n{short}"
