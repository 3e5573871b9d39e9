"""The parts of a pause: one after the other, they add up to the whole."""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path

import pytest
from bench.pauses.parts import CRASH, IN_MEMORY, NEW_PROCESSES, READY, Mark, Pause, Span, parts_of, read_spans
from tests.nonempty import some

MARKS = (
    Mark("copying", "copy"),
    READY,
    Mark("importing", "build", is_begin=True),
    Mark("building", "build"),
    "the rest",
)


def pause(*spans: Span) -> Pause:
    return Pause("2 -> 4", last_step=10.0, ready=10.3, first_step=11.5, step_s=0.25, spans=spans)


def test_a_part_ends_with_the_last_process_and_the_parts_are_the_whole() -> None:
    spans = [
        Span(1, 9.0, 9.9, "copy"),  # of an earlier save
        Span(1, 10.0, 10.1, "copy"),
        Span(2, 10.0, 10.2, "copy"),
        Span(3, 10.5, 10.9, "build"),
        Span(4, 10.6, 10.8, "build"),
        Span(4, 11.6, 11.7, "build"),  # after the first step
    ]
    found = parts_of(pause(*spans), MARKS)
    assert [name for name, _ in found] == ["copying", READY, "importing", "building", "the rest"]
    assert [seconds for _, seconds in found] == pytest.approx([0.2, 0.1, 0.3, 0.3, 0.35])
    assert sum(seconds for _, seconds in found) == pytest.approx(pause().pause_s)


def test_a_part_that_ended_within_another_takes_no_time() -> None:
    found = dict(parts_of(pause(Span(1, 9.8, 10.1, "build")), MARKS))
    assert found["copying"] == 0.0, "nobody copied"
    assert found["importing"] == found["building"] == 0.0, "it was built before all were ready"


@pytest.mark.parametrize("marks", [NEW_PROCESSES, IN_MEMORY, CRASH])
def test_the_functions_that_end_a_part_exist_and_are_noted(marks: tuple[Mark | str, ...]) -> None:
    noted = Path("bench/pauses/traced.py").read_text()
    for mark in some(marks):
        if isinstance(mark, Mark) and mark.function != "script":
            assert f":{mark.function}\n" in noted, mark


def test_what_is_noted_exists() -> None:
    text = Path("bench/pauses/traced.py").read_text()
    for line in some(re.findall(r"^elastipod\S+:\S+$", text, re.MULTILINE)):
        place, _, path = line.partition(":")
        assert callable(functools.reduce(getattr, path.split("."), importlib.import_module(place))), line


def test_what_processes_noted_is_read_by_process(tmp_path: Path) -> None:
    (tmp_path / "7.spans").write_text("1.5 2.5 State.__init__\n3 3 script\n")
    (tmp_path / "node-0.txt").write_text("not this\n")
    assert read_spans(tmp_path) == [Span(7, 1.5, 2.5, "State.__init__"), Span(7, 3.0, 3.0, "script")]
