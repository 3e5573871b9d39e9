"""Marks what `make test` leaves out because it takes much processor time; `make test ALL=1` and continuous integration run it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def all_but_first(cases: Iterable[Any], how_many: int = 1) -> list[Any]:
    """Give the cases of a test, and mark those after the first ones as slow: most mistakes fail the first ones too."""
    return [case if at < how_many else _slow(case) for at, case in enumerate(cases)]


def all_but_every(step: int, cases: Iterable[Any]) -> list[Any]:
    """Give the cases of a test, and mark all as slow but the first, the one `step` after it, and so on."""
    return [case if at % step == 0 else _slow(case) for at, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.slow])
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
