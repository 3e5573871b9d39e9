"""From measurements to the rows of the agent's report."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.common.report import Reach, Row, Spread
from bench.common.samples import Samples
from bench.launchers.nodes import Launcher
from bench.launchers.output import wrong_lines
from bench.launchers.rows import COLD, LINES, ORIGINAL, TUNED, WARM, Line, rows
from bench.launchers.session import Session
from tests.e2e.output_load import OutputLoad

GAP = Line("grow", "s", "how it is done", ((ORIGINAL, Reach.ratio(20)), (COLD, None)))


def only(found: list[Row], peer: str) -> Row:
    (row,) = [one for one in found if one.peer == peer]
    return row


def test_each_peer_has_a_row_of_its_own() -> None:
    samples = Samples()
    for side, value in ((WARM, 0.2), (WARM, 0.4), (WARM, 0.3), (ORIGINAL, 9.0), (COLD, 6.0)):
        samples.add(side, "grow", value)
    found = rows(samples, (GAP,))
    against_original = only(found, "original-agent")
    assert against_original.ratio == 30
    assert against_original.met
    assert against_original.how == "how it is done. ours (warm): n=3; theirs: n=1"
    assert only(found, "ours-cold").reach is None


def test_failed_runs_are_told_with_a_reason() -> None:
    samples = Samples()
    samples.add(WARM, "crash back", 0.3)
    samples.fail(ORIGINAL, "crash", "waited 120 s in vain for a first step of 4 ranks")
    (row,) = rows(samples, (Line("crash back", "s", "killed", ((ORIGINAL, Reach.ratio(20)),), event="crash"),))
    assert row.theirs is None
    assert not row.met
    assert "theirs: n=0, 1 more failed, e.g.: waited 120 s in vain" in row.how


def test_runs_that_came_to_an_end_before_the_event_are_missing_too() -> None:
    samples = Samples(repeat=5)
    for value in (0.2, 0.3):
        samples.add(WARM, "grow", value)
        samples.add(ORIGINAL, "grow", 9.0)
    samples.fail(WARM, "agent up", "the agent ended")
    row = only(rows(samples, (GAP,)), "original-agent")
    assert (row.missing, row.met) == (3, False)


def test_the_exit_of_a_worker_that_was_noticed_too_late_gives_no_figure(tmp_path: Path) -> None:
    samples = Samples()
    launcher = Launcher("warm", tmp_path, ())
    session = Session(launcher, tmp_path, samples)
    for seen_ms in (3.0, -1.5):
        session._add_seen_after_exit(seen_ms)
    (row,) = rows(samples, (Line("crash seen after the exit", "ms", "", event="crash"),))
    assert row.ours == Spread(3, 3, 3)
    assert "n=1, 1 more failed, e.g.: the machine was busy: the end of the worker was noticed 1.5 ms after" in row.how


@pytest.mark.parametrize(
    ("lines", "num_wrong", "found"),
    [
        pytest.param(100, 0, 0, id="all lines, once and in order"),
        pytest.param(99, 1, 2, id="one lost, so that the next is not the one that was to come"),
        pytest.param(101, 1, 2, id="one came twice"),
        pytest.param(90, 10, 20, id="more than the console shows"),
    ],
)
def test_a_line_that_comes_twice_makes_up_for_none_that_is_lost(lines: int, num_wrong: int, found: int) -> None:
    load = OutputLoad(
        agent_percent=1, matcher_percent=1, printed_mb_s=10, num_lines=lines, num_expected=100, num_wrong=num_wrong,
        wrong=["line"] * min(num_wrong, 5),
    )  # fmt: skip
    assert wrong_lines(load) == found


def test_a_part_leaves_out_what_nobody_tried_but_not_what_failed() -> None:
    samples = Samples()
    samples.fail(WARM, "grow", "the agent ended")
    lines = (GAP, Line("shrink", "s", "", ((ORIGINAL, None),)), Line("crash", "s", ""))
    samples.add(WARM, "crash", 0.3)
    drawn = rows(samples, lines, is_part=True)
    assert [(row.metric, row.peer, row.is_measured) for row in drawn] == [
        ("grow", "original-agent", False), ("grow", "ours-cold", False), ("crash", None, True)
    ]  # fmt: skip


def test_a_limit_holds_for_every_peer_and_without_one() -> None:
    samples = Samples()
    samples.add(WARM, "seen", 9.0)
    limit = Reach.median(10)
    assert [row.met for row in rows(samples, (Line("seen", "ms", "", ((ORIGINAL, None),), limit),))] == [True]
    (alone,) = rows(samples, (Line("seen", "ms", "", reach=limit),))
    assert alone.peer is None
    assert alone.met


def test_workers_that_are_not_the_usual_ones_are_named() -> None:
    assert rows(Samples(), (Line("agent cpu", "%", "", ours=COLD),))[0].metric == "agent cpu, cold workers"


def test_no_two_rows_of_the_report_are_alike() -> None:
    drawn = [(row.metric, row.peer) for row in rows(Samples())]
    assert len(drawn) == len(set(drawn))


def test_the_report_asks_for_what_the_figures_to_reach_name() -> None:
    asked = {(row.metric, row.peer): row.reach for row in rows(Samples(), LINES) if row.reach}
    for metric, peer in (
        ("grow 2->4", ORIGINAL),
        ("grow 2->4", TUNED),
        ("shrink 4->2", ORIGINAL),
        ("crash back", TUNED),
    ):
        name = "original-agent" if peer == ORIGINAL else peer
        assert asked.pop((metric, name)) == Reach.ratio(20)
    assert asked[("node loss back", TUNED)] == Reach.ratio(10)
    assert asked[("crash seen after the exit", "original-agent")] == Reach.median(10)
    assert asked[("node loss seen", "original-agent")] == Reach.worst(1000)
    assert asked[("agent private", "torchrun")] == Reach.median(60)
    assert asked[("agent cpu", "torchrun")] == Reach.median(0.2)
