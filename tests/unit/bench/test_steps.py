"""Samples a second, efficiency and the cost of calls: from measurements to rows."""

from __future__ import annotations

import pytest
from bench import steps
from bench.common.report import Spread
from bench.common.samples import Samples
from bench.launchers import train, train_in_memory
from bench.launchers.rows import MEMORY, TORCHRUN, WARM
from bench.launchers.speed import WARM_UP, call_figures, speed, steps_per_s
from bench.launchers.steplog import Step, Worker


def paced(every_s: float, count: int, slow_start_s: float = 0.0) -> Worker:
    """A worker that makes so many steps at one pace; the warm-up takes longer."""
    made = [Step(number * every_s + (slow_start_s if number >= WARM_UP else 0), number) for number in range(count)]
    return Worker("1", steps=made)


def measured(side: str, **speeds: list[float]) -> Samples:
    samples = Samples()
    for size, values in speeds.items():
        for value in values:
            samples.add(side, speed(int(size[1:])), value)
    return samples


def test_the_slowest_rank_counts_and_its_warm_up_does_not() -> None:
    world = [paced(0.05, 101), paced(0.1, 51, slow_start_s=9.0)]
    assert steps_per_s(world) == pytest.approx(10)


def test_costs_are_of_single_calls() -> None:
    figures = call_figures({"report": [1e-6] * 98 + [5e-6, 101e-6]})
    assert figures["report, mean"] == pytest.approx(2.04)
    assert figures["report, p99"] == pytest.approx(5), "one that was measured"


def test_efficiency_is_that_of_each_repetition() -> None:
    samples = measured(WARM, s1=[100, 200], s4=[360, 800])
    assert steps.efficiency(samples, WARM, 4) == Spread(90, 95, 100)
    samples.fail(WARM, speed(1), "the agent ended")
    assert steps.efficiency(samples, WARM, 4) is None, "who belongs to whom is unknown"


def test_a_loss_against_torchrun_is_missed_and_so_is_what_was_not_measured() -> None:
    samples = measured(WARM, s2=[98.0])
    samples.add(TORCHRUN, speed(2), 100.0)
    drawn = {row.metric: row for row in steps.rows(samples, [2], ["speed"])}
    assert set(drawn) == {f"{speed(2)}, {WARM}", f"{speed(2)}, {MEMORY}"}
    assert drawn[f"{speed(2)}, {WARM}"].ratio == pytest.approx(0.98)
    assert [row.met for row in drawn.values()] == [False, False]


@pytest.mark.parametrize(("mean_us", "met"), [(49.0, True), (51.0, False)])
def test_a_call_may_cost_a_thousandth_of_a_step(mean_us: float, met: bool) -> None:
    samples = Samples()
    for kind in ("event check", "report", "all-reduce"):
        samples.add(WARM, f"{kind}, mean", mean_us)
        samples.add(WARM, f"{kind}, p99", 400.0)
    verdicts = {row.metric: row.met for row in steps.rows(samples, [], ["calls"])}
    assert verdicts == {"event check, mean": met, "event check, p99": None, "report, mean": met, "report, p99": None}


def test_all_sides_take_the_same_samples_in_a_step() -> None:
    assert train_in_memory.GLOBAL_BATCH == 4 * train.BATCH
