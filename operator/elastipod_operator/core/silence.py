"""What it means that an agent does not answer: silence alone is not death."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from .reasons import NO_REASON, AnyReason, Reason
from .snapshot import AgentState, ObservedAgent, ObservedNode, ObservedPod

# A little under 5 s, so that three of them and the time of the calls make 15 s at most.
HEARTBEAT = timedelta(seconds=4.5)
SILENCE_LIMIT = 3 * HEARTBEAT
# Agents that all fall silent at one moment gave their last answers within a heartbeat of each other.
CUT_OFF_SPREAD = 1.5 * HEARTBEAT
# Workers that make no step for so many times the usual time of one may stand still; but
# steps become known with an agent's next answer, at most a heartbeat later: longer than that without one is a standstill.
STALL_LIMIT = 1.3 * HEARTBEAT
STALL_FACTOR = 4
# What other agents said of a silent one counts so long; while it is silent they are asked again and again.
PEER_REPORT_LIFETIME = SILENCE_LIMIT
# What nothing can decide is decided by these: where the others have ended, and where the job may well be at work.
ENDED_LIMIT = timedelta(minutes=5)
UNDECIDED_LIMIT = timedelta(minutes=30)

# Causes of a loss.
NODE_LOST, AGENT_ENDED, AGENT_SILENT = Reason.NODE_LOST, Reason.AGENT_ENDED, Reason.AGENT_SILENT


@dataclass(frozen=True, slots=True)
class PeerReports:
    """What the other agents tell. members: those of the generation's members that answer at present.

    all_silent: every agent that should answer is silent, but for those whose nodes explain it; then the operator suspects
    itself and waits. heard_at: the newest answer of any agent.
    """

    members: list[ObservedAgent]
    all_silent: bool
    heard_at: datetime | None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the silence of an agent means. cause: of its loss; empty while nothing proves one.

    until: when silence itself decides, because nothing else can; None where the job goes on without the agent's answers.
    """

    cause: AnyReason
    detail: str
    presumed_lost_at: datetime | None = None


def is_silent(agent: ObservedAgent, now: datetime) -> bool:
    """Whether an agent that answered before has not done so for too long."""
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
) -> Diagnosis:
    """Say what the silence of a replica's agent means.

    Its node decides first: one that is not ready explains silence, also of all. Then its port: a connection that is refused
    tells that nobody listens. Then the other agents: a broken collective, or that they cannot reach it either. A job whose
    steps go on has not lost a member: only the operator cannot see it. One that never trained is replaced without proof.
    """
    assert agent.last_answer is not None
    name = f"the agent of pod {pod.name}"
    is_cut_off = peers.all_silent or _fell_silent_together(agent, peers)
    if node is not None and not node.ready:
        return Diagnosis(NODE_LOST, f"node {node.name} is not ready and {name} is silent")
    # A firewall that refuses may stand between a new operator and everybody.
    if agent.connection_refused and (agent.state is not None or not is_cut_off):
        what = "has ended though its container runs: nobody listens on its port any more"
        return Diagnosis(AGENT_ENDED, f"{name} {what}; its command must not outlive hyperpodrun")
    where = f"{name} on node {pod.node} is silent"
    if is_cut_off:
        why = "no agent of the job answers the operator, while nodes and containers look healthy"
        return _undecided(agent, where, why, UNDECIDED_LIMIT, now)
    if not is_member:
        return Diagnosis(NODE_LOST, f"{where} and other agents answer")
    return _diagnose_from_peers(agent, where, peers.members, now)


def _fell_silent_together(agent: ObservedAgent, peers: PeerReports) -> bool:
    """Whether others fell silent with it, though not all of them for long enough yet."""
    assert agent.last_answer is not None
    return peers.heard_at is None or peers.heard_at - agent.last_answer < CUT_OFF_SPREAD


def _diagnose_from_peers(agent: ObservedAgent, where: str, members: list[ObservedAgent], now: datetime) -> Diagnosis:
    """Say what the members that answer show of the loss of one that does not."""
    states = {a.state for a in members}
    if AgentState.FAULTED in states:
        return Diagnosis(NODE_LOST, f"{where} and the workers of others failed")
    busy = [a for a in members if a.state in (AgentState.RUNNING, AgentState.STOPPING)]
    # Who saves makes no steps, however long it takes.
    if busy and (any(a.saving for a in busy) or _steps_go_on(busy, now)):
        return Diagnosis(NO_REASON, f"{where}; training goes on")
    if not busy and states & {AgentState.READY, AgentState.INIT}:
        return Diagnosis(NODE_LOST, f"{where} and the workers of others have ended")
    is_reached = _reached_by_peers(agent, now)
    if is_reached is False:
        return Diagnosis(NODE_LOST, f"{where} and other agents cannot reach it either")
    if busy and is_reached:
        return Diagnosis(NO_REASON, f"{where} to the operator, but other agents reach it")
    if busy or not members:
        why = "no other agent tells whether it reaches it" if busy else "no other member answers"
        return _undecided(agent, where, why, UNDECIDED_LIMIT, now)
    return _undecided(agent, where, "nothing tells whether its workers finished as others did", ENDED_LIMIT, now)


def _undecided(agent: ObservedAgent, where: str, why: str, limit: timedelta, now: datetime) -> Diagnosis:
    assert agent.last_answer is not None
    until = agent.last_answer + limit
    if now < until:
        return Diagnosis(NO_REASON, f"{where}; {why}", until)
    return Diagnosis(AGENT_SILENT, f"{where} for {limit.total_seconds():g} s; {why}")


def _reached_by_peers(agent: ObservedAgent, now: datetime) -> bool | None:
    """Whether other agents reach one that is silent; None where none of them can tell at present."""
    asked_at = agent.peers_asked_at
    return agent.is_reached if asked_at is not None and now - asked_at < PEER_REPORT_LIFETIME else None


def _steps_go_on(busy: list[ObservedAgent], now: datetime) -> bool:
    """Whether workers that report steps made one not much longer ago than they usually need.

    That they stand still must be shown by a later answer: of agents that say nothing any more it is not known.
    """
    newest = max((a.step_at for a in busy if a.step_at is not None), default=None)
    heard_at = max((a.last_answer for a in busy if a.last_answer is not None), default=None)
    if newest is None or heard_at is None:
        return False
    if heard_at - newest < HEARTBEAT / 2:
        return True
    usual = max((a.step_pace for a in busy if a.step_pace is not None), default=timedelta(0))
    return now - newest < max(STALL_LIMIT, STALL_FACTOR * usual)
