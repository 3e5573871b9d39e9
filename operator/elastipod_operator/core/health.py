"""Which pods can train, which are about to go, which are lost: one judgement for each pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from types import MappingProxyType

from .names import PodId, Slot
from .reasons import NO_REASON, AnyReason, Reason, ReasonAndMessage
from .record import Record, TransitionKind
from .silence import AGENT_ENDED, AGENT_SILENT, NODE_LOST, PeerReports, diagnose, is_answering, is_silent
from .snapshot import AgentState, ObservedAgent, ObservedNode, ObservedPod, Snapshot

TICK = timedelta(milliseconds=1)
# An agent answers within a second of its container's start; after this long the container does not run one.
AGENT_EXPECTED = timedelta(seconds=30)
# A start every second for thirty years. An agent that lies may make generations jump, but not beyond what numbers can hold.
MAX_GENERATION = 10**9

POD_FAILED, CONTAINER_RESTARTED = Reason.POD_FAILED, Reason.CONTAINER_RESTARTED

NO_AGENT = ObservedAgent()
NO_SLOTS: Mapping[Slot, ReasonAndMessage] = MappingProxyType({})


class Health(StrEnum):
    """What a pod is good for."""

    PENDING = "pending"  # not started, or its agent has not answered yet
    GOOD = "good"  # its agent answers
    SILENT = "silent"  # its agent does not answer at present; nothing is proven
    DISRUPTED = "disrupted"  # it answers, but it, its node or its quota will go: drain it
    LOST = "lost"  # it will never train again, though the API server may still list it
    ENDED = "ended"  # its agent's container has ended


@dataclass(frozen=True, slots=True)
class Replica:
    """A pod with everything known about it."""

    pod: ObservedPod
    agent: ObservedAgent
    health: Health
    cause: AnyReason = NO_REASON
    """CamelCase cause when doomed or lost."""
    detail: str = ""
    cannot_run_again: bool = False
    """Gone for good: its place may be given away and its object removed."""
    is_kubelet_lost: bool = False
    """It has ended, and the kubelet that would take its object away is gone."""
    may_still_run: bool = False
    """It is lost, or its agent has ended, but its kubelet lives, and has not ended all of its containers yet."""
    presumed_lost_at: datetime | None = None
    """Of a silent one: when silence itself decides that it is lost, because nothing else can."""

    @property
    def id(self) -> PodId:
        return self.pod.id

    @property
    def may_train(self) -> bool:
        """Whether it trains, or may yet: it has not ended, is not lost, and need not leave."""
        return self.health not in (Health.ENDED, Health.LOST, Health.DISRUPTED)

    @property
    def has_no_workers(self) -> bool:
        """Whether its workers ended with their container."""
        return self.health is Health.ENDED or self.cause == CONTAINER_RESTARTED

    @property
    def ended_by_itself(self) -> bool:
        """Whether its agent or its container ended, and neither its node nor anybody else brought that about."""
        is_own = self.cause in (POD_FAILED, AGENT_ENDED, CONTAINER_RESTARTED)
        return is_own and self.pod.kill_at is None and not self.pod.disruption

    def finished(self, generation: int) -> bool:
        """Whether its workers of a generation completed, and its container, if it has ended, ended well after that."""
        if self.agent.state is not AgentState.COMPLETED or not self.runs(generation):
            return False
        container = self.pod.container
        ended_well = self.pod.phase == "Succeeded" or (container is not None and container.exit_code == 0)
        return self.health is not Health.ENDED or ended_well

    @property
    def is_busy(self) -> bool:
        """Whether workers run there, or their end has not been acknowledged by a stop, as far as its agent tells."""
        answers = self.health in (Health.GOOD, Health.DISRUPTED)
        return answers and self.agent.state in (AgentState.RUNNING, AgentState.FAULTED, AgentState.COMPLETED)

    @property
    def is_idle(self) -> bool:
        """Whether its agent says that no workers run there."""
        answers = self.health in (Health.GOOD, Health.DISRUPTED)
        return answers and self.agent.state in (AgentState.READY, AgentState.INIT, AgentState.SHUTDOWN)

    @property
    def ready(self) -> bool:
        """Whether its agent could take a /start now."""
        return self.health is Health.GOOD and self.agent.state is AgentState.READY

    def runs(self, generation: int) -> bool:
        """Whether its workers belong to `generation`; agents of another make do not say and are believed."""
        return self.agent.generation is None or self.agent.generation == generation


@dataclass(frozen=True, slots=True)
class Replicas:
    """The pods of a job, judged; the newest incarnation of each slot apart from older ones."""

    by_id: dict[PodId, Replica]
    newest: dict[Slot, Replica]
    all_silent: bool
    """Every agent whose node does not explain it is silent: the operator suspects itself and waits."""
    next_loss_at: datetime | None = None
    """When the next pod counts as gone unless its node comes back, or as lost unless its agent answers; nothing else would tell."""
    now: datetime | None = None
    """When it was judged."""
    capacity_freed_at: datetime | None = None
    """When there last came to be more room in the cluster, as far as the operator can see."""
    quota_lost: frozenset[Slot] = frozenset()
    """Slots without quota: their pods go, whether their agents answer or not."""

    def get(self, pod: PodId) -> Replica | None:
        return self.by_id.get(pod)

    def candidates(self) -> list[Replica]:
        """Give the replicas that a next generation could take."""
        return [r for r in self.newest.values() if r.ready]

    def highest_generation(self) -> int:
        """Give the newest generation that agents ran, or that labels of pods tell of; what nobody can have run counts not."""
        told = (number for r in self.by_id.values() for number in (r.agent.generation or 0, r.pod.generation))
        return max((number for number in told if number <= MAX_GENERATION), default=0)


def drain_grace(snapshot: Snapshot) -> timedelta:
    """Give the time of a drain. A node that is not ready for longer does not count as coming back."""
    return snapshot.job.policy.graceful_timeout if snapshot.job.policy is not None else timedelta(minutes=10)


def assess(snapshot: Snapshot, quota_lost: Mapping[Slot, ReasonAndMessage] = NO_SLOTS) -> Replicas:
    """Judge every pod of the job."""
    record = snapshot.job.record
    given_up = frozenset(record.lost) if record else frozenset()
    members = frozenset(record.members) if record else frozenset()
    is_stopping = record is not None and record.transition is not None
    agents = {
        pod.name: _known_since(
            snapshot.agents.get(pod.name, NO_AGENT), pod.id in members and not (is_stopping and _was_restarted(pod))
        )
        for pod in snapshot.pods
    }
    alive = [(pod, agents[pod.name]) for pod in snapshot.pods if not (pod.ended or _container_ended(pod))]
    ever = [a for _, a in alive if a.last_answer]
    unexplained = [
        a for pod, a in alive if a.last_answer and not _is_explained(snapshot.nodes.get(pod.node), a, snapshot.now)
    ]
    peers = PeerReports(
        members=[a for pod, a in alive if pod.id in members and is_answering(a, snapshot.now)],
        all_silent=bool(unexplained) and all(is_silent(a, snapshot.now) for a in unexplained),
        heard_at=max((a.last_answer for a in ever if a.last_answer is not None), default=None),
    )
    grace = drain_grace(snapshot)
    by_id: dict[PodId, Replica] = {}
    newest: dict[Slot, Replica] = {}
    for pod in snapshot.pods:
        node = snapshot.nodes.get(pod.node) if pod.node else None
        agent = agents[pod.name]
        if pod.id in given_up and not pod.ended:
            replica = Replica(
                pod,
                agent,
                Health.LOST,
                Reason.GIVEN_UP,
                cannot_run_again=_cannot_run_again(pod, agent, node, snapshot.now, grace),
            )
        else:
            lost = quota_lost.get(pod.id.slot)
            is_member = pod.id in members
            replica = _assess_pod(pod, agent, node, peers, snapshot.now, grace, is_member=is_member, quota_lost=lost)
        if node is not None and node.cordoned and _would_grow(replica, record):
            why = f"node {node.name} was cordoned before pod {pod.name} joined the training"
            replica = replace(replica, health=Health.DISRUPTED, cause=Reason.NODE_CORDONED, detail=why)
        if replica.health in (Health.LOST, Health.ENDED) and not replica.cannot_run_again:
            replica = replace(replica, may_still_run=not pod.node or (node is not None and node.ready))
        by_id[pod.id] = replica
        if pod.id.slot not in newest or newest[pod.id.slot].id.incarnation < pod.id.incarnation:
            newest[pod.id.slot] = replica
    not_ready_since = (
        node.not_ready_since
        for pod in snapshot.pods
        if (node := snapshot.nodes.get(pod.node)) is not None and not node.ready
    )
    ends = (since + grace + TICK for since in not_ready_since if since is not None)
    decisions = (r.presumed_lost_at + TICK for r in by_id.values() if r.presumed_lost_at is not None)
    next_loss_at = min((at for at in (*ends, *decisions) if at > snapshot.now), default=None)
    return Replicas(
        by_id,
        newest,
        peers.all_silent,
        next_loss_at,
        snapshot.now,
        snapshot.capacity_freed_at,
        frozenset(quota_lost),
    )


def _would_grow(replica: Replica, record: Record | None) -> bool:
    """Whether a pod could only take part in a growth: a cordon stops that, and nothing else.

    A start and a recovery take whom they find, and a spare keeps its place.
    """
    if record is None or not record.members or replica.id in record.members:
        return False
    if record.transition is not None and record.transition.kind is not TransitionKind.RESIZE:
        return False
    return replica.health in (Health.GOOD, Health.PENDING) and not (replica.is_busy or replica.agent.is_spare)


def _assess_pod(
    pod: ObservedPod,
    agent: ObservedAgent,
    node: ObservedNode | None,
    peers: PeerReports,
    now: datetime,
    grace: timedelta,
    *,
    is_member: bool,
    quota_lost: ReasonAndMessage | None = None,
) -> Replica:
    if pod.ended:
        is_kubelet_lost = _unattended(node, now, grace)
        return Replica(
            pod, agent, Health.ENDED, *_why_it_ended(pod, node), cannot_run_again=True, is_kubelet_lost=is_kubelet_lost
        )
    if node is not None and node.out_of_service:
        return Replica(
            pod,
            agent,
            Health.LOST,
            Reason.NODE_OUT_OF_SERVICE,
            f"node {node.name} is out of service",
            cannot_run_again=True,
        )
    cannot_run_again = _cannot_run_again(pod, agent, node, now, grace)
    if cannot_run_again and not is_answering(agent, now):
        how = "was deleted" if node is None else f"is not ready for more than {grace.total_seconds():g} s"
        return Replica(
            pod,
            agent,
            Health.LOST,
            NODE_LOST if node else Reason.NODE_DELETED,
            f"node {pod.node} {how}",
            cannot_run_again,
        )
    if _container_ended(pod):
        return Replica(pod, agent, Health.ENDED, *_why_it_ended(pod, node), cannot_run_again)
    if pod.container is not None and pod.container.is_restarting:
        detail = pod.problem or f"the agent's container of pod {pod.name} ended and is started again"
        return Replica(pod, agent, Health.PENDING, CONTAINER_RESTARTED, detail, cannot_run_again)
    if is_silent(agent, now):
        diagnosis = diagnose(pod, agent, node, peers, now, is_member=is_member)
        if diagnosis.cause:
            return Replica(pod, agent, Health.LOST, diagnosis.cause, diagnosis.detail, cannot_run_again)
        return Replica(
            pod,
            agent,
            Health.SILENT,
            AGENT_SILENT,
            diagnosis.detail,
            cannot_run_again,
            presumed_lost_at=diagnosis.presumed_lost_at,
        )
    disrupted = quota_lost or _disruption(pod, node, agent)
    if disrupted:
        return Replica(pod, agent, Health.DISRUPTED, *disrupted, cannot_run_again=cannot_run_again)
    if agent.state is None:
        return Replica(
            pod,
            agent,
            Health.PENDING,
            Reason.AGENT_NOT_ANSWERING if _overdue(agent, now) else NO_REASON,
            cannot_run_again=cannot_run_again,
        )
    return Replica(pod, agent, Health.GOOD, cannot_run_again=cannot_run_again)


def _is_explained(node: ObservedNode | None, agent: ObservedAgent, now: datetime) -> bool:
    """Whether an agent is silent and its node is known to be the reason."""
    return node is not None and not node.ready and is_silent(agent, now)


def _container_ended(pod: ObservedPod) -> bool:
    """Whether the agent's container has ended for good; nothing is started again in a pod that is being deleted."""
    container = pod.container
    return container is not None and (container.ended or (container.is_restarting and pod.kill_at is not None))


def _was_restarted(pod: ObservedPod) -> bool:
    return pod.container is not None and pod.container.restart_count > 0


def _why_it_ended(pod: ObservedPod, node: ObservedNode | None) -> ReasonAndMessage:
    """Give cause and sentence of a container's end: its node's failure explains it, else it ended by itself."""
    detail = pod.problem or f"pod {pod.name} ended"
    if node is not None and not node.ready:
        return NODE_LOST, f"{detail}; its node {node.name} is not ready"
    return POD_FAILED, detail


def _known_since(agent: ObservedAgent, is_member: bool) -> ObservedAgent:
    """An agent that trained before this operator began must answer too: its silence counts from the first call."""
    if is_member and agent.last_answer is None and agent.trying_since is not None:
        return replace(agent, last_answer=agent.trying_since)
    return agent


def _overdue(agent: ObservedAgent, now: datetime) -> bool:
    return agent.trying_since is not None and now - agent.trying_since >= AGENT_EXPECTED


def _cannot_run_again(
    pod: ObservedPod, agent: ObservedAgent, node: ObservedNode | None, now: datetime, grace: timedelta
) -> bool:
    """Whether the pod can never run again. A node that is not in the cache may be too new for it, so the agent must be silent too."""
    if pod.ended:
        return True
    if not pod.node:
        return False
    return is_silent(agent, now) if node is None else _unattended(node, now, grace)


def _unattended(node: ObservedNode | None, now: datetime, grace: timedelta) -> bool:
    """Whether a node's kubelet will not come back; of nodes that were deleted, others take the pods away."""
    if node is None or node.out_of_service:
        return node is not None
    return node.not_ready_since is not None and not node.ready and now - node.not_ready_since > grace


def _disruption(pod: ObservedPod, node: ObservedNode | None, agent: ObservedAgent) -> ReasonAndMessage | None:
    if node is not None and node.disruption:
        return Reason.NODE_DRAINED, f"node {node.name}: {node.disruption}"
    if pod.disruption:
        cause, what = Reason.POD_DISRUPTED, f"is being disrupted ({pod.disruption})"
    elif pod.kill_at is not None:
        cause, what = Reason.POD_DELETED, "is being deleted"
    elif agent.terminating:
        # The agent hears of its end before the watch tells of it.
        cause, what = Reason.POD_TERMINATING, "was told to end (SIGTERM)"
    else:
        return None
    if node is not None and node.cordoned:
        return Reason.NODE_DRAINED, f"pod {pod.name} {what}; its node {node.name} is cordoned"
    return cause, f"pod {pod.name} {what}"
