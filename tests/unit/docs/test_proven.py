"""The page of what is proven comes from reports alone, and says where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests import tiers
from tests.proven import TIERS, Evidence, page, read_evidence


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
