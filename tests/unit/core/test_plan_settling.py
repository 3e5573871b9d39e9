"""Room for a part of an increment: it is asked for ever more rarely, and at once when there is more room."""

from __future__ import annotations

import itertools
from datetime import datetime

import pytest
from tests.nonempty import every
from tests.unit.core.builders import LONG_AGO, NOW, job, observed, pid, pod, policy, running, seconds, trains

from elastipod_operator.core.partial_gangs import DEMAND_PAUSE, LONGEST_REST
from elastipod_operator.core.plan import plan
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import PartialGang, Record, Transition, TransitionKind
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import ObservedAgent, ObservedPod, Policy

PAIRS = policy(2, 4, sizes=Sizes((2, 4), 2))
HALF: list[tuple[ObservedPod, ObservedAgent | None]] = [
    (pod(0), running()), (pod(1), running()), (pod(2, phase="Pending", started=False), None),
    (pod(3, phase="Pending", node="", ip="", started=False), None),
]  # fmt: skip


def after(record: Record, *, capacity_freed_at: datetime | None = None, wishes: Policy = PAIRS) -> PartialGang:
    gang = plan(observed(job(record, wishes), HALF, capacity_freed_at=capacity_freed_at)).record.gang
    assert gang is not None
    return gang


def rest_s(tries: int, record: Record | None = None) -> float:
    waiting = PartialGang(LONG_AGO, 1, tries)
    gang = after(trains(gang=waiting) if record is None else record)
    assert gang.released_until is not None
    assert gang.tries == tries + 1
    return (gang.released_until - NOW).total_seconds()


def test_the_rests_of_a_job_that_trains_grow_to_an_hour() -> None:
    rests = [rest_s(tries) for tries in range(12)]
    pauses = DEMAND_PAUSE.total_seconds()
    assert rests[0] <= pauses + 12.5
    assert every(later > 1.5 * earlier for earlier, later in itertools.pairwise(rests[2:9]))
    assert pauses + LONGEST_REST.total_seconds() <= rests[-1] <= pauses + 1.25 * LONGEST_REST.total_seconds()


def test_a_job_that_does_not_train_yet_asks_more_often() -> None:
    start = Transition(
        kind=TransitionKind.START, cause=Reason.JOB_CREATED, message="x", from_size=0, target_size=4,
        began_at=LONG_AGO, detected_at=LONG_AGO,
        deadline=LONG_AGO,
    )  # fmt: skip
    held = Record(transition=start, gang=PartialGang(LONG_AGO, 3, 20))
    pods = [(pod(n, phase="Pending", started=False), None) for n in range(3)]
    pods.append((pod(3, phase="Pending", node="", ip="", started=False), None))
    gang = plan(observed(job(held, policy(4, 4)), pods)).record.gang
    assert gang is not None
    assert gang.released_until is not None
    assert gang.released_until - NOW <= DEMAND_PAUSE + 1.25 * PAIRS.backoff_max


@pytest.mark.parametrize(
    ("room_ago_s", "asks"),
    [
        pytest.param(None, False, id="nothing changed"),
        pytest.param(300, False, id="a node came before it was given back"),
        pytest.param(90, False, id="or while others come first"),
        pytest.param(30, True, id="a node came since"),
    ],
)
def test_more_room_ends_a_rest(room_ago_s: float | None, asks: bool) -> None:
    resting = PartialGang(NOW - seconds(100), 0, 7, NOW + seconds(3000))
    gang = after(trains(gang=resting), capacity_freed_at=None if room_ago_s is None else NOW - seconds(room_ago_s))
    assert (gang.released_until is None) is asks
    assert gang.tries == 7, "the next rest is longer all the same"


def test_the_demand_is_one_pod_while_it_rests() -> None:
    resting = trains(gang=PartialGang(NOW - seconds(100), 0, 7, NOW + seconds(3000)))
    todo = plan(observed(job(resting, PAIRS), HALF))
    assert [a for a in todo.actions if getattr(a, "name", "") == pod(pid(3)).name] != [], "the one without a place goes"
    assert not [a for a in todo.actions if getattr(a, "name", "") == pod(pid(2)).name]
