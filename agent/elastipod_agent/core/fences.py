"""Whether a call is carried out, given the agent's state and the generation that the call names (docs/design/contracts.md, 3).

The generation only grows. A call that names an older one is out of date (a delayed packet, an operator that lost its lease) and must
change nothing; one that names the current one is a repetition. Calls without a generation come from an operator that speaks the plain
protocol; the state alone decides about them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from elastipod_agent.core.states import AgentState


class CallVerdict(Enum):
    """What the agent does with a call."""

    ACT = "act"
    NOTHING = "nothing"  # answered 200; it is done already, or there is nothing to do
    REFUSE = "refuse"  # answered 409 with the status as body


@dataclass(frozen=True, slots=True)
class CallDecision:
    """The verdict, with the reason for the log."""

    verdict: CallVerdict
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceState:
    """What the fences need to know about the agent.

    generation: the last one started in this pod, 0 before the first. newest_stopped: the newest one stopped in this pod. It may never
    have started: a /start that arrives after its own /stop must not run. draining: a graceful stop is under way. terminating: SIGTERM
    was received.
    """

    state: AgentState
    generation: int = 0
    newest_stopped: int = 0
    draining: bool = False
    terminating: bool = False


ACT = CallDecision(CallVerdict.ACT)
_S = AgentState


def decide_start(current: FenceState, generation: int | None) -> CallDecision:
    """Decide about a /start. Only a READY agent starts workers; in other states the operator stops the workers first.

    In the plain protocol a /start in another state is a repetition whose first answer was lost: it is accepted and changes nothing.
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


def decide_prepare(current: FenceState, generation: int | None, *, has_workers: bool) -> CallDecision:
    """Decide about a /prepare, which starts workers ahead of the next generation. has_workers: some wait for it already."""
    if generation is not None and generation < current.generation:
        return CallDecision(CallVerdict.REFUSE, f"generation {generation} is older than {current.generation}")
    if current.terminating:
        return CallDecision(CallVerdict.REFUSE, "the pod is being terminated")
    if current.state is not _S.READY:
        return CallDecision(CallVerdict.REFUSE, f"the agent is {current.state}; only a ready one prepares workers")
    if has_workers:
        return CallDecision(CallVerdict.NOTHING, "workers wait for the next generation already")
    return ACT


def decide_stop(current: FenceState, generation: int | None, *, is_graceful: bool) -> CallDecision:
    """Decide about a /stop. A hard stop ends a drain that is under way; any other repetition changes nothing."""
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
    """Decide about an /update: facts about the job, which may be repeated."""
    if generation is not None and generation < current.generation:
        return CallDecision(CallVerdict.REFUSE, f"generation {generation} is older than {current.generation}")
    if current.state is _S.SHUTDOWN:
        return CallDecision(CallVerdict.REFUSE, "the agent is leaving")
    return ACT
