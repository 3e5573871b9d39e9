"""Counting places, and which pods are asked for while some are given back."""

from __future__ import annotations

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
    replicas_of,
    running,
    seconds,
    trains,
    transition,
)

from elastipod_operator.core.actions import JobEvent
from elastipod_operator.core.backoff import jitter
from elastipod_operator.core.grant import grant_all
from elastipod_operator.core.health import assess
from elastipod_operator.core.names import Slot
from elastipod_operator.core.partial_gangs import (
    PlacedPods,
    count_placed_pods,
    follow_partial_gang,
    next_gang_check,
    restrict_slots,
)
from elastipod_operator.core.record import PartialGang, Record, TransitionKind
from elastipod_operator.core.replica import Replicas
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import Policy

STARTS = Record(transition=transition(TransitionKind.START, target_size=4))
EVEN = policy(sizes=Sizes((2, 4), 2))
FOUR = policy(4, 4)


def bound(ordinal: int) -> Seen:
    return pod(ordinal), ready(0)


def waits(ordinal: int) -> Seen:
    return pod(ordinal, phase="Pending", node="", ip="", started=False), None


@pytest.mark.parametrize(
    ("record", "wishes", "pods", "expected"),
    [
        pytest.param(STARTS, FOUR, [], PlacedPods(0, 0), id="none"),
        pytest.param(STARTS, FOUR, [bound(0), waits(1)], PlacedPods(0, 1), id="one of four"),
        pytest.param(STARTS, FOUR, [bound(n) for n in range(3)], PlacedPods(0, 3), id="three of four, the last is not made yet"),
        pytest.param(STARTS, EVEN, [*(bound(n) for n in range(3)), waits(3)], PlacedPods(2, 0),
                     id="before a start what goes beyond a size harms nobody"),
        pytest.param(STARTS, FOUR, [bound(0), (pod(2, phase="Failed"), None)], PlacedPods(0, 1), id="who has ended holds none"),
        pytest.param(STARTS, FOUR, [bound(0), (pod(1, disruption="x"), ready(0))], PlacedPods(0, 1), id="nor who is about to go"),
        pytest.param(trains(), EVEN, [(pod(0), running()), (pod(1), running()), bound(2), waits(3)], PlacedPods(2, 1),
                     id="half an increment"),
        pytest.param(trains(), EVEN, [(pod(0), running()), (pod(1), running()), bound(2), bound(3)], PlacedPods(4, 0),
                     id="a whole one"),
        pytest.param(trains(), EVEN, [(pod(0), running())], PlacedPods(2, 0), id="members count, also one that is not seen"),
        pytest.param(trains(3), EVEN, [], PlacedPods(3, 0), id="and at a size that is not allowed any more"),
        pytest.param(trains(1), EVEN, [], PlacedPods(1, 0), id="or too small now"),
    ],
)  # fmt: skip
def test_places(record: Record, wishes: Policy, pods: list[Seen], expected: PlacedPods) -> None:
    assert count_placed_pods(record, replicas_of(record, *pods), grant_all(wishes)) == expected


def follow(record: Record, replicas: Replicas, wishes: Policy, key: str) -> tuple[Record, tuple[JobEvent, ...]]:
    return follow_partial_gang(record, context(observed(job(record, wishes, uid=key)), replicas))


def given_back(tries: int, key: str = "k") -> Record:
    record = Record(transition=STARTS.transition, gang=PartialGang(NOW - seconds(999), 2, tries))
    replicas = replicas_of(record, bound(0), bound(1), waits(2))
    return follow(record, replicas, FOUR, key)[0]


@pytest.mark.parametrize(("tries", "wait_s"), [(0, 10), (1, 20), (2, 40), (9, 300)])
def test_the_rest_is_twenty_seconds_and_the_backoff(tries: int, wait_s: float) -> None:
    gang = given_back(tries).gang
    assert gang is not None
    assert (gang.since, gang.bound, gang.tries) == (NOW, 0, tries + 1)
    assert gang.released_until == NOW + seconds(20) + seconds(wait_s) * (1 + 0.25 * jitter("k", tries + 1))


def test_what_is_given_back_is_told_in_figures() -> None:
    first = Record(transition=STARTS.transition, gang=PartialGang(NOW - seconds(200), 2))
    _, events = follow(first, replicas_of(first, bound(0), bound(1), waits(2)), FOUR, "k")
    assert [n.message.split(":")[0] for n in events] == ["2 pods had nodes for 200 s, too few for the minimum size"]
    more = trains(gang=PartialGang(NOW - seconds(190), 1))
    pods = [(pod(0), running()), (pod(1), running()), bound(2), waits(3)]
    kept, events = follow(more, replicas_of(more, *pods), EVEN, "k")
    assert [n.message.split(":")[0] for n in events] == ["1 pod had a node for 190 s, too few for a whole increment"]
    assert kept.members == more.members
    assert kept.incarnations == {Slot("workers", n): 0 for n in range(4)}, "names are not used again"


RESTING = PartialGang(LONG_AGO, 0, 3, NOW + seconds(1))


@pytest.mark.parametrize(
    ("gang", "pods", "expected"),
    [
        pytest.param(
            PartialGang(LONG_AGO, 2, 3),
            [waits(0)],
            PartialGang(NOW, 0, 3),
            id="tries are not forgotten when the places go",
        ),
        pytest.param(PartialGang(LONG_AGO, 0, 3), [waits(0)], PartialGang(LONG_AGO, 0, 3), id="which is noted once"),
        pytest.param(PartialGang(LONG_AGO, 2, 0), [waits(0)], None, id="what was never given back is forgotten"),
        pytest.param(
            PartialGang(NOW - seconds(9), 1, 3),
            [bound(0), bound(1), waits(2)],
            PartialGang(NOW, 2, 3),
            id="nor with more of them",
        ),
        pytest.param(RESTING, [bound(0), waits(1)], RESTING, id="a rest lasts"),
        pytest.param(
            PartialGang(LONG_AGO, 0, 3, NOW),
            [bound(0), waits(1)],
            PartialGang(NOW, 1, 3),
            id="until it is over and there is room",
        ),
        pytest.param(
            PartialGang(LONG_AGO, 0, 3, NOW), [waits(1)], PartialGang(LONG_AGO, 0, 3, NOW), id="and not without room"
        ),
    ],
)
def test_how_a_gang_is_followed(gang: PartialGang, pods: list[Seen], expected: PartialGang | None) -> None:
    record = Record(transition=STARTS.transition, gang=gang)
    after, events = follow(record, replicas_of(record, *pods), FOUR, "k")
    assert (after.gang, events) == (expected, ())


@pytest.mark.parametrize(
    ("gang", "wait_s"),
    [
        pytest.param(None, None, id="no gang"),
        pytest.param(PartialGang(NOW - seconds(20), 0, 2), None, id="nobody has a place: the watch tells"),
        pytest.param(
            PartialGang(NOW - seconds(20), 1, 2), 120 * (1 + 0.5 * jitter("k", 2)) - 20, id="when its patience ends"
        ),
        pytest.param(PartialGang(NOW - seconds(5), 0, 1, NOW + seconds(60)), 15, id="when the demand comes back"),
        pytest.param(PartialGang(NOW - seconds(20), 0, 1, NOW + seconds(60)), 60, id="when the rest is over"),
        pytest.param(PartialGang(NOW - seconds(90), 0, 1, NOW), None, id="after that the watch tells"),
    ],
)
def test_when_a_gang_is_looked_at(gang: PartialGang | None, wait_s: float | None) -> None:
    found = next_gang_check(Record(gang=gang), "k", NOW)
    assert found == (None if wait_s is None else NOW + seconds(wait_s))


@pytest.mark.parametrize(
    ("room_s", "is_over"),
    [
        pytest.param(None, False, id="no more room came to be"),
        pytest.param(-81, False, id="some did before the places were given back"),
        pytest.param(-80, False, id="or right after it"),
        pytest.param(-79, True, id="some did later"),
    ],
)
def test_a_rest_ends_when_there_comes_to_be_more_room(room_s: float | None, is_over: bool) -> None:
    resting = PartialGang(NOW - seconds(100), 0, 3, NOW + seconds(999))
    record = Record(transition=STARTS.transition, gang=resting)
    capacity_freed_at = None if room_s is None else NOW + seconds(room_s)
    replicas = assess(observed(job(record), [bound(0), waits(1)], capacity_freed_at=capacity_freed_at))
    after, _ = follow(record, replicas, FOUR, "k")
    assert after.gang == (PartialGang(NOW, 1, 3) if is_over else resting)
    alone = assess(observed(job(record), [waits(1)], capacity_freed_at=capacity_freed_at))
    assert follow(record, alone, FOUR, "k")[0].gang == resting, "and somebody has a place"


def test_a_job_that_trains_asks_ever_more_rarely() -> None:
    """A job that waits for its start asks every five minutes, one that waits to grow every hour."""
    record = trains(gang=PartialGang(LONG_AGO, 1, 20))
    pods = [(pod(0), running()), (pod(1), running()), bound(2), waits(3)]
    gang = follow(record, replicas_of(record, *pods), EVEN, "k")[0].gang
    assert gang is not None
    assert gang.released_until is not None
    assert seconds(3620) <= gang.released_until - NOW <= seconds(20 + 1.25 * 3600)


def slots(*ordinals: int) -> list[Slot]:
    return [Slot("workers", n) for n in ordinals]


RESTS = PartialGang(NOW - seconds(20), 0, 1, NOW + seconds(60))
EARLY = PartialGang(NOW - seconds(19), 0, 1, NOW + seconds(60))


@pytest.mark.parametrize(
    ("record", "pods", "left"),
    [
        pytest.param(Record(transition=STARTS.transition, gang=PartialGang(NOW, 2)), [], slots(0, 1, 2, 3), id="nothing is given back"),
        pytest.param(Record(transition=STARTS.transition), [], slots(0, 1, 2, 3), id="there is no gang"),
        pytest.param(Record(transition=STARTS.transition, gang=EARLY), [], [], id="at first nobody is asked for"),
        pytest.param(Record(transition=STARTS.transition, gang=RESTS), [], slots(0), id="then one"),
        pytest.param(Record(transition=STARTS.transition, gang=RESTS), [bound(2)], slots(2), id="the one that has a place"),
        pytest.param(trains(gang=EARLY), [], slots(0, 1), id="those who train stay"),
        pytest.param(trains(gang=RESTS, transition=STARTS.transition), [], slots(0), id="not those who trained"),
        pytest.param(trains(gang=RESTS), [], slots(0, 1, 2), id="beside one that shows the demand"),
        pytest.param(trains(gang=RESTS), [bound(3)], slots(0, 1, 3), id="best one that has a place"),
        pytest.param(trains(gang=RESTS), [bound(2), bound(3)], slots(0, 1, 2, 3), id="and whole increments"),
        pytest.param(trains(gang=EARLY), [bound(2), bound(3)], slots(0, 1, 2, 3), id="at any time"),
    ],
)  # fmt: skip
def test_which_pods_are_wanted_while_places_are_given_back(record: Record, pods: list[Seen], left: list[Slot]) -> None:
    replicas = replicas_of(record, *pods)
    assert restrict_slots(slots(0, 1, 2, 3), record, replicas, grant_all(EVEN if record.members else FOUR), NOW) == left


@pytest.mark.parametrize(
    "other",
    [
        pytest.param((pod(3, phase="Failed"), None), id="ended"),
        pytest.param((pod(3, disruption="x"), agent()), id="about to go"),
        pytest.param(waits(3), id="without a place"),
    ],
)
def test_a_place_that_is_none_shows_no_demand(other: Any) -> None:
    record = trains(gang=RESTS)
    assert restrict_slots(slots(0, 1, 2, 3), record, replicas_of(record, other), grant_all(EVEN), NOW) == slots(0, 1, 2)
    assert pid(3).slot not in restrict_slots(
        slots(0, 1, 2, 3), record, replicas_of(record, other), grant_all(EVEN), NOW
    )
