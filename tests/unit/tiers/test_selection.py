"""Which tests run: all but the long runs, one long run, or all that are not slow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests import conftest
from tests.nonempty import some
from tests.slow import all_but_every, all_but_first

# The marks of each test, with their first argument.
MARKS: dict[str, dict[str, str]] = {
    "plain": {},
    "slow": {"slow": ""},
    "one long run": {"long": "one"},
    "a slow long run": {"long": "one", "slow": ""},
    "another": {"long": "two"},
}


class Item(SimpleNamespace):
    """A test with these marks."""

    def get_closest_marker(self, name: str) -> Any:
        return SimpleNamespace(args=(self.marks[name],)) if name in self.marks else None


@pytest.mark.parametrize(
    ("options", "selected"),
    [
        pytest.param({}, ["plain", "slow"], id="without an option"),
        pytest.param({"--quick": True}, ["plain"], id="quick"),
        pytest.param({"--long": "one"}, ["one long run", "a slow long run"], id="a long run"),
        pytest.param({"--long": "one", "--quick": True}, ["one long run", "a slow long run"], id="a long run, quick"),
        pytest.param({"--long": ""}, ["one long run", "a slow long run", "another"], id="all long runs"),
    ],
)
def test_what_is_selected(options: dict[str, Any], selected: list[str]) -> None:
    items = [Item(name=name, marks=marks) for name, marks in MARKS.items()]
    dropped: list[Item] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items))
    given = {"--long": None, "--quick": False, **options}
    conftest._select(cast(pytest.Config, SimpleNamespace(getoption=given.__getitem__, hook=hook)), cast(Any, items))
    assert [item.name for item in items] == selected
    assert {item.name for item in some(dropped)} == MARKS.keys() - set(selected)


@pytest.mark.parametrize("of", [1, 2, 3, 8])
def test_every_file_of_tests_is_in_one_share(of: int) -> None:
    files = some(sorted(conftest.TESTS.rglob("test_*.py")))
    shares = [[file for file in files if conftest.is_in_share(file, f"{number}/{of}")] for number in range(1, of + 1)]
    assert sorted(file for share in shares for file in share) == files
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_of_many_cases_every_third_is_not_slow() -> None:
    given = all_but_every(3, range(7))
    assert [case for case in given if isinstance(case, int)] == [0, 3, 6]
    assert [mark.name for case in given if not isinstance(case, int) for mark in case.marks] == 4 * ["slow"]


def test_of_many_cases_all_but_the_first_are_slow() -> None:
    long = pytest.mark.long("sim")
    given = all_but_first(["a", "b", ("c", 1), pytest.param("d", 2, id="named", marks=long)], 1)
    assert given[0] == "a"
    assert [case.values for case in given[1:]] == [("b",), ("c", 1), ("d", 2)]
    assert [[mark.name for mark in case.marks] for case in given[1:]] == [["slow"], ["slow"], ["long", "slow"]]
    assert given[3].id == "named"
