"""One job of a simulation: what belongs to it, and how it is at a moment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from tests.sim.cluster import Cluster
from tests.sim.copied_annotations import copied_annotations
from tests.sim.events import Make
from tests.sim.fault_targets import DELAYS
from tests.sim.invariant_state import JOB_UID, Violation, policy_in
from tests.sim.invariants import InvariantChecker
from tests.sim.kernel import Kernel
from tests.sim.kueue_server import KueueServer
from tests.sim.kueue_workload import Workload
from tests.sim.operator_errors import forget_operator_errors
from tests.sim.quota_invariants import is_base
from tests.sim.random_schedules import InQueue, Schedule
from tests.sim.shell import Shell
from tests.sim.storage import Storage
from tests.sim.training import Phase, Training
from tests.sim.user_edits import sizes

from elastipod_operator.core import avoided_nodes
from elastipod_operator.core.names import LABEL_INCREMENT
from elastipod_operator.core.quota import QuotaRequest, effective_quota_requests
from elastipod_operator.kube.job_keys import JobKeys
from elastipod_operator.kube.workloads import workload_fact

INSTALL_KEY = b"the install key of this simulation"


@dataclass
class JobInSimulation(ABC):
    """A job with its cluster, its operators and its queue, and how it is."""

    schedule: Schedule
    log: list[str] = field(default_factory=list)
    is_healed: bool = False
    is_spec_broken: bool = False
    name: str = "team"
    host: JobInSimulation | None = None
    """The simulation in which this job is a rival, or a neighbour."""
    number: int = 0
    """Of a job that has its host's operator; 0 for one with an operator of its own."""

    def __post_init__(self) -> None:
        forget_operator_errors()
        self.kernel: Kernel = Kernel() if self.host is None else self.host.kernel
        self.rng = Random(self.schedule.seed * 7919 + 13)
        self.checker = InvariantChecker(self.say, heeds_events=self.schedule.heeds_events)
        self.training = Training(
            self.kernel, self.rng, self.checker, Storage(lambda trouble: self.cluster.goes_on(trouble), JOB_UID),
            heeds_events=self.schedule.heeds_events, timeout_s=self.schedule.collective_timeout_s,
        )  # fmt: skip
        self.training.is_hindered = any(event.what in DELAYS for event in self.schedule.events)
        self.cluster = Cluster(
            self.kernel, self.rng, self.checker, self.training, self.schedule.spec(), self.number
        )  # fmt: skip
        self.cluster.make = self.schedule.make
        self.checker.is_replicated = self.schedule.make is Make.KEEPING
        self.cluster.preparing = self.schedule.preparing if self.schedule.make.keeps_state else None
        if self.schedule.copied is not None:
            self.cluster.copy_annotations(copied_annotations(self.schedule.copied, self.schedule.spec()))
        self.cluster.api_clock_s = self.schedule.api_clock_s
        self.cluster.agents_tell_of_others = self.schedule.agents_tell_of_others
        for _ in range(self.schedule.nodes):
            self.cluster.add_node()
        self.met = self.checker.met
        self.checker.nproc = self.schedule.nproc
        if self.schedule.api_clock_s:
            self.met[f"the API server's clock is {'ahead' if self.schedule.api_clock_s > 0 else 'behind'}"] += 1
        self.shell: Shell | None = None
        self.install_keys: tuple[bytes, ...] = (INSTALL_KEY,) if self.schedule.has_keys else ()
        """With which the operator derives those of jobs; the newest first."""
        self.neighbours: Sequence[JobInSimulation] = ()
        self.shells: list[Shell] = []
        """All lives of operators."""
        self.server: KueueServer | None = self.host.server if self.host is not None else None
        if self.schedule.queue is not None:
            self._join(self.schedule.queue)
        self._invite()
        self.start_operator()

    @abstractmethod
    def _join(self, queue: InQueue) -> None:
        """Put the job into its queue, beside the others."""

    @abstractmethod
    def _invite(self) -> None:
        """Make the other jobs of its operator."""

    @property
    def is_neighbour(self) -> bool:
        """Whether the operator of its host runs it too."""
        return self.number > 0

    def say(self, text: str) -> None:
        """Write a line of the log."""
        who = f"{self.name}: " if self.host is not None else ""
        self.log.append(f"{self.kernel.now:8.2f}  {who}{text}")

    def told(self) -> str:
        """Give the whole log of the run."""
        return "\n".join([str(self.schedule), "", *self.log])

    def start_operator(self) -> None:
        """Begin a life of the operator, if none is under way."""
        if not self.is_neighbour and (self.shell is None or not self.shell.alive):
            self.shell = self.another_operator()

    def operator(self) -> Shell:
        """Give the operator that runs the job."""
        found = self.host.shell if self.is_neighbour and self.host is not None else self.shell
        assert found is not None
        return found

    def another_operator(self) -> Shell:
        """Begin a life of an operator, whoever else may be there."""
        jobs = [(sim.cluster, sim.checker) for sim in (self, *self.neighbours)]
        self.shells.append(Shell(self.kernel, self.rng, *jobs, keys=JobKeys(self.install_keys)))
        return self.shells[-1]

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

    def _is_wanted(self) -> bool:
        return self.cluster.job is not None and self.cluster.job.deleted_at is None

    def _is_alive(self) -> bool:
        return not self.checker.record.outcome

    def capacity(self, *, avoiding: bool = True) -> int:
        """How many pods can run: not on nodes that new ones avoid, unless one is there already."""
        avoided: tuple[str, ...] = ()
        if self.cluster.job is not None and avoiding:
            policy = policy_in(self.cluster.spec_in_force())
            avoided = avoided_nodes.avoided(self.checker.record, policy, self.kernel.utc())
        usable = [node for node in self.cluster.nodes.values() if self.cluster.usable(node)]
        return sum(n.name not in avoided or any(not p.ended for p in self.cluster.on_node(n)) for n in usable)

    def _is_converged(self) -> bool:
        record, job = self.checker.record, self.cluster.job
        is_lied_to = self.met["agent: lies that its workers finished"]
        if record.outcome == "Completed" and not self.training.is_finished and not is_lied_to:
            raise Violation("the job is completed though its workers never finished")
        if record.outcome or job is None:
            return True
        if self.training.total is not None:
            return False  # its end is near
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
            policy_in(self.cluster.spec_in_force()),
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
