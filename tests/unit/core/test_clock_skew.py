"""Times on record that lie in the future: whoever wrote them had another clock."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import datetime, timedelta

import pytest
from tests.unit.core.builders import NOW, job, observed, pod, policy, ready, running, seconds, trains, transition

from elastipod_operator.core.backoff import longest_wait
from elastipod_operator.core.clock_skew import TOLERANCE, not_later
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Gang, Kind, Ledger, Offence, Record, Shed, Window

LATER = NOW + timedelta(hours=1)
TIMES = [f.name for f in fields(Record) if f.type == "datetime | None"]


@pytest.mark.parametrize("name", TIMES)
def test_what_lies_in_the_future_is_taken_for_now(name: str) -> None:
    assert getattr(not_later(replace(Record(), **{name: LATER}), NOW), name) == NOW


@pytest.mark.parametrize("name", TIMES)
def test_the_little_by_which_clocks_differ_is_left_as_it_is(name: str) -> None:
    record = replace(Record(), **{name: NOW + TOLERANCE})
    assert not_later(record, NOW) is record


def test_the_parts_of_a_record_have_times_too() -> None:
    record = Record(
        window=Window(3, LATER, 1), ledger=Ledger("training", LATER), offences=(Offence("node-1", 2, LATER),),
        gang=Gang(LATER, 1, 2, LATER + seconds(90)), transition=transition(began_s=-3600),
    )  # fmt: skip
    seen = not_later(record, NOW)
    assert (seen.window, seen.ledger) == (Window(3, NOW, 1), Ledger("training", NOW))
    assert seen.offences == (Offence("node-1", 2, NOW),)
    assert seen.gang == Gang(NOW, 1, 2, NOW + seconds(90)), "a rest is as long as it was meant to be"
    assert seen.transition is not None
    assert (seen.transition.began_at, seen.transition.detected_at) == (NOW, NOW)
    assert seen.transition.deadline == NOW + seconds(600), (
        "the workers have the time for their checkpoint that they had"
    )


def test_a_back_off_lasts_as_long_as_it_was_meant_to() -> None:
    begun = transition(Kind.RECOVERY, began_s=-3600, not_before=LATER + seconds(20))
    seen = not_later(Record(transition=begun), NOW).transition
    assert seen is not None
    assert seen.not_before == NOW + seconds(20)


def test_increments_are_not_kept_from_the_queue_for_longer_than_any_back_off() -> None:
    longest = longest_wait(policy().backoff_max)
    shed = trains(queue="gpus", shed=Shed(2, LATER))
    seen = plan(observed(job(shed), [(pod(0), running()), (pod(1), running())])).record
    assert seen.shed == Shed(2, NOW + longest)
    kept = replace(shed, shed=Shed(9, NOW + longest))
    assert not_later(kept, NOW, longest) is kept


def wakes(record: Record) -> datetime | None:
    pods = [(pod(0), running()), (pod(1), running()), (pod(2), ready()), (pod(3), ready())]
    return plan(observed(job(record, policy(2, 4)), pods)).wake_at


def test_a_clock_that_was_set_back_by_an_hour_does_not_hold_growth_up_for_an_hour() -> None:
    wrong = trains(window_since=LATER, resized_at=LATER, recovered_at=LATER)
    assert wakes(wrong) == NOW + seconds(60)
