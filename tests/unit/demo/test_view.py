"""What the demo says while it runs: plain lines, and the live screen with both jobs on it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from elastipod_local.demo.view import LiveView, PlainView, View, size_text
from elastipod_local.demo.watcher import JobSnapshot, Progress

SNAPSHOTS = (
    JobSnapshot(job="lm", state="Running", size="2/2/4", progress=Progress(3, 41, 2.5, 60.0)),
    JobSnapshot(job="urgent", state="Suspended", size="0/2/2", message="waits in queue default"),
)


def show(view: View) -> None:
    view.act("Act 2: somebody needs the room")
    view.step(9, 13, "apply the urgent job")
    view.detail("urgent created")
    for snapshot in SNAPSHOTS:
        view.job(snapshot)
    view.event("lm", "Draining: 4 -> 2")
    view.act("Act 3: the end")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        pytest.param("2/2/4", "2 replicas", id="as many as are wanted"),
        pytest.param("2/4/4", "2 replicas, 4 wanted", id="on the way"),
        pytest.param("-", "no replicas yet", id="before the operator has looked"),
    ],
)
def test_sizes_are_told_in_words(size: str, text: str) -> None:
    assert size_text(size) == text


def test_plain_lines_tell_of_both_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    show(PlainView())
    assert [line.split(" s  ", 1)[1] for line in capsys.readouterr().out.splitlines()] == [
        "Act 2: somebody needs the room",
        "[9/13] apply the urgent job",
        "  urgent created",
        "  lm  2 replicas  Running  step 41  loss 2.500  60 samples/s",
        "  urgent  0 replicas, 2 wanted  Suspended  waits in queue default",
        "  lm  Draining: 4 -> 2",
        "Act 3: the end",
    ]


def test_the_live_screen_shows_steps_both_jobs_and_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveView, "_start", lambda view: None)  # no terminal here; what it would show is rendered below
    view = LiveView()
    show(view)
    screen = io.StringIO()
    Console(file=screen, width=100).print(view._render())
    lines = screen.getvalue().splitlines()
    assert lines[0].strip() == "Act 2: somebody needs the room"
    assert lines[1].startswith("✓ 9/13 apply the urgent job")
    assert all(
        any(name in line for line in lines) for name in ("lm  2 replicas", "urgent  0 replicas", "Draining: 4 -> 2")
    )
