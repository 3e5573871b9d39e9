"""What calls may do: tables over state and generation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.nonempty import every

from elastipod_agent.core.fences import (
    CallVerdict,
    FenceState,
    decide_prepare,
    decide_start,
    decide_stop,
    decide_update,
)
from elastipod_agent.core.states import AgentState as S

ACT, NOTHING, REFUSE = CallVerdict.ACT, CallVerdict.NOTHING, CallVerdict.REFUSE
PRESENT = 5


def at(state: S, *, newest_stopped: int = 0, draining: bool = False, terminating: bool = False) -> FenceState:
    return FenceState(
        state=state, generation=PRESENT, newest_stopped=newest_stopped, draining=draining, terminating=terminating
    )


@pytest.mark.parametrize(
    ("current", "generation", "verdict"),
    [
        pytest.param(at(S.READY), 6, ACT, id="a ready agent starts the next generation"),
        pytest.param(at(S.READY), 60, ACT, id="generations may be skipped"),
        pytest.param(at(S.READY), None, ACT, id="the plain protocol starts when ready"),
        pytest.param(at(S.READY), 5, NOTHING, id="a generation runs once"),
        pytest.param(at(S.RUNNING), 5, NOTHING, id="the running generation again"),
        pytest.param(at(S.COMPLETED), 5, NOTHING, id="the completed generation again"),
        pytest.param(at(S.FAULTED), 5, NOTHING, id="the faulted generation again"),
        pytest.param(at(S.READY), 4, REFUSE, id="an older generation"),
        pytest.param(at(S.RUNNING), 4, REFUSE, id="an older generation while running"),
        pytest.param(at(S.RUNNING), 6, REFUSE, id="running workers are stopped first"),
        pytest.param(at(S.STOPPING), 6, REFUSE, id="stopping is not ready"),
        pytest.param(at(S.FAULTED), 6, REFUSE, id="a faulted agent is stopped first"),
        pytest.param(at(S.COMPLETED), 6, REFUSE, id="a completed agent is stopped first"),
        pytest.param(at(S.RUNNING), None, NOTHING, id="the plain protocol does not start twice"),
        pytest.param(at(S.FAULTED), None, NOTHING, id="a plain start whose workers have failed already"),
        pytest.param(at(S.STOPPING), None, NOTHING, id="a plain start while stopping"),
        pytest.param(at(S.RUNNING, terminating=True), None, REFUSE, id="a plain start of a pod that goes"),
        pytest.param(at(S.SHUTDOWN), None, REFUSE, id="a plain start of an agent that leaves"),
        pytest.param(at(S.READY, newest_stopped=6), 6, NOTHING, id="a start that its stop overtook"),
        pytest.param(at(S.READY, newest_stopped=6), 7, ACT, id="the generation after a stopped one"),
        pytest.param(at(S.READY, terminating=True), 6, REFUSE, id="a pod that goes takes no work"),
        pytest.param(at(S.SHUTDOWN), 6, REFUSE, id="an agent that leaves takes no work"),
    ],
)
def test_start(current: FenceState, generation: int | None, verdict: CallVerdict) -> None:
    assert decide_start(current, generation).verdict is verdict


@pytest.mark.parametrize(
    ("current", "generation", "has_workers", "verdict"),
    [
        pytest.param(at(S.READY), 5, False, ACT, id="ready, the present generation"),
        pytest.param(at(S.READY), 7, False, ACT, id="ready, a newer generation that runs elsewhere"),
        pytest.param(at(S.READY), None, False, ACT, id="no generation"),
        pytest.param(at(S.READY, newest_stopped=6), 6, False, ACT, id="a stop bars no workers that have no generation"),
        pytest.param(at(S.READY), 5, True, NOTHING, id="they are there"),
        pytest.param(at(S.READY), 4, False, REFUSE, id="late"),
        pytest.param(at(S.READY, terminating=True), 5, False, REFUSE, id="the pod ends"),
        pytest.param(at(S.INIT), 5, False, REFUSE, id="it begins"),
        pytest.param(at(S.RUNNING), 5, False, REFUSE, id="it trains"),
        pytest.param(at(S.STOPPING), 5, False, REFUSE, id="it stops"),
        pytest.param(at(S.FAULTED), 5, False, REFUSE, id="its workers failed"),
        pytest.param(at(S.SHUTDOWN), 5, False, REFUSE, id="it leaves"),
    ],
)
def test_prepare(current: FenceState, generation: int | None, has_workers: bool, verdict: CallVerdict) -> None:
    decision = decide_prepare(current, generation, has_workers=has_workers)
    assert decision.verdict is verdict
    assert bool(decision.why) is (verdict is not ACT)


@pytest.mark.parametrize(
    ("current", "generation", "is_graceful", "verdict"),
    [
        pytest.param(at(S.RUNNING), 5, True, ACT, id="drain"),
        pytest.param(at(S.RUNNING), None, False, ACT, id="plain hard stop"),
        pytest.param(at(S.RUNNING), 6, True, ACT, id="a generation that never came here ends what runs"),
        pytest.param(at(S.RUNNING), 4, False, REFUSE, id="an older stop"),
        pytest.param(at(S.FAULTED), 5, False, ACT, id="a faulted agent becomes ready"),
        pytest.param(at(S.COMPLETED), 5, False, ACT, id="a completed agent becomes ready"),
        pytest.param(at(S.READY), 5, True, NOTHING, id="nothing runs"),
        pytest.param(at(S.INIT), None, True, NOTHING, id="nothing ever ran"),
        pytest.param(at(S.STOPPING, draining=True), 5, True, NOTHING, id="the same drain again"),
        pytest.param(at(S.STOPPING), 5, False, NOTHING, id="the same hard stop again"),
        pytest.param(at(S.STOPPING), 5, True, NOTHING, id="a drain does not soften a hard stop"),
        pytest.param(at(S.STOPPING, draining=True), 5, False, ACT, id="a hard stop ends a drain"),
    ],
)
def test_stop(current: FenceState, generation: int | None, is_graceful: bool, verdict: CallVerdict) -> None:
    decision = decide_stop(current, generation, is_graceful=is_graceful)
    assert decision.verdict is verdict
    assert bool(decision.why) is (verdict is not ACT)


@pytest.mark.parametrize(
    ("state", "generation", "verdict"),
    [
        pytest.param(S.RUNNING, 5, ACT, id="the present generation"),
        pytest.param(S.RUNNING, None, ACT, id="the plain protocol"),
        pytest.param(S.READY, 6, ACT, id="what comes next"),
        pytest.param(S.RUNNING, 4, REFUSE, id="an older one"),
        pytest.param(S.SHUTDOWN, 5, REFUSE, id="on the way out"),
    ],
)
def test_update(state: S, generation: int | None, verdict: CallVerdict) -> None:
    assert decide_update(at(state), generation).verdict is verdict


@given(
    state=st.sampled_from(list(S)), draining=st.booleans(), graceful=st.booleans(), older=st.integers(1, PRESENT - 1)
)
def test_a_call_from_the_past_never_acts(state: S, draining: bool, graceful: bool, older: int) -> None:
    current = at(state, draining=draining)
    answers = (
        decide_start(current, older),
        decide_stop(current, older, is_graceful=graceful),
        decide_update(current, older),
    )
    assert every(answer.verdict is REFUSE and answer.why for answer in answers)
