"""Half gangs: places that make no whole gang or increment are given back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    Seen,
    acts,
    job,
    observed,
    pid,
    pod,
    policy,
    ready,
    running,
    seconds,
    trains,
    transition,
)

from elastipod_operator.core.actions import CreatePod, DeletePod, Plan
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import PartialGang, Record, TransitionKind
from elastipod_operator.core.sizes import Sizes

STARTS = Record(transition=transition(TransitionKind.START, began_s=300, target_size=4), generation=0)
FOUR = policy(4, 4)


def waits(ordinal: int, incarnation: int = 0) -> Seen:
    return pod(pid(ordinal, incarnation), phase="Pending", node="", ip="", started=False), None


def has_place(ordinal: int) -> Seen:
    return pod(ordinal), ready(0)


HALF = [has_place(0), has_place(1), waits(2), waits(3)]


def look(gang: PartialGang | None, pods: list[Seen], **changes: Any) -> Plan:
    return plan(observed(job(replace(STARTS, gang=gang), FOUR), pods, **changes))


def since(ago_s: float, bound: int = 2, tries: int = 0) -> PartialGang:
    return PartialGang(NOW - seconds(ago_s), bound, tries)


def test_an_incomplete_gang_is_watched_from_its_first_place_on() -> None:
    todo = look(None, HALF)
    assert todo.record.gang == PartialGang(NOW, 2)
    assert todo.wake_at is not None
    assert seconds(120) <= todo.wake_at - NOW <= seconds(180)
    assert not acts(todo, DeletePod)


@pytest.mark.parametrize(
    ("gang", "pods", "expected"),
    [
        pytest.param(since(100, 1), HALF, PartialGang(NOW, 2), id="each further place gives it new patience"),
        pytest.param(since(100, 3), HALF, since(100, 3), id="a place that is lost and found again does not"),
        pytest.param(since(100), [waits(n) for n in range(4)], None, id="without any place there is nothing to give back"),
        pytest.param(since(999), [has_place(n) for n in range(4)], None, id="a whole gang starts"),
        pytest.param(since(999), [has_place(0), has_place(1)], None, id="nobody waits for a place: pods are only being made"),
    ],
)  # fmt: skip
def test_patience(gang: PartialGang, pods: list[Seen], expected: PartialGang | None) -> None:
    assert look(gang, pods).record.gang == expected


def test_places_are_given_back_after_two_minutes() -> None:
    early, late = look(since(119), HALF), look(since(181), HALF)
    assert not acts(early, DeletePod)
    assert {a.name for a in acts(late, DeletePod)} == {p.name for p, _ in HALF}, "the demand comes back a little later"
    gang = late.record.gang
    assert gang is not None
    assert (gang.since, gang.tries) == (NOW, 1)
    assert gang.released_until is not None
    assert [n.reason for n in late.events] == ["PlacesGivenBack"]
    assert late.wake_at is not None
    assert late.wake_at <= NOW + seconds(20)


def test_different_jobs_have_different_patience() -> None:
    wakes = set()
    for name in ("a", "b", "c", "d"):
        todo = plan(observed(replace(job(STARTS, FOUR), uid=name), HALF))
        assert todo.wake_at is not None
        wakes.add(todo.wake_at)
    assert len(wakes) == 4


RESTS = PartialGang(NOW - seconds(5), 0, 1, NOW + seconds(60))


@pytest.mark.parametrize(
    ("gang", "pods", "made", "rests"),
    [
        pytest.param(RESTS, [], 0, True, id="at first nothing is asked for: others come first"),
        pytest.param(replace(RESTS, since=NOW - seconds(20)), [], 1, True, id="then one pod is the demand"),
        pytest.param(replace(RESTS, since=NOW - seconds(20)), [waits(0, 1)], 0, True, id="and stays it"),
        pytest.param(PartialGang(LONG_AGO, 0, 1, NOW), [waits(0, 1)], 0, True, id="also after the rest, while there is no room for it"),
        pytest.param(PartialGang(LONG_AGO, 0, 1, NOW + seconds(9)), [has_place(0)], 0, True, id="not even room ends the rest"),
        pytest.param(PartialGang(LONG_AGO, 0, 1, NOW), [has_place(0)], 3, False, id="room after the rest brings the whole gang back"),
    ],
)  # fmt: skip
def test_the_rest(gang: PartialGang, pods: list[Seen], made: int, rests: bool) -> None:
    todo = look(gang, pods)
    assert len(acts(todo, CreatePod)) == made
    after = todo.record.gang
    assert after is not None
    assert (after.released_until is not None) is rests
    assert after.tries == 1, "the next rest is longer"


def test_rests_grow_and_have_an_end() -> None:
    rests = []
    for tries in range(12):
        gang = look(since(999, 2, tries), HALF).record.gang
        assert gang is not None
        assert gang.released_until is not None
        rests.append((gang.released_until - NOW).total_seconds())
    assert rests[0] <= 20 + 12.5
    assert 20 + 300 <= rests[-1] <= 20 + 375
    assert rests[3] > rests[0]


def test_an_incomplete_increment_is_given_back_while_training_goes_on() -> None:
    wishes = policy(sizes=Sizes((2, 4), 2))
    pods = [(pod(0), running()), (pod(1), running()), (pod(2), ready()), waits(3)]
    first = plan(observed(job(trains(), wishes), pods))
    assert first.record.gang == PartialGang(NOW, 1)
    record = trains(gang=PartialGang(NOW - seconds(181), 1))
    then = plan(observed(job(record, wishes), pods))
    assert {a.name for a in acts(then, DeletePod)} == {pod(2).name, pod(3).name}
    assert (then.record.members, then.record.transition) == (record.members, None)
    scaling = next(c for c in then.conditions if c.type == "Scaling")
    assert "was released" in scaling.message


def test_whole_increments_are_kept() -> None:
    wishes = policy(sizes=Sizes((2, 4, 6), 2), specs=policy(2, 6).specs)
    pods = [(pod(0), running()), (pod(1), running()), *((pod(n), ready()) for n in (2, 3, 4)), waits(5)]
    record = trains(gang=PartialGang(NOW - seconds(181), 1), window_since=NOW)
    todo = plan(observed(job(record, wishes), pods))
    assert {a.name for a in acts(todo, DeletePod)} == {pod(4).name, pod(5).name}


def test_a_recovery_that_finds_too_little_room_gives_back_what_it_has() -> None:
    """Two jobs that lost a node each would wait for each other's places for ever."""
    began = transition(TransitionKind.RECOVERY, target_size=4, uses_budget=True, is_budget_checked=True)
    record = trains(4, transition=began, gang=since(181, 3), fault_at=NOW, retries=1)
    pods = [(pod(0), ready(1)), (pod(1), ready(1)), (pod(2), ready(1)), waits(3, 1)]
    todo = plan(observed(job(record, FOUR), pods))
    assert len(acts(todo, DeletePod)) == 4
    assert todo.record.members == ()
    then = plan(observed(job(todo.record, FOUR), []))
    assert then.record.retries == 1, "who is given back is not at fault"


def test_a_refused_pod_is_a_lack_of_room_too() -> None:
    pods = [has_place(0), has_place(1)]
    todo = look(since(181), pods, pod_creation_error="exceeded quota", pod_creation_retry_at=NOW + seconds(60))
    assert len(acts(todo, DeletePod)) == 2


def test_new_changes_begin_without_old_rests() -> None:
    """A rest over an increment must not keep the replacements of a fault from being made."""
    resting = trains(3, gang=PartialGang(NOW, 0, 2, NOW + seconds(300)))
    todo = plan(observed(job(resting, policy(2, 4)), [(pod(0), running()), (pod(1), running())]))
    assert todo.record.gang is None
    assert pid(2, 1) in [a.pod for a in acts(todo, CreatePod)]


def test_a_smallest_size_of_one_is_never_half() -> None:
    todo = plan(observed(job(replace(STARTS, gang=None), policy(1, 4)), [has_place(0), waits(1)]))
    assert todo.record.gang is None
