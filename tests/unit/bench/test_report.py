"""Statistics, ratios, verdicts and the file format of benchmark reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.common.report import Better, Reach, Row, Spread, conclude, report, report_name, table, write_json

TWO, FOUR, EIGHT = Spread(1, 2, 3), Spread(4, 4, 4), Spread(6, 8, 20)


def row(ours: Spread | None, theirs: Spread | None, reach: Reach | None = None, better: Better = Better.SMALLER) -> Row:
    peer = None if theirs is None else "torchrun-tuned"
    return Row(metric="gap", unit="s", ours=ours, peer=peer, theirs=theirs, better=better, reach=reach, how="by hand")


@pytest.mark.parametrize(
    ("values", "spread"),
    [
        pytest.param([3.0], Spread(3, 3, 3), id="one run is all three"),
        pytest.param([5.0, 1.0, 3.0], Spread(1, 3, 5), id="order does not matter"),
        pytest.param([4.0, 1.0, 2.0, 100.0], Spread(1, 3, 100), id="the median of an even number lies between"),
    ],
)
def test_spread(values: list[float], spread: Spread) -> None:
    assert Spread.of(values) == spread


def test_a_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Spread.of([])


@pytest.mark.parametrize(
    ("drawn", "ratio"),
    [
        pytest.param(row(TWO, EIGHT), 4.0, id="shorter is better"),
        pytest.param(row(EIGHT, TWO), 0.25, id="longer is worse"),
        pytest.param(row(EIGHT, TWO, better=Better.LARGER), 4.0, id="more is better where more is better"),
        pytest.param(row(Spread(0, 0, 0), TWO), None, id="nothing is divided by 0"),
        pytest.param(row(TWO, None), None, id="no peer"),
        pytest.param(row(None, TWO), None, id="ours was never measured"),
    ],
)
def test_ratio_is_of_the_medians_and_larger_is_better(drawn: Row, ratio: float | None) -> None:
    assert drawn.ratio == ratio


@pytest.mark.parametrize(
    ("drawn", "met"),
    [
        pytest.param(row(TWO, EIGHT, Reach.ratio(4)), True, id="ratio reached"),
        pytest.param(row(TWO, EIGHT, Reach.ratio(4.1)), False, id="ratio missed"),
        pytest.param(row(TWO, None, Reach.ratio(4)), False, id="a ratio needs a peer that was measured"),
        pytest.param(row(TWO, None, Reach.median(2)), True, id="median within the limit though the worst is not"),
        pytest.param(
            row(TWO, EIGHT, Reach.median(1.9)), False, id="median beyond the limit though better than the peer"
        ),
        pytest.param(row(TWO, None, Reach.worst(2.9)), False, id="worst run beyond the limit"),
        pytest.param(row(TWO, None, Reach.worst(3)), True, id="worst run within the limit"),
        pytest.param(
            row(TWO, None, Reach.worst(1), Better.LARGER), True, id="the worst is the smallest where more is better"
        ),
        pytest.param(row(TWO, None, Reach.median(2.1), Better.LARGER), False, id="too little where more is better"),
        pytest.param(row(TWO, EIGHT), None, id="a row that only informs is neither met nor missed"),
        pytest.param(row(None, EIGHT), None, id="nor is one that was not measured"),
        pytest.param(row(None, EIGHT, Reach.median(5)), False, id="not measured meets no limit"),
    ],
)
def test_met(drawn: Row, met: bool | None) -> None:
    assert drawn.met is met


@pytest.mark.parametrize(
    ("reach", "runs", "missing", "met"),
    [
        pytest.param(Reach.worst(9), 4, 0, True, id="every run within the limit"),
        pytest.param(Reach.worst(9), 4, 1, False, id="the worst run is the one that failed"),
        pytest.param(Reach.median(9), 3, 2, True, id="the median is one that was measured"),
        pytest.param(Reach.median(9), 2, 2, False, id="half of the runs failed"),
        pytest.param(Reach.ratio(2), 1, 4, False, id="nor does a ratio count that is of one run in five"),
    ],
)
def test_runs_without_a_figure_are_worse_than_any_number(reach: Reach, runs: int, missing: int, met: bool) -> None:
    ours = Spread.of([1.0] * runs)
    drawn = Row(metric="gap", unit="s", ours=ours, peer="peer", theirs=EIGHT, reach=reach, missing=missing)
    assert drawn.met is met


@pytest.mark.parametrize(
    ("is_whole", "repeat", "name"),
    [(True, 5, "agent"), (True, 9, "agent"), (True, 1, "agent-part"), (False, 5, "agent-part")],
)
def test_only_a_whole_run_of_five_repetitions_takes_the_published_name(is_whole: bool, repeat: int, name: str) -> None:
    assert report_name("agent", is_whole=is_whole, repeat=repeat) == name


def test_the_file_has_the_agreed_format(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "agent.json"
    rows = [row(Spread(0.12344, 2 / 3, 3), EIGHT, Reach.ratio(20)), row(FOUR, None)]
    write_json(path, report("agent", rows, machine="2 cores", load_1m=0.25, versions={"torch": "2.11.0"}))
    written = json.loads(path.read_text())
    assert [*written] == ["name", "commit", "machine", "load_1m", "versions", "rows"]
    assert written["rows"][0] == {
        "metric": "gap",
        "unit": "s",
        "ours": {"min": 0.1234, "median": 0.6667, "max": 3, "runs": 1},
        "peer": "torchrun-tuned",
        "theirs": {"min": 6, "median": 8, "max": 20, "runs": 1},
        "ratio": 12,
        "reach": 20,
        "met": False,
        "missing": 0,
        "how": "by hand",
    }
    assert written["rows"][1] | {"ours": 0} == {
        **{"metric": "gap", "unit": "s", "ours": 0, "peer": None, "theirs": None},
        **{"ratio": None, "reach": None, "met": None, "missing": 0, "how": "by hand"},
    }
    assert [entry.name for entry in path.parent.iterdir()] == ["agent.json"]


INFORMS, GOOD, BAD = row(TWO, EIGHT), row(TWO, EIGHT, Reach.ratio(4)), row(TWO, EIGHT, Reach.ratio(5))
ABSENT = row(None, None)
FEWER = Row(metric="crash", unit="s", ours=Spread.of([1.0]), missing=4)
NO_PEER = Row(metric="gap", unit="s", ours=TWO, peer="original-agent")


@pytest.mark.parametrize(
    ("rows", "status", "said"),
    [
        pytest.param([INFORMS, GOOD], 0, ["1 of 1 rows with a number to reach met it"], id="all is well"),
        pytest.param([INFORMS], 0, ["0 of 0 rows with a number to reach met it"], id="nothing is to be reached"),
        pytest.param([GOOD, BAD], 1, ["1 of 2 rows with a number to reach met it", "missed: gap (torchrun-tuned)"], id="missed"),
        pytest.param([GOOD, ABSENT], 1, ["1 of 1 rows with a number to reach met it", "not measured: gap"], id="not measured"),
        pytest.param([NO_PEER], 1, ["0 of 0 rows with a number to reach met it", "not measured: gap (original-agent)"],
                     id="the peer was not"),
        pytest.param([FEWER], 1, ["0 of 0 rows with a number to reach met it", "fewer runs than asked for: crash (1 of 5)"],
                     id="some runs gave no figure"),
        pytest.param([], 1, ["0 of 0 rows with a number to reach met it"], id="no row at all"),
    ],
)  # fmt: skip
def test_the_exit_status_tells_of_missed_rows(
    rows: list[Row], status: int, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert conclude(rows) == status
    assert capsys.readouterr().out.splitlines() == said


def test_the_table_has_a_line_for_every_row_and_says_what_was_missed() -> None:
    lines = table([row(TWO, EIGHT, Reach.ratio(20)), row(TWO, None, Reach.median(10)), row(None, EIGHT)]).splitlines()
    assert len(lines) == 4
    assert " ".join(lines[1].split()) == "gap [s] 1 / 2 / 3 torchrun-tuned 6 / 8 / 20 4x >= 20x MISSED"
    assert " ".join(lines[2].split()) == "gap [s] 1 / 2 / 3 <= 10 s met"
    assert " ".join(lines[3].split()) == "gap [s] none torchrun-tuned 6 / 8 / 20"
