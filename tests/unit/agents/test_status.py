"""What is made of an agent's answer: ours, one of another make, and nonsense."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastipod_operator.agents.status import (
    MAX_MESSAGE,
    MAX_PROGRESS_BYTES,
    MAX_REASON,
    MAX_TRACEBACK,
    InvalidStatus,
    parse_status,
)
from elastipod_operator.core.silence import SILENCE_LIMIT
from elastipod_operator.core.snapshot import AgentState, Failure, ObservedAgent, Preparation

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
OURS: dict[str, Any] = {
    "status": "running", "reason": None, "message": None, "protocol": 1, "version": 7, "generation": 3, "drained": False,
    "terminating": True, "saving": True, "unanswered": True,
    "boot_id": "b", "failure": None, "worker": {"step": 5}, "progress": {"ckpt": {"progressCount": 4}},
}  # fmt: skip


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


def test_an_agent_of_ours_tells_everything() -> None:
    answer = parse_status(OURS, ObservedAgent(trying_since=NOW - seconds(9)), NOW)
    fact = answer.fact
    assert (fact.state, fact.generation, fact.terminating, fact.step, fact.step_at) == (
        AgentState.RUNNING,
        3,
        True,
        5,
        NOW,
    )
    assert (fact.last_answer, fact.trying_since, fact.answering_since) == (NOW, NOW - seconds(9), NOW)
    assert (fact.saving, fact.no_drain_handler, fact.warming) == (True, True, False)
    assert (answer.version, json.loads(answer.progress)) == (7, {"ckpt": {"progressCount": 4}})


def test_the_gap_comes_with_the_steps_that_were_made_again() -> None:
    known = parse_status(OURS | {"gap_s": 1.5, "steps_repeated": 13}, ObservedAgent(), NOW).fact
    assert (known.gap, known.steps_repeated) == (seconds(1.5), 13)
    earlier = parse_status(OURS | {"gap_s": 1.5}, ObservedAgent(), NOW).fact
    assert (earlier.gap, earlier.steps_repeated) == (seconds(1.5), 0), "an agent of an earlier version"
    with pytest.raises(InvalidStatus, match="steps_repeated"):
        parse_status(OURS | {"steps_repeated": -1}, ObservedAgent(), NOW)


@pytest.mark.parametrize("drained", [True, False])
def test_workers_that_left_at_a_checkpoint_are_told_from_others(drained: bool) -> None:
    fact = parse_status(OURS | {"status": "ready", "drained": drained}, ObservedAgent(), NOW).fact
    assert (fact.state, fact.drained) == (AgentState.READY, drained)


def test_an_agent_of_another_make_does_not_tell_its_generation() -> None:
    answer = parse_status({"status": "faulted", "generation": "x", "version": 4, "drained": True}, ObservedAgent(), NOW)
    assert (answer.fact.state, answer.fact.generation, answer.version) == (AgentState.FAULTED, None, None)
    assert not answer.fact.drained, "a name of ours may mean something else there"


@pytest.mark.parametrize("state", [s.value for s in AgentState])
def test_every_state_is_understood(state: str) -> None:
    assert parse_status({"status": state}, ObservedAgent(), NOW).fact.state == state


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        pytest.param(None, None, id="none"),
        pytest.param(
            {"global_rank": 2, "exitcode": 1, "signal": None, "message": "m"}, Failure(2, 1, "", "m"), id="an exit code"
        ),
        pytest.param(
            {"global_rank": 2, "exitcode": None, "signal": "SIGKILL"}, Failure(2, None, "SIGKILL", ""), id="a signal"
        ),
        pytest.param(
            {"signal": 9, "global_rank": None}, Failure(-1, None, "9", ""), id="a signal as a number, no rank"
        ),
    ],
)
def test_a_failure(failure: dict[str, Any] | None, expected: Failure | None) -> None:
    assert parse_status({**OURS, "failure": failure}, ObservedAgent(), NOW).fact.failure == expected


def test_a_new_step_is_dated_and_an_old_one_keeps_its_time() -> None:
    first = parse_status(OURS, ObservedAgent(), NOW).fact
    same = parse_status(OURS, first, NOW + seconds(5)).fact
    assert (same.step_at, same.step_pace) == (NOW, None)
    later = parse_status({**OURS, "worker": {"step": 7, "total_steps": 9}}, same, NOW + seconds(10)).fact
    assert (first.total_steps, later.total_steps) == (None, 9)
    assert (later.step, later.step_at, later.step_pace) == (7, NOW + seconds(10), seconds(5))
    assert parse_status({**OURS, "worker": None}, later, NOW + seconds(11)).fact.step is None


def test_a_heartbeat_with_one_step_before_a_standstill_is_hardly_taken_for_the_time_of_a_step() -> None:
    """Otherwise the standstill counts as slow steps, and a node without power as one where training goes on."""
    told, now = ObservedAgent(), NOW
    paces = []
    for step, after in ((100, 0.0), (110, 2.0), (111, 4.5), (112, 4.5), (113, 4.5), (133, 4.0)):
        now += seconds(after)
        told = parse_status({**OURS, "worker": {"step": step}}, told, now).fact
        paces.append(told.step_pace)
    expected = (0.2, 1, 2, 4, 0.2)
    assert paces == [None, *map(seconds, expected)], "slow steps are believed little by little, quick ones at once"


def test_an_agent_that_comes_back_from_silence_answers_anew() -> None:
    first = parse_status(OURS, ObservedAgent(), NOW).fact
    back = NOW + SILENCE_LIMIT
    assert parse_status(OURS, first, back - seconds(0.1)).fact.answering_since == NOW
    assert parse_status(OURS, first, back).fact.answering_since == back


@pytest.mark.parametrize(
    ("before", "after", "is_anew"),
    [
        pytest.param({"status": "stopping"}, {"status": "stopping"}, False, id="it was told to stop, and still stops"),
        pytest.param({"status": "running"}, {"status": "stopping"}, True, id="it may have been told a moment ago"),
        pytest.param({"status": "stopping"}, {"status": "stopping", "generation": 4}, True, id="other workers"),
        pytest.param({"status": "stopping"}, {"status": "running"}, True, id="new workers"),
    ],
)
def test_an_agent_that_falls_silent_while_it_stops_gets_no_more_time(
    before: dict[str, Any], after: dict[str, Any], is_anew: bool
) -> None:
    first = parse_status(OURS | before, ObservedAgent(), NOW).fact
    back = parse_status(OURS | after, first, NOW + SILENCE_LIMIT).fact
    assert back.answering_since == (NOW + SILENCE_LIMIT if is_anew else NOW)


def test_texts_are_cut() -> None:
    long = "x" * MAX_TRACEBACK + "the last line"
    failure = {"message": long, "signal": long}
    fact = parse_status({**OURS, "reason": long, "message": long, "failure": failure}, ObservedAgent(), NOW).fact
    assert fact.failure is not None
    assert (len(fact.reason), len(fact.message), len(fact.failure.signal)) == (MAX_REASON, MAX_MESSAGE, MAX_REASON)
    assert len(fact.failure.message) == MAX_TRACEBACK
    assert fact.failure.message.endswith("the last line")


def test_progress_that_is_too_large_to_be_handed_on_is_left_out() -> None:
    assert parse_status({**OURS, "progress": {"a": "x" * MAX_PROGRESS_BYTES}}, ObservedAgent(), NOW).progress == ""


@pytest.mark.parametrize(
    ("body", "word"),
    [
        pytest.param(None, "body", id="null"),
        pytest.param([1], "body", id="a list"),
        pytest.param({}, "status", id="no status"),
        pytest.param({"status": "dancing"}, "status", id="a state that is none"),
        pytest.param({**OURS, "generation": "many"}, "generation", id="a generation that is no number"),
        pytest.param({**OURS, "generation": -1}, "generation", id="a generation below zero"),
        pytest.param({**OURS, "worker": {"step": 10**30}}, "worker", id="a step beyond all counting"),
        pytest.param({**OURS, "worker": 3}, "worker", id="a worker that is a number"),
    ],
)
def test_nonsense_is_refused_with_the_field_at_fault(body: Any, word: str) -> None:
    with pytest.raises(InvalidStatus, match=f"not valid: {word}"):
        parse_status(body, ObservedAgent(), NOW)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(OURS)), values))
def test_whatever_an_agent_says_is_a_fact_or_is_refused(body: dict[str, Any]) -> None:
    try:
        answer = parse_status(body, ObservedAgent(), NOW)
    except InvalidStatus as refusal:
        assert len(str(refusal)) < 400  # noqa: PT017  # either outcome is right
        return
    assert answer.fact.state in set(AgentState)


@pytest.mark.parametrize(
    ("body", "can", "how"),
    [
        pytest.param({**OURS, "features": ["reach", "prepare"]}, True, None, id="it could"),
        pytest.param({**OURS, "features": ["reach"]}, False, None, id="of the previous version"),
        pytest.param({**OURS, "preparation": "begun"}, False, Preparation.BEGUN, id="begun"),
        pytest.param({**OURS, "preparation": "ready"}, False, Preparation.READY, id="ready"),
        pytest.param({**OURS, "preparation": "failed"}, False, Preparation.FAILED, id="failed"),
        pytest.param({**OURS, "preparation": "fetching"}, False, Preparation.BEGUN, id="a word of a later agent"),
        pytest.param({**OURS, "preparation": 5}, False, Preparation.BEGUN, id="nonsense"),
        pytest.param(
            {"status": "ready", "features": ["prepare"], "preparation": "ready"}, False, None, id="another make"
        ),
    ],
)
def test_how_far_prepared_workers_are(body: dict[str, Any], can: bool, how: Preparation | None) -> None:
    fact = parse_status(body, ObservedAgent(), NOW).fact
    assert (fact.can_prepare, fact.preparation) == (can, how)


@pytest.mark.parametrize(
    ("body", "can"),
    [
        pytest.param({**OURS, "features": ["reach", "store"]}, True, id="it could"),
        pytest.param({**OURS, "features": ["reach", "prepare"]}, False, id="of the previous version, or without a key"),
        pytest.param({"status": "ready", "features": ["store"]}, False, id="another make"),
    ],
)
def test_whether_an_agent_can_serve_a_store(body: dict[str, Any], can: bool) -> None:
    assert parse_status(body, ObservedAgent(), NOW).fact.can_serve_store is can


@pytest.mark.parametrize(
    ("body", "can", "following"),
    [
        pytest.param({**OURS, "features": ["next"], "next_generation": 4}, True, 4, id="it will begin one"),
        pytest.param(
            {**OURS, "features": ["next"], "next_generation": None}, True, None, id="it has been told of none"
        ),
        pytest.param({**OURS, "features": ["reach", "prepare"]}, False, None, id="of the previous version"),
        pytest.param({"status": "ready", "features": ["next"], "next_generation": 4}, False, None, id="another make"),
    ],
)
def test_which_generation_an_agent_begins_by_itself(body: dict[str, Any], can: bool, following: int | None) -> None:
    fact = parse_status(body, ObservedAgent(), NOW).fact
    assert (fact.can_begin_next, fact.next_generation) == (can, following)


def test_when_a_generation_was_first_seen() -> None:
    seen = ObservedAgent()
    for generation, at_s in ((3, 0), (3, 5), (4, 7), (4, 9)):
        seen = parse_status({**OURS, "generation": generation}, seen, NOW + timedelta(seconds=at_s)).fact
    assert seen.generation_at == NOW + timedelta(seconds=7)


@pytest.mark.parametrize(
    ("body", "state", "kept"),
    [
        pytest.param({**OURS, "in_memory": {"kind": "replicated", "kept": 3}}, "replicated", 3, id="after a stop"),
        pytest.param({**OURS, "in_memory": {"kind": "sharded", "kept": None}}, "sharded", None, id="during a run"),
        pytest.param({**OURS, "in_memory": {"kind": "tiled"}}, "sharded", None, id="of a later agent: with care"),
        pytest.param({**OURS, "in_memory": None}, "", None, id="not announced"),
        pytest.param(OURS, "", None, id="an agent of the previous version"),
        pytest.param(
            {"status": "ready", "in_memory": {"kind": "replicated"}},
            "",
            None,
            id="of another make: it means another thing",
        ),
    ],
)
def test_what_workers_keep_in_memory(body: dict[str, Any], state: str, kept: int | None) -> None:
    fact = parse_status(body, ObservedAgent(), NOW).fact
    assert (fact.memory_state, fact.num_kept) == (state, kept)


@pytest.mark.parametrize(
    ("body", "is_spare"),
    [
        pytest.param({**OURS, "spare": "True"}, True, id="told so"),
        pytest.param({**OURS, "spare": "False"}, False, id="told otherwise"),
        pytest.param(OURS, False, id="not told"),
        pytest.param(
            {"status": "ready", "spare": "True"}, False, id="an agent of another make means workers that wait"
        ),
    ],
)
def test_a_spare_says_that_it_is_one(body: dict[str, Any], is_spare: bool) -> None:
    assert parse_status(body, ObservedAgent(), NOW).fact.is_spare is is_spare


def test_a_generation_without_a_step_has_no_time_of_a_step() -> None:
    """A time that was kept from the generation before would look like a hang of this one."""
    before = parse_status(OURS, ObservedAgent(), NOW).fact
    assert (before.step, before.step_at) == (5, NOW)
    fresh = parse_status(OURS | {"generation": 4, "worker": {"step": None}}, before, NOW + seconds(60)).fact
    assert (fresh.generation, fresh.step, fresh.step_at) == (4, None, None)
    moved = parse_status(OURS | {"generation": 4, "worker": {"step": 3}}, fresh, NOW + seconds(70)).fact
    assert (moved.step, moved.step_at) == (3, NOW + seconds(70))
    same = parse_status(OURS | {"generation": 4, "worker": {"step": 3}}, moved, NOW + seconds(80)).fact
    assert same.step_at == NOW + seconds(70)
