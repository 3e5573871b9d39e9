"""The picture of a run: written in both formats, the same each time, with every cause in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.demo.runs import CREATED_AT, FORCED, GROW_SHRINK_CRASH, GROW_SHRINK_CRASH_LOGS, elastic_run, urgent_run

from elastipod_client.picture import (
    COLOURS,
    NOTE_SHARE,
    Note,
    Timeline,
    axis_height,
    draw,
    note_places,
)
from elastipod_local.demo.report import JobPhase, Run, Span, parse_history, spans
from elastipod_local.demo.run_log import generations
from elastipod_local.demo.timeline import timeline_of


@pytest.fixture
def run() -> Run:
    return Run(CREATED_AT, parse_history(GROW_SHRINK_CRASH), generations(GROW_SHRINK_CRASH_LOGS), ())


def test_every_phase_has_a_colour() -> None:
    assert set(COLOURS) == set(JobPhase)


def test_each_change_is_noted_with_its_cause_and_gap(run: Run) -> None:
    timeline = timeline_of(run, "a run")
    assert timeline.spans == spans(run)
    grown, shrunk, crashed = (
        "2: resize 2 → 4, CapacityAvailable",
        "3: resize 4 → 2, NodeDrained",
        "4: recovery 2 → 2, WorkerCrash",
    )
    assert timeline.notes == (
        Note(10.0, "2 → 4, 0.00 s pause\nCapacityAvailable\nin memory", "memory", f"generation {grown}; in memory"),
        Note(20.0, "4 → 2, 0.00 s pause\nNodeDrained\nin memory", "memory", f"generation {shrunk}; in memory"),
        Note(30.02, "2 → 2, 0.00 s pause\nWorkerCrash\nin memory", "memory", f"generation {crashed}; in memory"),
    )


def test_a_change_deeper_than_memory_has_its_reason_where_somebody_points_at_it() -> None:
    note = timeline_of(elastic_run(), "both acts").notes[-1]
    assert note.text == "4 → 2, 6.00 s pause\nScaledByUser\nnew processes"
    assert note.tip == f"generation 8: resize 4 → 2, ScaledByUser; new processes because {FORCED}"


def test_the_urgent_job_stands_on_the_replicas_that_train_beside_it() -> None:
    timeline = timeline_of(elastic_run(), "both acts", urgent_run())
    assert timeline.urgent is not None
    assert timeline.urgent.floor == 2
    assert timeline.urgent.spans == (
        Span(JobPhase.STARTING, 60.5, 64.5, 2),  # from when the increments had stopped
        Span(JobPhase.TRAINING, 64.5, 76.0, 2),
    )


def test_an_urgent_job_that_never_trained_is_not_drawn() -> None:
    assert timeline_of(elastic_run(), "both acts", urgent_run(logs=[])).urgent is None


@pytest.mark.parametrize(
    ("moments", "places"),
    [
        pytest.param([], [], id="no notes"),
        pytest.param([10, 40], [(10, 0), (40, 0)], id="far apart, one level"),
        pytest.param([10, 25], [(10, 1), (25, 0)], id="of close ones the earlier stands higher"),
        pytest.param([10, 25, 35], [(10, 2), (25, 1), (35, 0)], id="three in a row"),
        pytest.param([55, 90], [(55, 1), (70, 0)], id="at the end the text stands left and may touch an earlier one"),
        pytest.param([40, 90], [(40, 0), (70, 0)], id="or may not"),
    ],
)
def test_notes_do_not_run_into_each_other(moments: list[float], places: list[tuple[float, int]]) -> None:
    assert note_places(moments, end=100, width=20) == places


@pytest.mark.parametrize("levels", range(1, 6))
def test_every_level_of_notes_has_its_share_of_the_axis_above_the_bars(levels: int) -> None:
    height = axis_height(levels)
    assert (height - 1) / height == pytest.approx(levels * NOTE_SHARE)


def test_the_same_run_gives_the_same_picture(run: Run, tmp_path: Path) -> None:
    draw(timeline_of(run, "a run", urgent_run()), tmp_path / "one.svg", tmp_path / "one.png")
    draw(timeline_of(run, "a run", urgent_run()), tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_a_step_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="never made a step"):
        draw(Timeline("empty", (), (), ()), tmp_path / "empty.svg")


def test_the_picture_distinguishes_how_deep_changes_went(tmp_path: Path, run: Run) -> None:
    spans = (Span(JobPhase.TRAINING, 0.0, 10.0, 2), Span(JobPhase.TRAINING, 10.1, 20.0, 4))

    def picture(depth: str | None) -> bytes:
        path = tmp_path / f"{depth}.svg"
        draw(Timeline("t", spans, (), (Note(10.0, "2 → 4", depth),)), path)
        return path.read_bytes()

    assert picture("memory") != picture("process")
    assert picture("process") == picture(None), "as before the history told it"
    untold = replace(run, history=tuple(replace(one, depth=None) for one in run.history))
    note = timeline_of(untold, "t").notes[0]
    assert (note.text, note.depth) == ("2 → 4, 0.00 s pause\nCapacityAvailable", None)
    assert note.tip == "generation 2: resize 2 → 4, CapacityAvailable"
