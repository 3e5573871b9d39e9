"""The gate against checks that cannot fail finds them, and lets pass what can."""

from __future__ import annotations

import pytest
from tests.lint import vacuous
from tests.lint.sources import Finding, Repository, Source
from tests.nonempty import every, some


def found_in(text: str, path: str = "tests/unit/core/test_one.py") -> list[Finding]:
    return list(vacuous.check(Repository([Source(path, text)], [path])))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("assert all(one.ok for one in found)", "all() of nothing", id="all() of what was found"),
        pytest.param("assert found and all([one.ok for one in found[1:]])", "all() of nothing", id="all() of a list"),
        pytest.param("assert after in ([], ['Running'])", "an empty list passes too", id="an empty list is allowed"),
        pytest.param("assert seen.pods == seen.pods", "seen.pods is compared with itself", id="a thing and itself"),
        pytest.param("assert 0 < size == size", "size is compared with itself", id="in a chain"),
        pytest.param("def test_x():\n    for one in found:\n        assert one.ok", "test_x asserts nothing", id="a loop"),
        pytest.param(
            "async def test_x():\n    async def scenario():\n        for one in sorted(found):\n            assert one.ok",
            "test_x asserts nothing", id="a loop of a scenario",
        ),
        pytest.param(
            "def test_x():\n    if found:\n        assert one\n    for one in found:\n        assert one",
            "test_x asserts nothing", id="a loop after what asserts sometimes",
        ),
        pytest.param(
            "def test_x():\n    for _, one in zip(range(3), found):\n        assert one.ok",
            "test_x asserts nothing", id="a loop that ends with the shorter one",
        ),
        pytest.param(
            "def test_x():\n    for a, b in product(range(3), found):\n        assert a.ok",
            "test_x asserts nothing", id="a loop over pairs",
        ),
        *(
            pytest.param(f"def test_x():\n    assert {nothing}", "only what was not found", id=nothing)
            for nothing in (
                "[one for one in found if one.bad] == []", "not [one for one in found if one.bad]",
                "not any(one.bad for one in found)", "not any(map(is_bad, found))", "{one.name for one in found} <= known",
                "set(found) <= known", "{one for one in found if one.bad} == set()",
            )
        ),
    ],
)  # fmt: skip
def test_a_check_that_cannot_fail_is_found(text: str, words: str) -> None:
    (found,) = found_in(text)
    assert words in found.text


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("assert all(one.ok for one in (first, second))", id="all() of two things"),
        pytest.param("assert all(one.ok for one in Reason)", id="all() of an enum"),
        pytest.param("assert every(one.ok for one in found)", id="every()"),
        pytest.param("if all(one.ok for one in found): go()", id="no assert"),
        pytest.param("assert plan(seen) == plan(seen)", id="two calls"),
        pytest.param("def test_x():\n    for one in some(found):\n        assert one.ok", id="some()"),
        pytest.param(
            "def test_x():\n    for one in found:\n        assert one.ok\n    assert len(found) == 2", id="a count"
        ),
        pytest.param(
            "def test_x():\n    for _, one in zip(range(3), found, strict=True):\n        assert one.ok",
            id="as often as a range",
        ),
        pytest.param(
            "def test_x():\n    assert [one for one in some(found) if one.bad] == []", id="a search of some()"
        ),
        pytest.param(
            "def test_x():\n    assert len(found) == 3\n    assert not any(one.bad for one in found)",
            id="a search of what was counted",
        ),
        pytest.param("@PAGES\ndef test_x(page):\n    assert {*names(page)} <= KNOWN", id="a case of many"),
        pytest.param(
            "@given(found=lists())\ndef test_x(found):\n    for one in found:\n        assert one.ok", id="examples"
        ),
        pytest.param(
            "def test_x():\n    with pytest.raises(E):\n        for one in found:\n            assert one.ok",
            id="raises",
        ),
        pytest.param("def check(found):\n    for one in found:\n        assert one.ok", id="no test"),
    ],
)
def test_a_check_that_can_fail_passes(text: str) -> None:
    assert found_in(text) == []


def test_only_tests_are_looked_at() -> None:
    assert found_in("assert all(one.ok for one in found)", "operator/elastipod_operator/core/one.py") == []


def test_every_and_some_fail_without_anything() -> None:
    assert every([1, True])
    assert not every([1, 0])
    assert some(iter("ab")) == ["a", "b"]
    with pytest.raises(AssertionError, match="nothing to check"):
        every([])
    with pytest.raises(AssertionError, match="nothing to check"):
        some(())
