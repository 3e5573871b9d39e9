"""What it means that an agent does not answer: silence alone is not death (decision 5)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from .facts import AgentFact, AgentState, NodeFact, PodFact

# A little under 5 s, so that three of them and the time of the calls make 15 s at most (decision 5).
HEARTBEAT = timedelta(seconds=4.5)
SILENCE_LIMIT = 3 * HEARTBEAT
# Agents that all fall silent at one moment gave their last answers within a heartbeat of each other.
CUT_OFF_SPREAD = 1.5 * HEARTBEAT
# Workers that make no step for so many times the usual time of one stand still; but
# steps become known with an agent's next answer, at most a heartbeat later: longer than that without one is a standstill.
STALL_LIMIT = 1.3 * HEARTBEAT
STALL_FACTOR = 4

# Causes of a loss.
NODE_LOST, AGENT_ENDED = "NodeLost", "AgentEnded"


@dataclass(frozen=True, slots=True)
class Witnesses:
    """What the other agents tell. members: those of the generation's members that answer at present.

    all_silent: every agent that should answer is silent; then the operator suspects itself and waits (decision 5).
    heard_at: the newest answer of any agent.
    """

    members: list[AgentFact]
    all_silent: bool
    heard_at: datetime | None


def is_silent(agent: AgentFact, now: datetime) -> bool:
    """Whether an agent that answered before has not done so for too long."""
    return agent.last_answer is not None and now - agent.last_answer >= SILENCE_LIMIT


def does_answer(agent: AgentFact, now: datetime) -> bool:
    """Whether an agent answers at present."""
    return agent.state is not None and not is_silent(agent, now)


def find_evidence(
    pod: PodFact, agent: AgentFact, node: NodeFact | None, witnesses: Witnesses, now: datetime, *, is_member: bool
) -> tuple[str, str] | None:
    """Give cause and sentence of what besides silence tells that a replica is dead; None when nothing does (decision 5).

    Its node not being ready; a connection that is refused; other members whose collective broke, or who stand still: a job
    whose steps go on has not lost a member, only our sight of it. Who never trained needs no such proof: it is replaced
    without harm.
    """
    assert agent.last_answer is not None
    assert witnesses.heard_at is not None
    name = pod.name
    is_cut_off = witnesses.all_silent or witnesses.heard_at - agent.last_answer < CUT_OFF_SPREAD
    if node is not None and not node.ready and not is_cut_off:
        return NODE_LOST, f"node {node.name} is not ready and the agent of pod {name} is silent"
    # The pod's own network refuses it; but a firewall that refuses may stand between a new operator and everybody.
    if agent.refused and (node is None or node.ready) and (agent.state is not None or not is_cut_off):
        return AGENT_ENDED, (
            f"the agent of pod {name} has ended though its container runs: nobody listens on its port any more; its command must "
            "not outlive hyperpodrun"
        )
    if is_cut_off:
        return None  # the agents fell silent together, though not all of them for long enough yet
    if not is_member:
        return NODE_LOST, f"the agent of pod {name} on node {pod.node} is silent and other agents answer"
    what = _what_others_show(witnesses.members, now)
    return (NODE_LOST, f"the agent of pod {name} on node {pod.node} is silent and {what}") if what else None


def _what_others_show(members: list[AgentFact], now: datetime) -> str:
    """Say what the other members show of the loss of one; empty when they show nothing."""
    states = {a.state for a in members}
    if AgentState.FAULTED in states:
        return "the workers of others failed"
    busy = [a for a in members if a.state in (AgentState.RUNNING, AgentState.STOPPING)]
    if busy:
        # Who saves makes no steps, however long it takes.
        stalled = not any(a.saving for a in busy) and _stalled(busy, now)
        return "the others make no step" if stalled else ""
    return "the workers of others have ended" if states & {AgentState.READY, AgentState.INIT} else ""


def _stalled(busy: list[AgentFact], now: datetime) -> bool:
    """Whether workers that report steps made none for longer than an answer takes, and much longer than they usually need.

    A later answer must show so: of agents that say nothing any more it is not known whether they go on.
    """
    newest = max((a.step_at for a in busy if a.step_at is not None), default=None)
    heard_at = max((a.last_answer for a in busy if a.last_answer is not None), default=None)
    if newest is None or heard_at is None or heard_at - newest < HEARTBEAT / 2:
        return False
    usual = max((a.step_pace for a in busy if a.step_pace is not None), default=timedelta(0))
    return now - newest >= max(STALL_LIMIT, STALL_FACTOR * usual)
