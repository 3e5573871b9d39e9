"""Repeats the few tests that failed beside others, alone, so that a busy machine is told from a broken product.

Two lanes of tests keep all processors busy, and a machine of continuous integration may stop a process for seconds. A test of
real processes that fails there and passes alone is flaky: a defect of the test, or a race in the product. It does not fail the
run. It is named at the very end, in the report of its tier and on the page of what is proven, because somebody has to look at it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

MOST_REPEATED = 3  # more than a few failures are no accident
DETERMINISTIC = "sim"  # a schedule in virtual time fails for a reason, however busy the machine is


def repeatable(failed: Mapping[str, Sequence[str]]) -> list[str]:
    """Give the tests to repeat of those that failed, by tier: none if there are many."""
    found = [name for tier, names in failed.items() if tier != DETERMINISTIC for name in names]
    return found if len(found) <= MOST_REPEATED else []


def find_flaky(failed: Mapping[str, Sequence[str]], run_alone: Callable[[str], bool]) -> dict[str, tuple[str, ...]]:
    """Repeat what may be repeated and give, by tier, the tests that passed. run_alone: tells whether a test passes alone."""
    passed = {name for name in repeatable(failed) if run_alone(name)}
    return {tier: tuple(name for name in names if name in passed) for tier, names in failed.items()}
