"""The end of a demo: files that are written and the summary for people."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.demo.stories import CREATED_AT, GROW_SHRINK_CRASH, GROW_SHRINK_CRASH_LOGS

from elastipod_local.demo_outcome import Audit, collect, conclude, samples_line, table
from elastipod_local.demo_report import Run, build, parse_history
from elastipod_local.errors import LocalClusterError
from elastipod_local.run_log import generations

AUDIT = {"samples_total": 96, "samples_unique": 64, "samples_expected": 64}
STORY = Run(CREATED_AT, parse_history(GROW_SHRINK_CRASH), generations(GROW_SHRINK_CRASH_LOGS), ())


def test_the_table_has_a_line_for_each_change() -> None:
    assert table(build(STORY, AUDIT)).splitlines() == [
        "generation  replicas  cause              detected after  training gap  steps repeated",
        "2           2 -> 4    CapacityAvailable  -               1.800 s       0",
        "3           4 -> 2    NodeDrained        -               1.250 s       0",
        "4           2 -> 2    WorkerCrash        -               1.000 s       2",
    ]


def test_a_good_run_leaves_a_report_and_a_picture(tmp_path: Path) -> None:
    ending = conclude(STORY, Audit(0, AUDIT), "Completed", {"cluster": 12.5}, tmp_path / "demo")
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert (report["ok"], report["shortcomings"], ending.shortcomings) == (True, [], [])
    assert report["demo_seconds"] == {"cluster": 12.5}
    assert {"elastipod", "torch", "python"} <= report["versions"].keys()
    assert (tmp_path / "demo" / "timeline.svg").read_text().startswith("<?xml")


def test_what_the_audit_could_not_say_is_a_shortcoming(tmp_path: Path) -> None:
    ending = conclude(STORY, Audit(2, {}, "no logs"), "Completed", {}, tmp_path)
    assert ending.shortcomings[-1] == "no logs"
    assert samples_line(ending.report) == "samples: the audit gave no verdict"


def test_a_cluster_that_cannot_be_asked_still_gives_its_answer(tmp_path: Path) -> None:
    def kubectl(*arguments: str, timeout_s: float) -> str:
        if arguments[0] == "logs":
            raise LocalClusterError("connection refused")
        return "described\n"

    folder = collect(kubectl, tmp_path)
    assert (folder / "jobs.txt").read_text() == "described\n"
    assert (folder / "operator.log").read_text() == "connection refused\n"
