"""`elastipod timeline` of jobs that the operator ran in virtual time."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from tests.nonempty import every
from tests.sim.events import Event
from tests.sim.random_schedules import Schedule
from tests.sim.scripted_jobs import scripted_job as job
from tests.sim.staged import stage

from elastipod_client.life import Life, as_json, life_of, note_text, rows, spans_of, sums_text, timeline_of
from elastipod_client.picture import JobPhase
from elastipod_client.situation import job_facts
from elastipod_client.spans import span_text
from elastipod_client.timeline import shown

EVENTFUL = job(Event(100, "suspend", 0, 100), Event(250, "crash_worker", 1))


def lived(schedule: Schedule, at: float, **more: Any) -> Life:
    staged = stage(schedule, at, **more)
    return life_of(job_facts(staged.job, staged.now), staged.events, staged.now)


@pytest.fixture(scope="module")
def life() -> Life:
    return lived(EVENTFUL, 300)


def test_phases_follow_each_other_and_a_suspension_is_a_gap(life: Life) -> None:
    spans = spans_of(life)
    assert [(span.phase.value, span.size) for span in spans] == [
        ("starting", 2), ("training", 2), ("draining", 2), ("restarting", 4), ("training", 4),
        ("starting", 4), ("training", 4), ("recovering", 4), ("training", 4),
    ]  # fmt: skip
    assert spans[0].start_s == 0
    assert spans[-1].end_s == 300
    gaps = [after.start_s - before.end_s for before, after in pairwise(spans)]
    assert [round(gap) for gap in gaps] == [0, 0, 0, 0, 100, 0, 0, 0]


def test_without_its_event_nobody_knows_when_training_stopped(life: Life) -> None:
    spans = spans_of(Life(life.job, (), life.now))
    assert [span.phase for span in spans].count(JobPhase.UNKNOWN) == 1
    assert every(after.start_s >= before.end_s for before, after in pairwise(spans))


def test_a_job_that_is_suspended_now_does_not_train_now() -> None:
    spans = spans_of(lived(EVENTFUL, 150))
    assert spans[-1].phase is JobPhase.TRAINING
    assert round(spans[-1].end_s) == 100


def test_a_job_that_has_ended_ends_the_picture() -> None:
    life = lived(job(), 200, total_steps=60)
    assert life.job.has_ended
    assert spans_of(life)[-1].end_s < 190


def test_the_times_of_the_phases_sum_up_to_the_age(life: Life) -> None:
    total = sum(life.phase_times().values(), timedelta())
    assert abs(total - timedelta(seconds=300)) < timedelta(seconds=3)
    assert sums_text(life).startswith("In 4 min: training 2 min (")
    changes = life.times_by_depth()
    assert list(changes) == ["process"]
    assert f". Resizes and recoveries, until new steps: new processes {span_text(changes['process'])}." in sums_text(
        life
    )


def test_the_table_has_each_change(life: Life) -> None:
    found = rows(life)
    assert [row[1:6] for row in found[1:]] == [
        ("1", "0 → 2", "start", "JobCreated", ""),
        ("2", "2 → 4", "resize", "CapacityAvailable", "process"),
        ("3", "0 → 4", "start", "Resumed", ""),
        ("4", "4 → 4", "recovery", "WorkerCrash", "process"),
    ]


def test_the_picture_has_the_causes(life: Life) -> None:
    notes = timeline_of(life).notes
    assert [note.text.splitlines()[1:] for note in notes] == [
        ["CapacityAvailable", "new processes"], ["WorkerCrash", "new processes"]
    ]  # fmt: skip
    assert note_text(life.job.history[-1]).startswith("4 → 4, ")


def test_a_long_life_is_drawn_in_hours() -> None:
    assert timeline_of(lived(job(), 7300)).unit == "hours"
    assert timeline_of(lived(job(), 300)).unit == "seconds"


@pytest.mark.parametrize("form", ["svg", "html"])
def test_the_picture_is_one_file(life: Life, form: str) -> None:
    text = shown(life, form)
    assert text.count("<svg") == 1
    assert ("CapacityAvailable</td>" in text) is (form == "html")
    assert shown(life, form) == text, "the same job gives the same picture"


def test_as_json_has_changes_phases_and_sums(life: Life) -> None:
    found = as_json(life)
    assert [change["cause"] for change in found["changes"]][-1] == "WorkerCrash"
    assert found["phases"][0]["startSeconds"] == 0
    assert found["phaseSeconds"]["training"] > 100
    assert list(found["changeSeconds"]) == ["process"]
