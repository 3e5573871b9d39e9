"""Whoever looks for the tests of a module of the core finds them by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CORE = ROOT / "operator" / "elastipod_operator" / "core"
# What belongs to no module: limits of all of them, the words of documents, which field of a spec acts where, and the values
# that no test may make.
ABOUT_ALL = {"bounds", "spec_fields", "placed_pods", "checked_values"}


def names_below(folder: Path) -> set[str]:
    """Give the modules and packages of a folder."""
    return {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}


@pytest.mark.parametrize("part", ["", "conditions"])
def test_tests_of_the_core_begin_with_the_name_of_a_module(part: str) -> None:
    modules = names_below(CORE / part) | ({"report"} if part else ABOUT_ALL)
    files = [path.stem.removeprefix("test_") for path in (ROOT / "tests/unit/core" / part).glob("test_*.py")]
    assert len(files) > 4
    assert [name for name in files if not any(name == each or name.startswith(f"{each}_") for each in modules)] == []
