"""When a growth is due, what it is for, and what breaks it."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    Seen,
    agent,
    context,
    job,
    observed,
    pid,
    pod,
    policy,
    ready,
    running,
    seconds,
    silent,
    trains,
    transition,
)

from elastipod_operator.core.backoff import jitter
from elastipod_operator.core.grant import grant_all
from elastipod_operator.core.growth import (
    growth_due,
    growth_failed,
    growth_timer,
    growth_window,
    mark_interrupted_growth,
    possible_size,
    warm,
    warming_until,
)
from elastipod_operator.core.health import assess
from elastipod_operator.core.record import Record, TransitionKind
from elastipod_operator.core.replica import Replicas
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import Policy


@pytest.mark.parametrize(
    ("changes", "wait_s"),
    [
        pytest.param({"window_since": None}, None, id="no window is open"),
        pytest.param({}, 60, id="scalingTimeout"),
        pytest.param({"recovered_at": NOW}, 70, id="the snooze after a recovery"),
        pytest.param({"recovered_at": NOW - seconds(20)}, 60, id="which may be over before"),
        pytest.param({"resized_at": NOW}, 80, id="the stable time after a resize"),
        pytest.param({"resized_at": NOW - seconds(30)}, 60, id="which may be over before, too"),
        pytest.param({"resized_at": NOW - seconds(5), "recovered_at": NOW}, 75, id="the later one"),
        pytest.param(
            {"resize_failures": 4, "resize_failed_at": NOW}, 80 * (1 + 0.25 * jitter("k", 4)), id="the back-off"
        ),
        pytest.param({"resize_failures": 1, "resize_failed_at": NOW}, 60, id="which may be over before as well"),
        pytest.param({"resize_failures": 0, "resize_failed_at": NOW + seconds(900)}, 60, id="no failure"),
        pytest.param({"resize_failures": 4, "resize_failed_at": None}, 60, id="no time of it"),
    ],
)
def test_when_a_window_closes(changes: dict[str, Any], wait_s: float | None) -> None:
    wishes = policy(snooze=seconds(70), min_stable=seconds(80))
    record = trains(**{"window_since": NOW, **changes})
    assert growth_due(record, wishes, "k", replicas_of()) == (None if wait_s is None else NOW + seconds(wait_s))


@pytest.mark.parametrize(
    ("changes", "state", "wait_s"),
    [
        pytest.param({}, "replicated", 0, id="a replacement joins at once"),
        pytest.param({"recovered_at": NOW - seconds(29.9)}, "replicated", 0, id="which the recovery would have waited for"),
        pytest.param({"recovered_at": NOW - seconds(30)}, "replicated", 60, id="one that comes later is growth like any other"),
        pytest.param({"shrank_after_fault": False}, "replicated", 60, id="nobody is missing"),
        pytest.param({"recovered_at": None}, "replicated", 60, id="no recovery"),
        pytest.param({}, "sharded", 60, id="the recovery has waited"),
        pytest.param({"resize_failures": 1, "resize_failed_at": NOW}, "replicated", 10 * (1 + 0.25 * jitter("k", 1)),
                     id="joining has failed before"),
    ],
)  # fmt: skip
def test_when_a_replacement_joins(changes: dict[str, Any], state: str, wait_s: float) -> None:
    record = trains(**{"window_since": NOW, "recovered_at": NOW - seconds(5), "shrank_after_fault": True, **changes})
    replicas = replicas_of(*((pod(n), running(memory_state=state)) for n in range(2)))
    due = growth_due(record, policy(snooze=seconds(40)), "k", replicas)
    assert due == NOW + seconds(wait_s)
    named = growth_timer(record, policy(snooze=seconds(40)), "k", replicas)
    settings = {0.0: "faultyScaleDownTimeoutInSeconds=30", 60.0: "scalingTimeoutInSeconds=60"}
    assert named == settings.get(wait_s, "spec.elastipod.backoff")


def looked(record: Record, *pods: Seen, wishes: Policy | None = None) -> tuple[Record, datetime | None]:
    wishes = wishes or policy(2, 4)
    snapshot = observed(job(record, wishes), pods)
    replicas = assess(snapshot)
    members = [r for m in record.members if (r := replicas.get(m)) is not None]
    return growth_window(record, context(snapshot, replicas), members)


RUN: list[Seen] = [(pod(0), running()), (pod(1), running())]
COLD = ready(warming=True, answering_since=NOW - seconds(50))


@pytest.mark.parametrize(
    ("ago_s", "pods", "since_s", "wait_s"),
    [
        pytest.param(None, [(pod(2), ready())], 0, 60, id="the first newcomer opens it"),
        pytest.param(40, [(pod(2), ready())], 40, 20, id="it stays open"),
        pytest.param(40, [], None, None, id="nobody is left: it is closed"),
        pytest.param(None, [(pod(2), COLD)], None, 100, id="one that still loads does not open it"),
        pytest.param(10, [(pod(2), ready()), (pod(3), COLD)], 10, 50, id="nor does it put it off"),
        pytest.param(None, [(pod(2), ready(warming=True, answering_since=NOW - seconds(150)))], 0, 60, id="one that loads for ever does"),
        pytest.param(None, [(pod(2), ready(warming=True, answering_since=None))], 0, 60, id="and one of which nobody knows since when"),
        pytest.param(10, [(pod(2), ready()), (pod(3), ready(warming=True, answering_since=NOW - seconds(120)))], 10, 30,
                     id="it is looked at when that one is ready"),
    ],
)  # fmt: skip
def test_the_window(ago_s: float | None, pods: list[Seen], since_s: float | None, wait_s: float | None) -> None:
    record = trains(window_since=None if ago_s is None else NOW - seconds(ago_s))
    after, wake = looked(record, *RUN, *pods)
    assert after.window_since == (None if since_s is None else NOW - seconds(since_s))
    assert wake == (None if wait_s is None else NOW + seconds(wait_s))
    assert after.transition is None


@pytest.mark.parametrize(
    ("number", "message"),
    [
        pytest.param(1, "1 more replica is ready", id="one"),
        pytest.param(2, "2 more replicas are ready", id="two"),
        pytest.param(5, "2 more replicas are ready", id="no more than there is room for"),
    ],
)
def test_what_a_growth_is_for(number: int, message: str) -> None:
    after, wake = looked(trains(window_since=NOW - seconds(60)), *RUN, *((pod(2 + n), ready()) for n in range(number)))
    began = after.transition
    assert began is not None
    assert (began.kind, began.cause, began.message) == (TransitionKind.RESIZE, "CapacityAvailable", message)
    assert (began.from_size, began.target_size, wake) == (2, min(4, 2 + number), None)


@pytest.mark.parametrize(
    ("record", "first"),
    [
        pytest.param(trains(window_since=LONG_AGO, running_since=None), (pod(0), running()), id="not all run yet"),
        pytest.param(trains(window_since=LONG_AGO), (pod(0), silent(20)), id="one does not answer"),
        pytest.param(trains(window_since=LONG_AGO), (pod(0, disruption="x"), running()), id="one is about to go"),
        pytest.param(trains(3, window_since=LONG_AGO), (pod(0), running()), id="one is not seen"),
    ],
)
def test_no_growth_begins_while(record: Record, first: Seen) -> None:
    others = [(pod(1), running(step=9, step_at=NOW)), (pod(3), ready()), (pod(4), ready())]
    after, wake = looked(record, first, *others)
    assert (after.window_since, after.transition, wake) == (None, None, None)


def test_half_an_increment_opens_nothing() -> None:
    pairs = policy(sizes=Sizes((2, 4), 2))
    assert looked(trains(), *RUN, (pod(2), ready()), wishes=pairs)[0].window_since is None
    assert looked(trains(), *RUN, (pod(2), ready()), (pod(3), ready()), wishes=pairs)[0].window_since == NOW


def replicas_of(*pods: Seen) -> Replicas:
    return assess(observed(job(trains()), pods))


def test_the_size_that_would_be_possible() -> None:
    replicas = replicas_of(*RUN, (pod(2), ready()), (pod(3), agent()))
    assert possible_size(trains(), replicas, grant_all(policy(2, 4))) == 3
    assert possible_size(trains(), replicas, grant_all(policy(sizes=Sizes((2, 4), 2)))) == 2


def test_who_is_warm() -> None:
    slow, cold = (
        ready(warming=True, answering_since=NOW - seconds(150)),
        ready(warming=True, answering_since=NOW - seconds(149)),
    )
    replicas = replicas_of((pod(0), ready()), (pod(1), slow), (pod(2), cold))
    assert [r.id for r in warm(replicas.candidates(), NOW)] == [pid(0), pid(1)]
    assert [warming_until(replicas.by_id[pid(n)]) for n in range(3)] == [None, NOW, NOW + seconds(1)]


@pytest.mark.parametrize(
    ("record", "has_failed"),
    [
        pytest.param(trains(size_before_growth=2), True, id="the larger size did not come to run"),
        pytest.param(trains(transition=transition(cause="CapacityAvailable")), True, id="in the middle of it"),
        pytest.param(trains(transition=transition(cause="PodDisrupted")), False, id="another resize"),
        pytest.param(
            trains(transition=transition(TransitionKind.START, cause="CapacityAvailable")), False, id="a start"
        ),
        pytest.param(trains(), False, id="training"),
    ],
)
def test_a_fault_breaks_a_growth(record: Record, has_failed: bool) -> None:
    before = replace(record, resize_failures=2)
    after = mark_interrupted_growth(before, NOW)
    assert after == (growth_failed(before, NOW) if has_failed else before)
    assert growth_failed(before, NOW) == replace(before, size_before_growth=0, resize_failures=3, resize_failed_at=NOW)
