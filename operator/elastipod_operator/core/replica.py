"""A pod with its assessment, and the assessed pods of a job."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from .names import PodId, Slot
from .reasons import NO_REASON, AnyReason, Reason
from .silence import AGENT_ENDED
from .snapshot import AgentState, ObservedAgent, ObservedPod

# One start per second for thirty years. An agent may report a false generation, but none above this limit is believed.
MAX_GENERATION = 10**9
POD_FAILED, CONTAINER_RESTARTED = Reason.POD_FAILED, Reason.CONTAINER_RESTARTED


class Health(StrEnum):
    """The state of a pod."""

    PENDING = "pending"  # not started, or its agent has not answered yet
    GOOD = "good"  # its agent answers
    SILENT = "silent"  # its agent does not answer at present; it is not proven lost
    DISRUPTED = "disrupted"  # it will lose its pod, node or quota, or its pod is recreated: drain it if it answers
    LOST = "lost"  # it will never train again, even if the API server still lists it
    ENDED = "ended"  # its agent's container has ended


@dataclass(frozen=True, slots=True)
class Replica:
    """A pod with its assessment."""

    pod: ObservedPod
    agent: ObservedAgent
    health: Health
    # Why it is disrupted, silent, lost or ended; NO_REASON while nothing is wrong.
    cause: AnyReason = NO_REASON
    detail: str = ""
    # Its containers can never run again: its slot can be filled and its object can be deleted by force.
    cannot_run_again: bool = False
    # It has ended, but its kubelet, which would confirm its deletion, is gone.
    is_kubelet_lost: bool = False
    # It is lost or its agent has ended, but its kubelet is alive and has not ended all of its containers yet.
    may_still_run: bool = False
    # For a silent pod: when it counts as lost if no other fact decides before.
    presumed_lost_at: datetime | None = None

    @property
    def id(self) -> PodId:
        return self.pod.id

    @property
    def may_train(self) -> bool:
        """Whether it trains or may train later: it has not ended, is not lost and is not disrupted."""
        return self.health not in (Health.ENDED, Health.LOST, Health.DISRUPTED)

    @property
    def has_no_workers(self) -> bool:
        """Whether its workers ended with their container."""
        return self.health is Health.ENDED or self.cause == CONTAINER_RESTARTED

    @property
    def ended_by_itself(self) -> bool:
        """Whether its agent or container ended without a cause outside the pod, such as its node or a deletion."""
        is_own = self.cause in (POD_FAILED, AGENT_ENDED, CONTAINER_RESTARTED)
        return is_own and self.pod.kill_at is None and not self.pod.disruption

    def finished(self, generation: int) -> bool:
        """Whether its workers of this generation completed. If its container has ended, it must have succeeded too."""
        if self.agent.state is not AgentState.COMPLETED or not self.runs(generation):
            return False
        container = self.pod.container
        succeeded = self.pod.phase == "Succeeded" or (container is not None and container.exit_code == 0)
        return self.health is not Health.ENDED or succeeded

    @property
    def is_busy(self) -> bool:
        """Whether its agent reports workers: running ones, or ended ones that no stop has acknowledged."""
        answers = self.health in (Health.GOOD, Health.DISRUPTED)
        return answers and self.agent.state in (AgentState.RUNNING, AgentState.FAULTED, AgentState.COMPLETED)

    @property
    def is_idle(self) -> bool:
        """Whether its agent reports that no workers run."""
        answers = self.health in (Health.GOOD, Health.DISRUPTED)
        return answers and self.agent.state in (AgentState.READY, AgentState.INIT, AgentState.SHUTDOWN)

    @property
    def failed_draining(self) -> bool:
        """Whether its workers failed during a drain: its agent is then idle, with new processes, and reports the failure."""
        return self.is_idle and not self.agent.drained and self.agent.failure is not None

    @property
    def ready(self) -> bool:
        """Whether its agent could take a /start now."""
        return self.health is Health.GOOD and self.agent.state is AgentState.READY

    def runs(self, generation: int) -> bool:
        """Whether its workers belong to `generation`. Agents that do not report a generation are believed."""
        return self.agent.generation is None or self.agent.generation == generation


@dataclass(frozen=True, slots=True)
class Replicas:
    """The assessed pods of a job, by ID and by slot (the newest incarnation)."""

    by_id: dict[PodId, Replica]
    newest: dict[Slot, Replica]
    # Every agent is silent, apart from those on nodes that are not ready: the operator suspects its own connection and waits.
    all_silent: bool
    # When the next pod counts as lost unless its node returns or its agent answers; no event wakes the operator then.
    next_loss_at: datetime | None = None
    # When the pods were assessed.
    now: datetime | None = None
    # When capacity in the cluster last became free, as far as the operator can see.
    capacity_freed_at: datetime | None = None
    # Slots whose quota was lost: their pods are removed even if their agents do not answer.
    quota_lost: frozenset[Slot] = frozenset()

    def get(self, pod: PodId) -> Replica | None:
        return self.by_id.get(pod)

    def candidates(self) -> list[Replica]:
        """Give the replicas that a next generation could take."""
        return [r for r in self.newest.values() if r.ready]

    def highest_generation(self) -> int:
        """Give the newest generation that an agent or a pod label reports; impossible numbers are ignored."""
        reported = (
            number
            for r in self.by_id.values()
            for number in (r.agent.generation or 0, r.agent.next_generation or 0, r.pod.generation)
        )
        return max((number for number in reported if number <= MAX_GENERATION), default=0)
