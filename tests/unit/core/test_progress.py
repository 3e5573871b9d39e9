"""The progress on the job: what is written, and how rarely."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.unit.core.builders import NOW, agent, seconds, trains

from elastipod_operator.core.names import (
    ANNOTATION_CHECKPOINT,
    ANNOTATION_ETA,
    ANNOTATION_STEP,
    ANNOTATION_STEP_AT,
)
from elastipod_operator.core.progress import next_progress, progress_changes, progress_interval, read_step
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import Record, Transition, TransitionKind
from elastipod_operator.core.record_codec import format_time


def running(for_s: float = 100.0) -> Record:
    return replace(trains(generation=3), running_since=NOW - seconds(for_s))


def written(step: str, ago_s: float, **others: str) -> dict[str, str]:
    return {ANNOTATION_STEP: step, ANNOTATION_STEP_AT: format_time(NOW - seconds(ago_s)) or "", **others}


def resizing(record: Record) -> Record:
    transition = Transition(
        kind=TransitionKind.RESIZE, cause=Reason.NODE_DRAINED, message="x", from_size=2, target_size=3,
        began_at=NOW, detected_at=NOW, deadline=NOW,
    )  # fmt: skip
    return replace(record, transition=transition)


@pytest.mark.parametrize(
    ("runs_s", "interval_s"), [(0, 60), (599, 60), (1200, 120), (3600, 360), (6000, 600), (10**7, 600)]
)
def test_a_tenth_of_the_generations_time_passes_between_two_writes(runs_s: float, interval_s: float) -> None:
    assert progress_interval(running(runs_s), NOW) == seconds(interval_s)


@pytest.mark.parametrize(
    "record", [trains(running_since=None), resizing(running()), replace(running(), outcome="Completed")]
)
def test_while_no_generation_runs_nothing_is_written_by_itself(record: Record) -> None:
    assert progress_interval(record, NOW) is None


@pytest.mark.parametrize(
    ("present", "in_s"),
    [
        pytest.param({}, -40, id="never written"),
        pytest.param(written("5", 0), 60, id="now"),
        pytest.param(written("5", 59), 1, id="just now"),
        pytest.param(written("5", 100), -40, id="when the generation began"),
        pytest.param(written("5", 61), -1, id="a minute ago"),
        pytest.param(written("5", 5000), -40, id="in an earlier generation"),
        pytest.param(written("5", -3600), -40, id="in the future"),
        pytest.param({ANNOTATION_STEP_AT: "rather late"}, -40, id="by hand"),
        pytest.param({ANNOTATION_STEP_AT: "9999-12-31T23:59:59Z"}, -40, id="at the end of time"),
    ],
)
def test_it_is_written_again_after_a_while(present: dict[str, str], in_s: float) -> None:
    """The generation has run for 100 s."""
    assert next_progress(running(), present, NOW) == NOW + seconds(in_s)


def changes(record: Record, present: dict[str, str], *members: Any, checkpoint: int | None = None) -> dict[str, Any]:
    return progress_changes(record, present, members, checkpoint, NOW)


def test_the_newest_step_of_the_members_counts() -> None:
    told = changes(running(), {}, agent(step=7), agent(step=9, total_steps=20), agent(step=None), checkpoint=4)
    assert told == {ANNOTATION_STEP: "9/20", ANNOTATION_CHECKPOINT: "4", ANNOTATION_STEP_AT: format_time(NOW)}
    assert changes(running(), {}, agent(step=9))[ANNOTATION_STEP] == "9"


def test_without_news_nothing_is_written() -> None:
    assert changes(running(), {}) == {}
    assert changes(running(), {}, agent(step=None)) == {}
    assert changes(running(), written("9", 300), agent(step=9)) == {}
    hanging = written("9/20", 300, **{ANNOTATION_ETA: "2026-03-01T12:00:00Z"})
    assert changes(running(), hanging, agent(step=9, total_steps=20, step_pace=seconds(60))) == {}


def test_a_checkpoint_is_news() -> None:
    told = changes(running(), written("9", 300), agent(step=9), checkpoint=9)
    assert told == {ANNOTATION_CHECKPOINT: "9", ANNOTATION_STEP_AT: format_time(NOW)}


@pytest.mark.parametrize(
    ("present", "eta"),
    [
        pytest.param({}, "2026-03-01T12:10:00Z", id="as the agent is heard"),
        pytest.param(written("85/100", 20), "2026-03-01T12:10:00Z", id="too soon for an average"),
        pytest.param(written("70/100", 90), "2026-03-01T12:00:00Z", id="the average since the last write"),
        pytest.param(written("99/100", 90), "2026-03-01T12:10:00Z", id="after steps were lost"),
        pytest.param(written("7/100", 500), "2026-03-01T12:10:00Z", id="not over a change of the generation"),
        pytest.param({**written("7", 90), ANNOTATION_STEP: "x"}, "2026-03-01T12:10:00Z", id="by hand"),
    ],
)
def test_when_the_last_step_will_be_made(present: dict[str, str], eta: str) -> None:
    member = agent(step=90, total_steps=100, step_pace=timedelta(minutes=1))
    assert changes(running(), present, member)[ANNOTATION_ETA] == eta


def test_an_absurd_end_is_a_time_all_the_same() -> None:
    member = agent(step=1, total_steps=2**53, step_pace=timedelta(days=300))
    assert changes(running(), {}, member)[ANNOTATION_ETA] == "2036-02-27T12:00:00Z"


@pytest.mark.parametrize("record", [resizing(running()), replace(running(), outcome="Completed")])
def test_the_end_is_taken_back_when_nothing_trains(record: Record) -> None:
    present = written("100/100", 10, **{ANNOTATION_ETA: "2026-03-01T12:10:00Z"})
    told = changes(record, present, agent(step=100, total_steps=100, step_pace=seconds(1)))
    assert told == {ANNOTATION_ETA: None, ANNOTATION_STEP_AT: format_time(NOW)}


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("4200/10000", (4200, 10000)), ("7", (7, None)), ("", None), ("x", None), ("-1", None), ("1/2/3", None),
        ("²", None), ("9" * 17, None), ("7/", (7, None)), ("/7", None),
    ],
)  # fmt: skip
def test_reading_the_step(text: str, step: tuple[int, int | None] | None) -> None:
    assert read_step({ANNOTATION_STEP: text}) == step


def test_an_hour_of_training_costs_few_writes() -> None:
    """As the shell does it: it looks when the interval is over, and writes what is due."""
    record, present, writes = running(0), dict[str, str](), list[datetime]()
    now = NOW
    while now < NOW + timedelta(hours=10):
        if next_progress(record, present, now) <= now:
            member = agent(step=(now - NOW) // seconds(1), total_steps=10**6, step_pace=seconds(1))
            told = progress_changes(record, present, [member], None, now)
            present |= {name: value for name, value in told.items() if value is not None}
            writes.append(now)
        now += progress_interval(record, now) or seconds(0)
    assert len([at for at in writes if at < NOW + timedelta(hours=1)]) <= 30
    assert len(writes) <= 90
    assert present[ANNOTATION_STEP].endswith("/1000000")
