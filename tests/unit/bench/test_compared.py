"""The rows of resizes, crashes and hangs beside peers: which peer is taken, and what is to be reached."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from bench.common.options import some_of
from bench.common.report import Reach, Row
from bench.common.samples import Samples
from bench.launchers.compared import CRASH, HUNG_BACK, ComparedSession, better_peer, compared_rows
from bench.launchers.nodes import Launcher
from bench.launchers.resizing import GROW, SHRINK
from bench.launchers.rows import MEMORY, ORIGINAL, TUNED, WARM
from bench.launchers.session import TRAINED_S, UNPREPARED_S

PAUSES = {MEMORY: 0.09, WARM: 0.4, ORIGINAL: 9.0, TUNED: 7.0}


def measured(*, but: tuple[str, str] = ("", "")) -> Samples:
    """One run of everything. but: a side and a metric that failed."""
    samples = Samples(repeat=1)
    for side, pause in PAUSES.items():
        for name in (GROW, CRASH, *[SHRINK] * (side != TUNED)):
            samples.add(side, f"pause, {name}", pause)
    for side, back in ((MEMORY, 0.8), (WARM, 1.5)):
        samples.add(side, HUNG_BACK, back)
    if but[0]:
        del samples.values[but]
        samples.fail(but[0], but[1].removeprefix("pause, "), "nobody came")
    return samples


def drawn(samples: Samples) -> dict[tuple[str, str | None], Row]:
    found = compared_rows(samples)
    assert len({(row.metric, row.peer) for row in found}) == len(found)
    return {(row.metric.removesuffix(", small model"), row.peer): row for row in found}


def test_the_pause_in_memory_has_a_limit_and_is_held_against_the_better_peer() -> None:
    rows = drawn(measured())
    assert {key: row.reach for key, row in rows.items()} == {
        ("pause, grow 2->4", "ours-process-restart"): Reach.median(0.10),
        ("pause, grow 2->4", "torchrun-tuned"): Reach.ratio(80),
        ("pause, shrink 4->2", "ours-process-restart"): Reach.median(0.06),
        ("pause, shrink 4->2", "original-agent"): Reach.ratio(80),
        ("pause, crash", "ours-process-restart"): Reach.median(0.10),
        ("pause, crash", "torchrun-tuned"): None,
        ("hang back after the limit", "ours-process-restart"): Reach.median(1.0),
    }
    assert rows["pause, grow 2->4", "torchrun-tuned"].ratio == pytest.approx(7.0 / 0.09)
    assert rows["pause, shrink 4->2", "original-agent"].met is True, "100 times"
    assert rows["pause, shrink 4->2", "ours-process-restart"].met is False


def test_a_peer_that_failed_is_named_with_the_reason() -> None:
    samples = measured(but=(TUNED, f"pause, {GROW}"))
    assert better_peer(samples, f"pause, {GROW}") == ORIGINAL
    row = drawn(samples)["pause, grow 2->4", "original-agent"]
    assert "original-agent (n=1) and torchrun-tuned (n=0, 1 failed, e.g.: nobody came)" in row.how


def test_without_any_peer_there_is_no_ratio() -> None:
    rows = drawn(measured(but=(ORIGINAL, f"pause, {SHRINK}")))
    row = rows["pause, shrink 4->2", "original-agent"]
    assert (row.met, row.is_measured) == (False, False)


def test_a_hang_that_was_not_measured_is_missing() -> None:
    row = drawn(measured(but=(MEMORY, HUNG_BACK)))[HUNG_BACK, "ours-process-restart"]
    assert (row.missing, row.met) == (1, False)


@pytest.mark.parametrize("is_ours", [True, False])
def test_only_our_agent_watches_for_hangs_and_prepares_its_next_start(tmp_path: Path, is_ours: bool) -> None:
    session = ComparedSession(Launcher("side", tmp_path, ("--given",), is_ours=is_ours), tmp_path, Samples())
    assert session.launcher.options == (("--given", "--hang-timeout=5") if is_ours else ("--given",))
    assert session.job.trained_s == (TRAINED_S if is_ours else UNPREPARED_S)
    assert session.job.launcher is session.launcher


def test_an_option_takes_some_of_the_known_names_in_their_order() -> None:
    parse = some_of(("one", "two", "three"))
    assert parse("three,one") == ["one", "three"]
    with pytest.raises(argparse.ArgumentTypeError, match="unknown: four; known are one, two, three"):
        parse("one,four")
