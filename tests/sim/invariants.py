"""What must hold at every moment, whatever breaks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tests.sim.events import Make
from tests.sim.invariant_state import JOB_NAME, Violation, short
from tests.sim.record_invariants import RecordInvariants

from elastipod_agent.core.inprocess_restart import WorkerPreparation
from elastipod_operator.core.names import PodId
from elastipod_operator.core.next_generation import next_of
from elastipod_operator.core.record import TransitionKind

if TYPE_CHECKING:
    from tests.sim.agent_process import AgentProcess
    from tests.sim.agents import SimAgent
    from tests.sim.training import MeetingPlace, Run, Training

STATES = ("Created", "Suspended", "PodsRunning", "Running", "Faulted", "Completed", "Failed")
AUXILIARY = ("Scaling", "PodsReady", "Warning")


class InvariantChecker(RecordInvariants):
    """Sees every write and every call, and raises Violation at the first that must not be."""

    # -- calls to agents

    def asked_for_processes(self, generation: int) -> None:
        """Workers that failed by themselves, and nothing else at that time, want all to get new processes."""
        self._asked_for_processes.add(generation)

    def sent_away(self, pod: str) -> None:
        """The operator told a pod's agent to leave, or deletes the pod."""
        self._unwanted.add(pod)

    def told(self, agent: SimAgent, body: Mapping[str, Any]) -> None:
        """Agents whose workers outlive faults learn of each other with /start, the others do not (contracts, 11)."""
        ips, data = body.get("rankIps"), body.get("worker_data")
        if agent.make.keeps_state:
            return  # it depends on what the workers of the job have announced
        if agent.make is not Make.IN_PROCESS:
            if ips is not None or data is not None:
                raise Violation(f"{agent.pod.name} does not restart in process but is told of addresses")
            return
        ips = ips or []
        ranks, nproc = [entry["rank"] for entry in ips], agent.pod.nproc
        mine = {entry["ip"] for entry in ips[body["rank"] * nproc : (body["rank"] + 1) * nproc]}
        if ranks != list(range(body["nnodes"] * nproc)) or mine != {agent.pod.ip}:
            raise Violation(
                f"{agent.pod.name} as rank {body['rank']} of {body['nnodes']} is told of the addresses {ips}"
            )
        told_by = [(entry["data"], entry["local_rank"]) for entry in data or ()]
        if len(set(told_by)) < len(told_by):
            raise Violation(f"{agent.pod.name} is told the data of a worker twice: {told_by}")
        self.met["in process: addresses told"] += 1
        self.met["in process: worker data told"] += bool(data)
        self.met["in process: processes kept"] += agent.processes_since < body["faultCount"] + 1

    def called(
        self, path: str, pod: PodId, body: Mapping[str, Any] | None, *, ending: bool, by_the_past: bool = False
    ) -> None:
        """The operator is about to call an agent; the record must already say so.

        by_the_past: this operator stood still between its record and its call, and another one may have gone on.
        """
        record, generation = self.record, (body or {}).get("generation")
        if generation is None or by_the_past or self.is_lied_to:
            return
        stranger = path == "/stop" and pod not in record.members
        following = next_of(record)
        is_early = path == "/start" and following is not None and generation == following.generation
        is_early |= path == "/stop" and generation <= record.newest_told  # agents may have begun what was withdrawn
        if generation > record.generation and not ending and not stranger and not is_early:
            raise Violation(f"{path} of generation {generation} goes out, but the record says {record.generation}")
        if path == "/stop" and generation == record.generation and pod in record.members:
            if record.transition is None and not record.outcome and not ending:
                raise Violation(f"/stop goes to member {short(pod)} of generation {generation} without a record of it")
            if body is not None and not body.get("is_graceful") and record.transition and record.transition.graceful:
                self._say(f"hard stop in a drain: {short(pod)}")

    def stopped(self, generation: int, now: float) -> None:
        """An agent hears a /stop of its generation."""
        self._stopped_at.setdefault(generation, now)

    def started_prepared(self, agent: SimAgent) -> None:
        """An agent takes a /start, with workers that it has prepared or without."""
        if agent.preparation is WorkerPreparation.READY:
            last_stop = self._stopped_at.get(max(self._stopped_at, default=0), math.inf)
            self.met["in memory: prepared workers start"] += 1
            self.met["in memory: workers were at the barrier before the others stopped"] += agent.ready_at < last_stop

    def joined(self, run: Run, agent: AgentProcess, rank: int, nnodes: int, place: MeetingPlace) -> None:
        """An agent took a /start."""
        self._trained.add(agent.pod.name)
        kept = {g for g in self._asked_for_processes if 0 < agent.processes_since <= g < run.generation}
        if kept:
            raise Violation(
                f"{agent.pod.name} keeps its processes though workers of generation {kept} asked for new ones"
            )
        if agent.pod.uid in self._given_up:
            raise Violation(f"pod {agent.pod.name} trains though a full job restart came after it")
        counts = {member.pod.nproc for member in (agent, *run.members.values())}
        if len(counts) > 1:
            raise Violation(f"generation {run.generation} trains with pods of {sorted(counts)} workers")
        self.met["a worker count that was edited"] += agent.pod.nproc != self.nproc
        uid = self._started.setdefault((run.generation, rank), agent.pod.uid)
        if uid != agent.pod.uid:
            raise Violation(f"two pods have group rank {rank} in generation {run.generation}")
        if self._places.setdefault(run.generation, (place, nnodes)) != (place, nnodes):
            raise Violation(f"generation {run.generation} has two places to meet, or two sizes")
        if place.store_port is not None and not agent.serves_store:
            raise Violation(f"{agent.pod.name} does not know the store at which it is to meet others")
        self.met["an agent serves the store"] += place.store_port is not None
        if rank == 0 and place.address != agent.pod.ip:
            raise Violation(f"generation {run.generation}: group rank 0 is not at the master address")

    # -- training

    def told_who_leaves(self, run: Run, fates: Mapping[int, bool | None]) -> None:
        """The ranks of a run have stopped for a planned change in memory: by now each was told whether it stays."""
        if None in fates.values():
            raise Violation(f"generation {run.generation} has stopped, and its ranks were not told who leaves: {fates}")

    def resumed(self, run: Run, runs: Mapping[int, Run]) -> None:
        """A generation loaded its checkpoint: after a planned resize nothing may be repeated."""
        before = [r for g, r in runs.items() if g < run.generation and r.steps_made]
        last = max(before, key=lambda r: r.generation, default=None)
        repeated = last.step - run.resumed.step if last is not None else 0
        self._say(f"generation {run.generation} trains from step {run.resumed.step} ({repeated} repeated)")
        self.met["in memory: a generation goes on from it"] += run.is_from_memory
        planned = self._kinds.get(run.generation) is not TransitionKind.RECOVERY
        # With a wrong clock the time that a pod has until it is killed is misjudged.
        if last is None or last.spoiled or not self.has_true_time:
            return
        if any(agent.hangs() for agent in last.members.values()):
            return  # it could not ask its workers to save
        if planned and repeated and self.heeds_events:
            kind = self._kinds.get(run.generation)
            raise Violation(f"generation {run.generation} ({kind}) repeats {repeated} steps though nothing failed")

    def step(self, run: Run, runs: Mapping[int, Run]) -> None:
        """A generation makes a step."""
        # Members that are all out of everybody's sight cannot be kept from going on; what they save is refused.
        lost = {member.name(JOB_NAME) for member in self.record.lost}
        names = [agent.pod.name for agent in run.members.values()]
        unseen = all(name in self._touched or (name in self._hidden and name in lost) for name in names)
        if run.generation < self._stepped and unseen:
            return
        if run.generation < self._stepped:
            raise Violation(f"generation {run.generation} makes a step after generation {self._stepped} did")
        self._stepped = run.generation
        agents = {agent.pod.uid for agent in run.members.values()}
        if len(agents) != run.nnodes:
            raise Violation(f"generation {run.generation} trains with {len(agents)} pods instead of {run.nnodes}")

    # -- status

    def status_written(self, status: Mapping[str, Any]) -> None:
        """The API server took a status."""
        types = [condition["type"] for condition in status["conditions"]]
        if types[-1] not in STATES or len(set(types)) != len(types):
            raise Violation(f"conditions are not one list with the state last: {types}")
        ready = next((c for c in status["conditions"] if c["type"] == "PodsReady"), None)
        if ready is not None and ready["reason"] == "ContainerEnded":
            named = [pod for pod in self._unwanted if f"pod {pod} " in ready["message"]]
            if named:
                raise Violation(
                    f"the user is warned of the end of a pod that the operator sent away: {ready['message']}"
                )
        self.met.update(f"told: {c['type']} {c['reason']}" for c in status["conditions"])
        loud = [c["type"] for c in status["conditions"] if c["type"] in AUXILIARY and c["status"] == "True"]
        if types[-1] == "Running" and loud:
            raise Violation(f"auxiliary conditions are True while Running: {loud}")


def lineage(training: Training) -> None:
    """Every step of the final weights was made exactly once, going back over the generations (contracts, 7)."""
    upper = training.total
    assert upper is not None
    run = max((r for r in training.runs.values() if r.step >= upper and r.steps_made), key=lambda r: r.generation)
    while upper > 0:
        if run.resumed.step >= upper:
            raise Violation(f"generation {run.generation} resumed at {run.resumed.step}, beyond step {upper}")
        upper = run.resumed.step
        if not upper:
            return
        if run.resumed.generation >= run.generation:
            raise Violation(f"generation {run.generation} resumed from generation {run.resumed.generation}")
        writer = training.runs[run.resumed.generation]
        if not writer.resumed.step < upper <= writer.step:
            raise Violation(f"generation {writer.generation} never made step {upper}")
        run = writer
