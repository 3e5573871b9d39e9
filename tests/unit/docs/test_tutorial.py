"""The tutorial says how many lines are new, and marks them."""

from __future__ import annotations

from collections import Counter

from tests.unit.docs.pages import page

BEFORE, AFTER = page("docs/tutorial.md").blocks("python")
MARK = "  # new"


def lines_of(script: str) -> Counter[str]:
    return Counter(line.removesuffix(MARK).strip() for line in script.splitlines() if line.strip())


def test_ten_lines_are_new() -> None:
    new = lines_of(AFTER) - lines_of(BEFORE)
    assert new.total() == 10
    assert new == Counter(line.removesuffix(MARK).strip() for line in AFTER.splitlines() if line.endswith(MARK))


def test_it_gets_shorter() -> None:
    assert len(AFTER.splitlines()) < len(BEFORE.splitlines())
