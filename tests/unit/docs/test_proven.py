"""The page of what is proven comes from reports alone, and says where there is none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests import benchmark_page, kept_reports, tiers
from tests.nonempty import every
from tests.proven import PAGE, TIERS, Evidence, page, read_evidence


def evidence(**more: object) -> Evidence:
    parts: dict[str, object] = {
        "tiers": {
            "unit": {
                "counts": {"passed": 4000, "skipped": 3, "error": 1, "failed": 1},
                "flaky": ["test_one.py::test_busy"],
                "seconds": 180.4,
                "commit": "abc-dirty",
            }
        },
        "long_runs": {
            "sim": {
                "result": "passed",
                "seed": 7,
                "commit": "def",
                "counts": {"schedules": 5000, "share_found": 0.91234},
            }
        },
        "known_long_runs": ["churn", "sim"],
        "benchmarks": {},
        "known_benchmarks": [],
        "functions": dict.fromkeys(TIERS, 12),
        "lines": {"operator": 12345},
        "where": "commit abc, 2 CPUs",
    }
    return Evidence(**{**parts, **more})  # type: ignore[arg-type]


def test_figures_of_reports_are_taken_over() -> None:
    text = page(evidence())
    assert "| unit | 12 | 4000 | 3 | 1 | 1 | 180 | abc-dirty |" in text
    assert "| sim | passed | 7 | def | schedules 5,000, share found 0.9123 |" in text
    assert "| operator | 12,345 |" in text


def test_what_has_no_report_is_named() -> None:
    text = page(evidence())
    assert "| e2e | 12 | no report | | | | | |" in text
    assert "| churn | no report | | | |" in text


def test_the_checkout_is_counted() -> None:
    found = read_evidence()
    assert found.functions["unit"] > 1000
    assert "mutation" in found.known_long_runs


def test_a_report_stays_until_a_newer_one_of_its_name_comes(tmp_path: Path) -> None:
    """A machine that has run nothing else yet takes no other figure off the page."""
    old = {"result": "passed", "seed": 1, "commit": "old", "counts": {}}
    kept = {"tests": {}, "long": {"sim": old, "storm": old, "gone": old}, "bench": {}}
    (tmp_path / "long").mkdir()
    new = {**old, "commit": "new", "tests": {"test_one": {"outcome": "passed", "seconds": 1.5}}}
    (tmp_path / "long" / "storm.json").write_text(json.dumps(new))
    names = {"tests": frozenset(TIERS), "long": frozenset(("sim", "storm")), "bench": frozenset(("agent",))}
    found = kept_reports.with_those_below(tmp_path, kept, names)
    assert {name: report["commit"] for name, report in found["long"].items()} == {"sim": "old", "storm": "new"}
    assert [*found["long"]["storm"]] == [*old], "single tests are not kept"


def test_only_whole_benchmarks_are_kept(tmp_path: Path) -> None:
    report = {"name": "agent", "commit": "abc", "machine": "2 cores", "load_1m": 0.1, "versions": {}, "rows": []}
    (tmp_path / "bench").mkdir()
    for name in ("agent", "agent-part"):
        (tmp_path / "bench" / f"{name}.json").write_text(json.dumps(report))
    (tmp_path / "bench" / "agent-runs.json").write_text("[]")
    names = {"tests": frozenset(TIERS), "long": frozenset(("sim",)), "bench": frozenset(("agent",))}
    assert [*kept_reports.with_those_below(tmp_path, {}, names)["bench"]] == ["agent"]


def test_benchmarks_are_shown_with_their_peer_and_what_was_missed() -> None:
    spread = {"min": 0.1, "median": 0.25, "max": 0.5}
    row = {"metric": "crash", "unit": "s", "ours": spread, "peer": "torchrun", "theirs": {**spread, "median": 1.5}}
    missed = {"metric": "hang", "unit": "s", "ours": None, "peer": None, "theirs": None}
    rows = [{**row, "ratio": 6.0, "reach": 5, "met": True}, {**missed, "ratio": None, "reach": 1.0, "met": False}]
    runs = {"ours": {**spread, "runs": 3}, "missing": 2, "how": "by hand.\nfailed"}
    few: dict[str, object] = {**row, "ratio": 6.0, "reach": 5, "met": True, "metric": "start", **runs}
    report = {"commit": "abc", "machine": "a processor, 2 cores", "load_1m": 0.1, "versions": {"torch": "2.15"}}
    text = benchmark_page.page(["agent", "data"], {"agent": {**report, "rows": [*rows, few]}})
    assert "at commit abc, on a processor, 2 cores, torch 2.15." in text
    assert "| crash [s] | 0.25 (0.1 to 0.5) | torchrun | 1.5 (0.1 to 0.5) | 6 | 5 | met |  |" in text
    assert "| hang [s] | none |  |  |  | 1 | missed |  |" in text
    assert "| start [s] | 0.25 (0.1 to 0.5, n=3 of 5) | torchrun |" in text
    assert "| met | by hand. failed |" in text
    assert "## data\n\nNo report." in text


def test_the_pages_show_what_is_kept() -> None:
    kept = kept_reports.read()
    assert [*kept] == ["tests", "long", "bench"]
    assert every(f"| {name} | {report['result']} |" in PAGE.read_text() for name, report in kept["long"].items())


@pytest.mark.parametrize(
    ("arguments", "names_the_slowest"),
    [pytest.param([], True, id="a whole tier"), pytest.param(["-k", "x"], False, id="some of its tests")],
)
def test_whole_tiers_name_their_slowest_tests(
    arguments: list[str], names_the_slowest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def run(command: list[str], _: tiers.Say, before: Sequence[str]) -> tiers.Ended:
        calls.append(command)
        return tiers.Ended(0, "1 passed in 0.1s")

    monkeypatch.setattr(tiers, "_run_pytest", run)
    monkeypatch.setattr(tiers, "_prepare", lambda _: "")
    tiers.run_tier("e2e", arguments)
    assert {"--durations=10" in call for call in calls} == {names_the_slowest}


def test_a_whole_tier_leaves_its_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "=== 10 passed, 2 skipped in 3.50s ===\n1 failed, 5 passed in 61.30s (0:01:01)"
    monkeypatch.setattr(tiers, "TESTS", tmp_path / "tests")
    tiers._write_report(tiers.Outcome("e2e", False, lines))
    report = (tmp_path / ".run" / "tests" / "e2e.json").read_text()
    assert '"passed": 15' in report
    assert '"failed": 1' in report
    assert '"seconds": 64.8' in report
