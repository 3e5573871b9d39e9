"""What switches a check off switches it off for its own time, and no longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from tests.sim.quota_invariants import BACK_S, QuotaInvariantChecker


def test_a_fault_that_keeps_operators_from_giving_quota_back_excuses_them_for_its_time_and_a_minute() -> None:
    kernel = SimpleNamespace(now=0.0)
    checker = QuotaInvariantChecker(cast(Any, SimpleNamespace(kernel=kernel)))
    assert not checker.is_hindered
    kernel.now = 100.0
    checker.hinder(30.0)
    checker.hinder(5.0)  # a shorter one does not end a longer one
    seen = []
    for now in (100.0, 129.0 + BACK_S, 131.0 + BACK_S, 300.0):
        kernel.now = now
        seen.append(checker.is_hindered)
    assert seen == [True, True, False, False]
    assert BACK_S <= 60.0
