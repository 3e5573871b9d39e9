"""What holds for every benchmark, read from its source: five runs, a quiet machine, and an exit status that tells of missed rows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

BENCHES = sorted((Path(__file__).resolve().parents[3] / "bench").glob("[a-z]*.py"))
LEAST_RUNS = 5


def test_there_are_benchmarks() -> None:
    assert {"agent", "cluster", "data", "operator", "steps"} <= {path.stem for path in BENCHES}


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.stem)
def test_a_figure_is_of_five_runs_unless_somebody_asks_for_fewer(path: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    (repeat,) = [
        call for call in calls if call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value == "--repeat"
    ]  # fmt: skip
    (default,) = [keyword.value for keyword in repeat.keywords if keyword.arg == "default"]
    assert isinstance(default, ast.Constant)
    assert int(str(default.value)) >= LEAST_RUNS


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.stem)
def test_the_exit_status_is_the_verdict_on_all_rows(path: Path) -> None:
    tree = ast.parse(path.read_text())
    returned = [ast.unparse(node.value) for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value]
    assert any(text.startswith("conclude(") for text in returned), "some function returns what conclude() says"
    last = ast.unparse(tree.body[-1])
    assert "sys.exit(main())" in last or "raise SystemExit(main())" in last


def calls_of(path: Path) -> set[str]:
    """Give the names of the functions that a benchmark calls."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return {ast.unparse(call.func) for call in calls}


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.stem)
def test_a_trial_does_not_overwrite_published_figures(path: Path) -> None:
    assert "report_name" in calls_of(path)
    written = [line for line in path.read_text().splitlines() if "write_json(" in line]
    assert [line for line in written if f'"{path.stem}.json"' in line] == []


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.stem)
def test_a_benchmark_waits_for_a_quiet_machine_and_says_when_there_was_none(path: Path) -> None:
    assert {"surroundings.await_quiet", "surroundings.describe", "surroundings.warn"} <= calls_of(path)
    assert '"--wait-for-quiet"' in path.read_text()
