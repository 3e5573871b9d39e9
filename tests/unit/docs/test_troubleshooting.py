"""Troubleshooting by symptom knows every reason that needs somebody's attention."""

from __future__ import annotations

from tests.nonempty import some
from tests.unit.docs.pages import page

from elastipod_operator.core.reasons import Reason, Severity

PAGE = page("docs/troubleshooting.md")
# The state itself: its own words say no more than that the message says why.
STATES = {Reason.FAILED, Reason.RECOVERING}


def test_every_reason_that_needs_attention_has_a_row() -> None:
    first_cells = " ".join(line.split("|")[1] for line in PAGE.text.splitlines() if line.startswith("| "))
    wanted = (reason for reason in Reason if reason.severity is not Severity.INFO and reason not in STATES)
    assert [reason.value for reason in some(wanted) if f"`{reason.value}`" not in first_cells] == []


def test_every_row_says_what_to_do() -> None:
    rows = [line.strip("|").split(" | ") for line in PAGE.text.splitlines() if line.startswith("| ")]
    assert [row for row in some(rows) if len(row) != 3 or not row[2].strip()] == []
