"""The parts of a pause: one after the other, they add up to the whole."""

from __future__ import annotations

import functools
import importlib
import re
import subprocess
from pathlib import Path

import pytest
from bench import restart
from bench.common.processes import Failed
from bench.common.samples import Samples
from bench.pauses import versions
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


# ---- beside the former version


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one commit, which is the former version. Clones of this one need not have its whole history."""
    root = tmp_path / "repository"
    for name in ("agent/a.py", "examples/b.py", "operator/c.py"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(name)
    git = ["git", "-C", str(root), "-c", "user.name=test", "-c", "user.email=test@localhost"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=first"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(versions, "REPOSITORY", root)
    monkeypatch.setattr(versions, "FORMER_COMMIT", "HEAD")
    return root


def test_the_former_version_is_its_agent_and_examples(repository: Path, tmp_path: Path) -> None:
    (repository / "agent" / "a.py").write_text("changed since")
    found = versions.former_version(tmp_path / "former")
    files = {path.relative_to(found.root): path.read_text() for path in found.root.rglob("*.py")}
    assert files == {Path("agent/a.py"): "agent/a.py", Path("examples/b.py"): "examples/b.py"}
    assert (found.root, found.is_traced) == (tmp_path / "former", False)


def test_a_history_without_the_former_version_is_a_failure_that_says_so(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "FORMER_COMMIT", "0" * 40)
    with pytest.raises(Failed, match=r"no version 0000.*needs git and a checkout with its whole history"):
        versions.former_version(tmp_path / "former")


@pytest.mark.parametrize(("former_s", "is_met"), [(1.0, True), (0.9, False), (None, False)])
def test_a_restart_is_held_against_that_of_the_former_version(former_s: float | None, is_met: bool) -> None:
    samples = Samples(repeat=1)
    samples.add("ours", "new processes, 2 -> 4", 0.41)
    if former_s is not None:
        samples.add(restart.FORMER, "new processes, 2 -> 4", former_s)
    rows = {row.metric: row for row in restart._rows(samples, ["process", restart.FORMER])}
    assert rows["pause, new processes, 2 -> 4"].met is False, "0.4 s at most, whatever the other version takes"
    beside = rows["pause, new processes, 2 -> 4, beside the former version"]
    assert (beside.met, beside.is_measured) == (is_met, former_s is not None)
    assert "pause, in memory, 2 -> 4" not in rows
    alone = {row.metric for row in restart._rows(samples, ["process"])}
    assert [metric for metric in alone if "beside" in metric] == []
