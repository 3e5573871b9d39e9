"""Assess each pod: it can train, it is disrupted, it is silent, or it is lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from types import MappingProxyType

from .names import PodId, Slot
from .reasons import NO_REASON, Reason, ReasonAndMessage
from .record import Record, TransitionKind
from .replica import CONTAINER_RESTARTED, POD_FAILED, Health, Replica, Replicas
from .silence import AGENT_SILENT, NODE_LOST, PeerReports, diagnose, is_answering, is_silent
from .snapshot import AgentState, ObservedAgent, ObservedNode, ObservedPod, Policy, Snapshot, pod_agent_port

TICK = timedelta(milliseconds=1)
# An agent answers within a second of its own start. After this time the container is assumed to run none.
AGENT_EXPECTED = timedelta(seconds=30)


NO_AGENT = ObservedAgent()
NO_SLOTS: Mapping[Slot, ReasonAndMessage] = MappingProxyType({})


def drain_grace(snapshot: Snapshot) -> timedelta:
    """Give the time for a drain. A node that is not ready for longer than this is not expected back."""
    return snapshot.job.policy.graceful_timeout if snapshot.job.policy is not None else timedelta(minutes=10)


def assess(snapshot: Snapshot, quota_lost: Mapping[Slot, ReasonAndMessage] = NO_SLOTS) -> Replicas:
    """Assess every pod of the job."""
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
            replica = _assess_pod(
                pod, agent, node, peers, snapshot.now, grace, is_member=pod.id in members,
                awaits_start=_may_await_start(agent, record), policy=snapshot.job.policy, quota_lost=lost,
            )  # fmt: skip
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
        by_id, newest, peers.all_silent, next_loss_at, snapshot.now, snapshot.capacity_freed_at, frozenset(quota_lost)
    )


def _would_grow(replica: Replica, record: Record | None) -> bool:
    """Whether the pod could only take part in a growth, which is all that a cordon prevents.

    A start or a recovery uses the pods that exist, and a spare keeps its node.
    """
    if record is None or not record.members or replica.id in record.member_set:
        return False
    if record.transition is not None and record.transition.kind is not TransitionKind.RESIZE:
        return False
    return replica.health in (Health.GOOD, Health.PENDING) and not (replica.is_busy or replica.agent.is_spare)


def _may_await_start(agent: ObservedAgent, record: Record | None) -> bool:
    """Whether not all members have been seen to run the present generation, and this agent has not either."""
    if record is None or record.transition is not None or record.running_since is not None:
        return False
    is_idle = agent.state in (None, AgentState.INIT, AgentState.READY)
    return is_idle or agent.generation not in (None, record.generation)


def _assess_pod(
    pod: ObservedPod,
    agent: ObservedAgent,
    node: ObservedNode | None,
    peers: PeerReports,
    now: datetime,
    grace: timedelta,
    *,
    is_member: bool,
    awaits_start: bool,
    policy: Policy | None,
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
        detail = pod.problem or f"the agent's container of pod {pod.name} ended and is being restarted"
        return Replica(pod, agent, Health.PENDING, CONTAINER_RESTARTED, detail, cannot_run_again)
    if is_silent(agent, now):
        diagnosis = diagnose(pod, agent, node, peers, now, is_member=is_member, awaits_start=awaits_start)
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
    if not disrupted and not is_member and not peers.all_silent:
        disrupted = _at_former_port(pod, agent, policy, now)
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
    """Whether an agent is silent because its node is not ready."""
    return node is not None and not node.ready and is_silent(agent, now)


def _container_ended(pod: ObservedPod) -> bool:
    """Whether the agent's container has ended for good. Containers of a pod that is being deleted are not restarted."""
    container = pod.container
    return container is not None and (container.ended or (container.is_restarting and pod.kill_at is not None))


def _was_restarted(pod: ObservedPod) -> bool:
    return pod.container is not None and pod.container.restart_count > 0


def _why_it_ended(pod: ObservedPod, node: ObservedNode | None) -> ReasonAndMessage:
    """Give the cause and message of a container's end: the failure of its node, or else its own failure."""
    detail = pod.problem or f"pod {pod.name} ended"
    if node is not None and not node.ready:
        return NODE_LOST, f"{detail}; its node {node.name} is not ready"
    return POD_FAILED, detail


def _known_since(agent: ObservedAgent, is_member: bool) -> ObservedAgent:
    """Count the silence of a member that never answered this operator from the first call."""
    if is_member and agent.last_answer is None and agent.trying_since is not None:
        return replace(agent, last_answer=agent.trying_since)
    return agent


def _overdue(agent: ObservedAgent, now: datetime) -> bool:
    return agent.trying_since is not None and now - agent.trying_since >= AGENT_EXPECTED


def _at_former_port(
    pod: ObservedPod, agent: ObservedAgent, policy: Policy | None, now: datetime
) -> ReasonAndMessage | None:
    """Say why a pod that has never answered is replaced; None if it is not: the job's port was edited since it was created."""
    is_heard = agent.state is not None or agent.authentication_failed or bool(agent.refused_answer)
    if policy is None or is_heard or not _overdue(agent, now):
        return None
    port = pod_agent_port(pod, policy)
    if port == policy.agent_port:
        return None
    why = (
        f"nothing answers on port {port} of pod {pod.name}, and the job's agents now listen on port {policy.agent_port}"
    )
    return Reason.AGENT_NOT_ANSWERING, why


def _cannot_run_again(
    pod: ObservedPod, agent: ObservedAgent, node: ObservedNode | None, now: datetime, grace: timedelta
) -> bool:
    """Whether the pod can never run again. A node may be missing from the cache because it is new: then the agent must be silent too."""
    if pod.ended:
        return True
    if not pod.node:
        return False
    return is_silent(agent, now) if node is None else _unattended(node, now, grace)


def _unattended(node: ObservedNode | None, now: datetime, grace: timedelta) -> bool:
    """Whether the node's kubelet is not expected back. Pods of deleted nodes are removed by the garbage collector."""
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
        # The agent gets SIGTERM before the watch shows the deletion.
        cause, what = Reason.POD_TERMINATING, "was told to end (SIGTERM)"
    else:
        return None
    if node is not None and node.cordoned:
        return Reason.NODE_DRAINED, f"pod {pod.name} {what}; its node {node.name} is cordoned"
    return cause, f"pod {pod.name} {what}"
