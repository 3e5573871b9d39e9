"""What the report of a long run says of its tests together."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.commit_under_test import commit_under_test
from tests.long_runs import LongRun, reports_folder


@pytest.mark.parametrize(
    ("outcomes", "result"),
    [
        ([], "unfinished"),
        (["passed", "passed"], "passed"),
        (["passed", "skipped", "skipped"], "passed, 2 skipped"),
        (["skipped"], "failed"),
        (["passed", "skipped", "failed"], "failed"),
    ],
)
def test_what_was_skipped_is_neither_passed_nor_failed(outcomes: list[str], result: str) -> None:
    tests: dict[str, dict[str, object]] = {f"test_{n}": {"outcome": one} for n, one in enumerate(outcomes)}
    assert LongRun("matrix", 1, Path("unused"), tests=tests).as_json()["result"] == result


def test_a_report_names_the_commit_that_ran() -> None:
    assert LongRun("matrix", 1, Path("unused")).as_json()["commit"] == commit_under_test()


@pytest.mark.parametrize(
    ("keyword", "arguments", "kept"),
    [
        ("", ["."], "long"),
        ("", [], "long"),
        ("one_of_many", ["."], "long-parts"),
        ("", [".", __file__], "long-parts"),
        ("", [f"{__file__}::test_a_report_names_the_commit_that_ran"], "long-parts"),
    ],
)
def test_a_part_of_a_run_leaves_no_report_of_the_run(keyword: str, arguments: list[str], kept: str) -> None:
    """One of forty variants that passed was shown as all of them."""
    assert reports_folder(Path("root"), keyword, arguments) == Path("root", ".run", kept)
