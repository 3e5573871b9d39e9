"""The architecture page leads to files: each row of its tables names one that exists, and functions that are in it."""

from __future__ import annotations

import re

import pytest
from tests.unit.docs.pages import ROOT, page

ROWS = {
    heading: list(page("docs/architecture.md").table_rows(heading))[1:]
    for heading in ("## Where to look", "## Where do I change ...")
}
LINK = re.compile(r"\[`([^`]+)`\]\(\.\./([^)]+)\)")


@pytest.mark.parametrize("row", [row for rows in ROWS.values() for row in rows], ids=lambda row: str(row[0]))
def test_each_row_names_one_file_that_exists(row: list[str]) -> None:
    shown, path = LINK.fullmatch(row[1]).groups()  # type: ignore[union-attr]
    assert (ROOT / path).is_file()
    assert path.endswith(shown)


def test_functions_that_an_answer_names_are_in_its_file() -> None:
    named = [
        (LINK.fullmatch(row[1])[2], name)  # type: ignore[index]
        for row in ROWS["## Where to look"]
        for name in re.findall(r"`(_?[a-z]+_[a-z_]+)`", row[2])
    ]
    assert len(named) >= 4, "the pattern finds none where the page names functions"
    assert [(path, name) for path, name in named if f"def {name}(" not in (ROOT / path).read_text()] == []


def test_twenty_usual_changes_are_listed() -> None:
    assert len(ROWS["## Where do I change ..."]) >= 20
