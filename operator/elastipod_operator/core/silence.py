"""What it means when an agent does not answer: silence alone does not prove a loss."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from .reasons import NO_REASON, AnyReason, Reason
from .snapshot import AgentState, ObservedAgent, ObservedNode, ObservedPod

# Slightly below 5 s, so that three heartbeats and the time of the calls take at most 15 s.
HEARTBEAT = timedelta(seconds=4.5)
SILENCE_LIMIT = 3 * HEARTBEAT
# Agents that fall silent at the same moment gave their last answers within one heartbeat of each other.
CUT_OFF_SPREAD = 1.5 * HEARTBEAT
# Workers stall when they make no step for STALL_FACTOR times the usual step time, but not before STALL_LIMIT: a step becomes
# known with the next answer of an agent, up to one heartbeat later.
STALL_LIMIT = 1.3 * HEARTBEAT
STALL_FACTOR = 4
# How long a report of other agents about a silent one is valid; they are asked repeatedly while it is silent.
PEER_REPORT_LIFETIME = SILENCE_LIMIT
# When an undecided pod counts as lost: if the other workers have ended, and if the job may still be training.
ENDED_LIMIT = timedelta(minutes=5)
UNDECIDED_LIMIT = timedelta(minutes=30)

# Causes of a loss.
NODE_LOST, AGENT_ENDED, AGENT_SILENT = Reason.NODE_LOST, Reason.AGENT_ENDED, Reason.AGENT_SILENT


@dataclass(frozen=True, slots=True)
class PeerReports:
    """What the other agents report. members: the members of the generation that answer at present.

    all_silent: every agent is silent, apart from those on nodes that are not ready; then the operator suspects its own
    connection and waits. heard_at: the newest answer of any agent.
    """

    members: list[ObservedAgent]
    all_silent: bool
    heard_at: datetime | None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the silence of an agent means. cause: why the pod is lost; NO_REASON while no loss is proven.

    presumed_lost_at: when the pod counts as lost if no other fact decides before; None while the job trains without its answers.
    """

    cause: AnyReason
    detail: str
    presumed_lost_at: datetime | None = None


def is_silent(agent: ObservedAgent, now: datetime) -> bool:
    """Whether an agent that has answered before has not answered for too long."""
    return agent.last_answer is not None and now - agent.last_answer >= SILENCE_LIMIT


def is_answering(agent: ObservedAgent, now: datetime) -> bool:
    """Whether an agent answers at present."""
    return agent.state is not None and not is_silent(agent, now)


def diagnose(
    pod: ObservedPod,
    agent: ObservedAgent,
    node: ObservedNode | None,
    peers: PeerReports,
    now: datetime,
    *,
    is_member: bool,
    awaits_start: bool,
) -> Diagnosis:
    """Say what the silence of a replica's agent means. awaits_start: it is not known to run the generation that others have begun.

    The node decides first: if it is not ready, it explains the silence. The port is next: a refused connection means that the
    agent has ended. Then the other agents decide: their workers failed, or they cannot reach the agent either. As long as steps
    are made, no member is lost and only the operator cannot see it. A pod that is not a member is replaced without proof.
    """
    assert agent.last_answer is not None
    name = f"the agent of pod {pod.name}"
    is_cut_off = peers.all_silent or _fell_silent_together(agent, peers)
    if node is not None and not node.ready:
        return Diagnosis(NODE_LOST, f"node {node.name} is not ready and {name} is silent")
    # For a new operator that is cut off, the refusal may come from a firewall.
    if agent.connection_refused and (agent.state is not None or not is_cut_off):
        what = "has ended although its container runs: nothing listens on its port"
        return Diagnosis(AGENT_ENDED, f"{name} {what}; the container's command must not outlive hyperpodrun")
    where = f"{name} on node {pod.node} is silent"
    if is_cut_off:
        why = "no agent of the job answers the operator, although nodes and containers look healthy"
        return _undecided(agent, where, why, UNDECIDED_LIMIT, now)
    if not is_member:
        return Diagnosis(NODE_LOST, f"{where} and other agents answer")
    return _diagnose_from_peers(agent, where, peers.members, now, awaits_start=awaits_start)


def _fell_silent_together(agent: ObservedAgent, peers: PeerReports) -> bool:
    """Whether other agents fell silent at the same moment, even if not all of them count as silent yet."""
    assert agent.last_answer is not None
    return peers.heard_at is None or peers.heard_at - agent.last_answer < CUT_OFF_SPREAD


def _diagnose_from_peers(
    agent: ObservedAgent, where: str, members: list[ObservedAgent], now: datetime, *, awaits_start: bool
) -> Diagnosis:
    """Decide from the members that answer whether a silent one is lost."""
    states = {a.state for a in members}
    if AgentState.FAULTED in states:
        return Diagnosis(NODE_LOST, f"{where} and the workers of others failed")
    busy = [a for a in members if a.state in (AgentState.RUNNING, AgentState.STOPPING)]
    # Workers that save a checkpoint make no steps.
    if busy and (any(a.saving for a in busy) or _steps_go_on(busy, now)):
        return Diagnosis(NO_REASON, f"{where}; training continues")
    if not busy and states & {AgentState.READY, AgentState.INIT}:
        return Diagnosis(NODE_LOST, f"{where} and the workers of others have ended")
    is_reached = _reached_by_peers(agent, now)
    if is_reached is False:
        return Diagnosis(NODE_LOST, f"{where} and other agents cannot reach it either")
    if busy and is_reached and awaits_start:
        why = "other agents reach it, but the operator cannot tell it to start its workers"
        return _undecided(agent, where, why, UNDECIDED_LIMIT, now)
    if busy and is_reached:
        return Diagnosis(NO_REASON, f"{where} to the operator, but other agents reach it")
    if busy or not members:
        why = "no other agent knows whether it can be reached" if busy else "no other member answers"
        return _undecided(agent, where, why, UNDECIDED_LIMIT, now)
    return _undecided(agent, where, "it is not known whether its workers finished as the others did", ENDED_LIMIT, now)


def _undecided(agent: ObservedAgent, where: str, why: str, limit: timedelta, now: datetime) -> Diagnosis:
    assert agent.last_answer is not None
    until = agent.last_answer + limit
    if now < until:
        return Diagnosis(NO_REASON, f"{where}; {why}", until)
    return Diagnosis(AGENT_SILENT, f"{where} for {limit.total_seconds():g} s; {why}")


def _reached_by_peers(agent: ObservedAgent, now: datetime) -> bool | None:
    """Whether other agents reach a silent one; None when no recent report exists."""
    asked_at = agent.peers_asked_at
    return agent.is_reached if asked_at is not None and now - asked_at < PEER_REPORT_LIFETIME else None


def _steps_go_on(busy: list[ObservedAgent], now: datetime) -> bool:
    """Whether the newest step is not much older than workers usually need for one.

    A stall must be shown by a later answer: agents that no longer answer show nothing.
    """
    newest = max((a.step_at for a in busy if a.step_at is not None), default=None)
    heard_at = max((a.last_answer for a in busy if a.last_answer is not None), default=None)
    if newest is None or heard_at is None:
        return False
    if heard_at - newest < HEARTBEAT / 2:
        return True
    usual = max((a.step_pace for a in busy if a.step_pace is not None), default=timedelta(0))
    return now - newest < max(STALL_LIMIT, STALL_FACTOR * usual)
