"""Times on record that lie in the future: whoever wrote them had another clock."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.unit.core.builders import NOW, job, observed, pod, policy, ready, running, seconds, trains, transition

from elastipod_operator.core.backoff import longest_wait
from elastipod_operator.core.clock_skew import TOLERANCE, without_future_times
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import (
    NodeFaults,
    PartialGang,
    PhaseTimes,
    Record,
    RequeueBackoff,
    RestartWindow,
    TransitionKind,
)
from elastipod_operator.core.record_schema import stored_fields

LATER = NOW + timedelta(hours=1)
TIMES = [f.name for f in stored_fields(Record) if f.type == datetime | None]


@pytest.mark.parametrize("name", TIMES)
def test_what_lies_in_the_future_is_taken_for_now(name: str) -> None:
    later: dict[str, Any] = {name: LATER}
    assert getattr(without_future_times(replace(Record(), **later), NOW), name) == NOW


@pytest.mark.parametrize("name", TIMES)
def test_the_little_by_which_clocks_differ_is_left_as_it_is(name: str) -> None:
    within: dict[str, Any] = {name: NOW + TOLERANCE}
    record = replace(Record(), **within)
    assert without_future_times(record, NOW) is record


def test_the_parts_of_a_record_have_times_too() -> None:
    record = Record(
        window=RestartWindow(3, LATER, 1), phase_times=PhaseTimes("training", LATER), node_faults=(NodeFaults("node-1", 2, LATER),),
        gang=PartialGang(LATER, 1, 2, LATER + seconds(90)), transition=transition(began_s=-3600),
    )  # fmt: skip
    snapshot = without_future_times(record, NOW)
    assert (snapshot.window, snapshot.phase_times) == (RestartWindow(3, NOW, 1), PhaseTimes("training", NOW))
    assert snapshot.node_faults == (NodeFaults("node-1", 2, NOW),)
    assert snapshot.gang == PartialGang(NOW, 1, 2, NOW + seconds(90)), "a rest is as long as it was meant to be"
    assert snapshot.transition is not None
    assert (snapshot.transition.began_at, snapshot.transition.detected_at) == (NOW, NOW)
    assert snapshot.transition.deadline == NOW + seconds(600), (
        "the workers have the time for their checkpoint that they had"
    )


def test_a_back_off_lasts_as_long_as_it_was_meant_to() -> None:
    begun = transition(TransitionKind.RECOVERY, began_s=-3600, not_before=LATER + seconds(20))
    snapshot = without_future_times(Record(transition=begun), NOW).transition
    assert snapshot is not None
    assert snapshot.not_before == NOW + seconds(20)


def test_increments_are_not_kept_from_the_queue_for_longer_than_any_back_off() -> None:
    longest = longest_wait(policy().backoff_max)
    shed = trains(queue="gpus", requeue_backoff=RequeueBackoff(2, LATER))
    snapshot = plan(observed(job(shed), [(pod(0), running()), (pod(1), running())])).record
    assert snapshot.requeue_backoff == RequeueBackoff(2, NOW + longest)
    kept = replace(shed, requeue_backoff=RequeueBackoff(9, NOW + longest))
    assert without_future_times(kept, NOW, longest) is kept


def wakes(record: Record) -> datetime | None:
    pods = [(pod(0), running()), (pod(1), running()), (pod(2), ready()), (pod(3), ready())]
    return plan(observed(job(record, policy(2, 4)), pods)).wake_at


def test_a_clock_that_was_set_back_by_an_hour_does_not_hold_growth_up_for_an_hour() -> None:
    wrong = trains(window_since=LATER, resized_at=LATER, recovered_at=LATER)
    assert wakes(wrong) == NOW + seconds(60)
