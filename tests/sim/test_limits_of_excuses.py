"""What switches a check off switches it off for its own time, and no longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from tests.sim import faults
from tests.sim.events import Event
from tests.sim.fault_targets import AFTERMATH_S, FENCED_AGAIN_S, SEEN_AGAIN_S
from tests.sim.quota_invariants import BACK_S, QuotaInvariantChecker
from tests.sim.random_schedules import CHAOS_S
from tests.sim.scripted_queue_schedules import QUEUE_SCHEDULES
from tests.sim.simulation import Simulation


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


def test_writers_are_excused_while_two_operators_act_and_for_a_minute() -> None:
    sim = Simulation(QUEUE_SCHEDULES["increments give way to a gang and come back"])
    assert sim.server is not None
    faults.note(sim, Event(0.0, "second_operator", 0, 20.0))
    sim.kernel.run(5.0)
    faults.note(sim, Event(5.0, "operator_stands_still", 0, 3.0))  # it ends sooner
    seen = []
    for until in (5.0, 19.0 + FENCED_AGAIN_S, 21.0 + FENCED_AGAIN_S):
        sim.kernel.run(until)
        seen.append((sim.cluster.is_fenced, sim.checker.is_fenced, sim.server.watch.is_fenced))
    assert seen == [(False,) * 3, (False,) * 3, (True,) * 3]


def test_nodes_are_seen_again_a_minute_after_what_hid_them_and_never_in_time_once_the_clock_has_jumped() -> None:
    sim = Simulation(QUEUE_SCHEDULES["increments give way to a gang and come back"])
    faults.note(sim, Event(0.0, "slow_watch", 0, 20.0))
    seen = []
    for until in (5.0, 19.0 + SEEN_AGAIN_S, 21.0 + SEEN_AGAIN_S):
        sim.kernel.run(until)
        seen.append(sim.cluster.is_seen)
    faults.note(sim, Event(90.0, "clock_jumps", 0, 3.0))
    sim.kernel.run(400.0)
    assert [*seen, sim.cluster.is_seen] == [False, False, True, False]
    assert SEEN_AGAIN_S <= 60.0


def test_the_longest_aftermath_of_the_first_fault_ends_before_all_faults_are_over() -> None:
    """Otherwise one fault would explain whatever happens to its pod in the rest of a schedule."""
    assert AFTERMATH_S + 100.0 < 0.6 * CHAOS_S
