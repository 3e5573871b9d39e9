"""What a call may do, given where the agent is and which generation the call names (docs/design/contracts.md, 3).

A generation is one run of the workers and only grows. A call that names an older one comes from the past (a delayed
packet, an operator that lost its lease) and must change nothing; one that names the present one is a repetition.
Calls without a generation come from an operator that speaks the plain protocol and are judged by the state alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from elastipod_agent.core.states import AgentState


class CallVerdict(Enum):
    """What becomes of a call."""

    ACT = "act"
    NOTHING = "nothing"  # answered 200; done already, or nothing to do
    REFUSE = "refuse"  # answered 409 with the status as body


@dataclass(frozen=True, slots=True)
class CallDecision:
    """A verdict and, for the log, why."""

    verdict: CallVerdict
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceState:
    """The agent as far as fences care.

    generation: last one started here, 0 before the first. newest_stopped: the newest generation that was stopped here, which
    may never have been started here: a /start that its /stop overtook on the way must not run. draining: a graceful
    stop is under way. terminating: SIGTERM came.
    """

    state: AgentState
    generation: int = 0
    newest_stopped: int = 0
    draining: bool = False
    terminating: bool = False


ACT = CallDecision(CallVerdict.ACT)
_S = AgentState


def decide_start(current: FenceState, generation: int | None) -> CallDecision:
    """Judge a /start. Only a READY agent starts workers; the operator stops the others first.

    In the plain protocol a /start anywhere else is a repetition, whose first answer was lost: taken, and nothing happens.
    """
    if generation is not None:
        if generation < current.generation:
            return CallDecision(CallVerdict.REFUSE, f"generation {generation} is older than {current.generation}")
        if generation == current.generation:
            return CallDecision(CallVerdict.NOTHING, f"generation {generation} was started before")
        if generation <= current.newest_stopped:
            return CallDecision(CallVerdict.NOTHING, f"generation {generation} was stopped before it was started here")
    if current.terminating:
        return CallDecision(CallVerdict.REFUSE, "the pod is being terminated")
    if current.state is not _S.READY:
        is_plain = generation is None and current.state is not _S.SHUTDOWN
        verdict = CallVerdict.NOTHING if is_plain else CallVerdict.REFUSE
        return CallDecision(verdict, f"the agent is {current.state}; only a ready one starts workers")
    return ACT


def decide_stop(current: FenceState, generation: int | None, *, is_graceful: bool) -> CallDecision:
    """Judge a /stop. A hard stop ends a drain that is under way, any other repetition changes nothing."""
    if generation is not None and generation < current.generation:
        return CallDecision(CallVerdict.REFUSE, f"generation {generation} is older than {current.generation}")
    if current.state is _S.STOPPING:
        if current.draining and not is_graceful:
            return ACT
        return CallDecision(CallVerdict.NOTHING, "the workers are being stopped already")
    if current.state in (_S.RUNNING, _S.FAULTED, _S.COMPLETED):
        return ACT
    return CallDecision(CallVerdict.NOTHING, f"the agent is {current.state}; there is nothing to stop")


def decide_update(current: FenceState, generation: int | None) -> CallDecision:
    """Judge an /update: facts about the job, which set the same things however often they come."""
    if generation is not None and generation < current.generation:
        return CallDecision(CallVerdict.REFUSE, f"generation {generation} is older than {current.generation}")
    if current.state is _S.SHUTDOWN:
        return CallDecision(CallVerdict.REFUSE, "the agent is leaving")
    return ACT
