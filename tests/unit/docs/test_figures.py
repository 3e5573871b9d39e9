"""Figures that a page repeats from a kept report are those of the report."""

from __future__ import annotations

import json
import re

from tests.kept_reports import KEPT
from tests.unit.docs.pages import ROOT

CHANGES = {"growth from 2 to 4 replicas": "2 -> 4", "shrink from 4 to 2": "4 -> 2", "a worker crashes": "2 -> 2"}
COLUMNS = ("in memory", "new processes", "new processes without State")


def test_the_pauses_of_the_comparison_are_those_of_the_newest_report() -> None:
    rows = json.loads((ROOT / KEPT).read_text())["bench"]["restart"]["rows"]
    medians = {row["metric"]: row["ours"]["median"] for row in rows if row["ours"]}
    page = (ROOT / "docs" / "comparison.md").read_text()
    for event, change in CHANGES.items():
        (cells,) = re.findall(rf"^\| {event} \|(.*)\|$", page, re.MULTILINE)
        metrics = [f"pause, {column}, {change}" for column in COLUMNS]
        if change == "2 -> 2":
            metrics[0] = f"pause, crash, {change}"
        told = [f"{medians[each]:.2f} s" if each in medians else "" for each in metrics]
        assert [cell.strip() for cell in cells.split("|")] == told, event
