"""Do the core's tests notice mistakes? The long run plants thousands; here also the rules by which they are counted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.long_runs import LongRun
from tests.mutation import Mutant, Workshop, _mutants_of, choose, report, share_found

WANTED_SHARE = 0.85
HOURS = 3600

# As mutmut writes a function and its mutants.
MODULE = '''
def x_say__mutmut_orig(number):
    """Say it."""
    if number > 1:
        return "Several", f"{number} of them came"
    return "One", "one came"
def x_say__mutmut_1(number):
    """Say it."""
    if number >= 1:
        return "Several", f"{number} of them came"
    return "One", "one came"
def x_say__mutmut_2(number):
    """Say it."""
    if number > 1:
        return "Several", f"{number} OF THEM CAME"
    return "One", "one came"
def x_say__mutmut_3(number):
    """Say it."""
    if number > 1:
        return "XXSeveralXX", f"{number} of them came"
    return "One", "one came"
def x_say__mutmut_4(number):
    """Say it."""
    if number > 1:
        return "Several", f"{number} of them came"
    return "One", None
'''


def made() -> list[Mutant]:
    """Give the mutants of MODULE."""
    return list(_mutants_of(MODULE, "m"))


def test_what_changes_only_a_sentence_does_not_count() -> None:
    assert [mutant.is_wording for mutant in made()] == [False, True, False, True]
    assert [mutant.name for mutant in choose(made(), number=0, pattern="", seed=1)] == [
        "m.x_say__mutmut_1",
        "m.x_say__mutmut_3",
    ]


def test_a_diff_shows_the_changed_line_alone() -> None:
    assert made()[0].diff.splitlines() == ["-    if number > 1:", "+    if number >= 1:"]


def test_a_sample_is_the_same_for_the_same_seed() -> None:
    many = [Mutant(f"m.x_f__mutmut_{n}", "m", is_wording=False, diff="") for n in range(100)]
    first = choose(many, number=10, pattern="", seed=7)
    assert len(first) == 10
    assert first == choose(many, number=10, pattern="", seed=7)
    assert first != choose(many, number=10, pattern="", seed=8)
    assert choose(many, number=10, pattern="mutmut_99", seed=7) == [many[99]]


def test_who_was_not_run_by_any_test_has_not_been_found() -> None:
    outcomes = ["killed", "timeout", "survived", "untested"]
    tried = [Mutant(f"m.{o}", "m", is_wording=False, diff="-a\n+b", outcome=o) for o in outcomes]
    assert share_found(tried) == 0.5
    assert [s["name"] for s in report(tried)["survivors"]] == ["m.survived", "m.untested"]  # type: ignore[index, attr-defined]


@pytest.mark.long("mutation")
@pytest.mark.timeout(3 * HOURS)
def test_the_tests_of_the_core_find_planted_mistakes(long_run: LongRun, tmp_path: Path) -> None:
    """$MUTANTS: so many of them, chosen by the seed. $MUTATE: only those whose name contains it, such as `core.plan.`."""
    shop = Workshop(tmp_path)
    shop.prepare()
    every = shop.mutants()
    chosen = choose(
        every, number=int(os.environ.get("MUTANTS", "0")), pattern=os.environ.get("MUTATE", ""), seed=long_run.seed
    )
    tried = shop.try_out(chosen)
    outcomes = [mutant.outcome for mutant in tried]
    share = share_found(tried)
    long_run.count(
        planted=len(tried), killed=outcomes.count("killed"), timeouts=outcomes.count("timeout"),
        survived=outcomes.count("survived"), untested=outcomes.count("untested"), wording_left_out=sum(m.is_wording for m in every),
        share_found=round(share, 4),
    )  # fmt: skip
    long_run.detail(**report(tried))
    assert share >= WANTED_SHARE, (
        f"{share:.1%} of {len(tried)} planted mistakes were found; .run/long/mutation.json names the others"
    )
