"""The picture of a run: written in both formats, the same each time, with every cause in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.demo.stories import CREATED_AT, GROW_SHRINK_CRASH, GROW_SHRINK_CRASH_LOGS

from elastipod_local.demo_report import Phase, Run, parse_history, spans
from elastipod_local.run_log import generations
from elastipod_local.timeline import COLOURS, Note, Timeline, draw, note_levels, of_run


@pytest.fixture
def run() -> Run:
    return Run(CREATED_AT, parse_history(GROW_SHRINK_CRASH), generations(GROW_SHRINK_CRASH_LOGS), ())


def test_every_phase_has_a_colour() -> None:
    assert set(COLOURS) == set(Phase)


def test_each_change_is_noted_with_its_cause_and_gap(run: Run) -> None:
    timeline = of_run(run, "a run")
    assert timeline.spans == spans(run)
    assert timeline.notes == (
        Note(10.0, "2 → 4 CapacityAvailable, 1.80 s"),
        Note(20.0, "4 → 2 NodeDrained, 1.25 s"),
        Note(30.02, "2 → 2 WorkerCrash, 1.00 s"),
    )


@pytest.mark.parametrize(
    ("moments", "levels"),
    [
        pytest.param([], [], id="nothing to note"),
        pytest.param([0.0, 50.0], [0, 0], id="far apart: both low"),
        pytest.param([0.0, 5.0, 12.0], [2, 1, 0], id="close: the earlier stands higher"),
        pytest.param([0.0, 5.0, 50.0], [1, 0, 0], id="only the close ones are lifted"),
    ],
)
def test_notes_do_not_cover_each_other(moments: list[float], levels: list[int]) -> None:
    assert note_levels(moments, close=10) == levels


def test_the_same_run_gives_the_same_picture(run: Run, tmp_path: Path) -> None:
    draw(of_run(run, "a run"), tmp_path / "one.svg", tmp_path / "one.png")
    draw(of_run(run, "a run"), tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_a_step_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="never made a step"):
        draw(Timeline("empty", (), (), ()), tmp_path / "empty.svg")
