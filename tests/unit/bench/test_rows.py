"""From measurements to the rows of the agent's report."""

from __future__ import annotations

from bench.common.report import Reach, Row
from bench.common.samples import Samples
from bench.launchers.rows import COLD, LINES, ORIGINAL, TUNED, WARM, Line, rows

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
