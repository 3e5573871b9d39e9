"""A name that a pod bore is not used again (contracts, 2)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.core.builders import (
    NOW,
    acts,
    faulted,
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

from elastipod_operator.core.actions import CreatePod, DeletePod, StartWorkers
from elastipod_operator.core.names import Slot
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Record, TransitionKind
from elastipod_operator.core.record_codec import decode, encode
from elastipod_operator.core.sizes import Sizes

TWO = [(pod(0), running()), (pod(1), running())]


def test_after_a_planned_shrink_and_a_growth_the_pod_has_another_name() -> None:
    small, large = policy(2, 4, sizes=Sizes((2,), 2)), policy(2, 4)
    shrunk = plan(observed(job(trains(), small), [*TWO, (pod(2), ready(0))]))
    assert [d.name for d in acts(shrunk, DeletePod)] == [pod(2).name]
    gone = plan(observed(job(shrunk.record, small), TWO))
    assert not acts(gone, CreatePod)
    grown = plan(observed(job(gone.record, large), TWO))
    assert [c.pod for c in acts(grown, CreatePod)] == [pid(2, 1)]


@pytest.mark.parametrize(
    "snapshot", [pod(2), pod(2, phase="Pending", node="", ip="", started=False)], ids=["ran", "waited"]
)
def test_a_pod_that_vanishes_takes_its_name_along(snapshot: object) -> None:
    there = plan(observed(job(trains()), [*TWO, (snapshot, None)]))  # type: ignore[list-item]
    vanished = plan(observed(job(there.record), TWO))
    assert pid(2, 1) in [c.pod for c in acts(vanished, CreatePod)]


def test_a_creation_that_came_to_nothing_is_tried_under_the_same_name() -> None:
    first = plan(observed(job(trains()), TWO))
    second = plan(replace(observed(job(first.record), TWO), now=NOW + seconds(60)))
    assert acts(first, CreatePod) == acts(second, CreatePod) != []


def test_what_was_lost_is_remembered_when_it_is_gone() -> None:
    record = trains(lost=(pid(2, 5),), incarnations={Slot("workers", 2): 5})
    todo = plan(observed(job(record), TWO))
    assert todo.record.lost == ()
    assert pid(2, 6) in [c.pod for c in acts(todo, CreatePod)]


def test_it_takes_no_room_in_the_record_of_members() -> None:
    small = trains(4, incarnations={})
    full = trains(4, incarnations={Slot("workers", n): 0 for n in range(4)})
    assert decode(encode(full)) == full
    assert len(encode(full)) <= len(encode(small))


def test_names_outlive_a_suspension() -> None:
    suspends = trains(transition=transition(TransitionKind.SUSPEND, target_size=0))
    away = plan(observed(job(suspends, policy(suspend=True)), [(pod(0), ready(1)), (pod(1), ready(1))]))
    back = plan(observed(job(away.record, policy(2, 2))))
    again = plan(observed(job(back.record, policy(2, 2))))
    made = [c.pod for todo in (back, again) for c in acts(todo, CreatePod)]
    assert set(made) == {pid(0, 1), pid(1, 1)}
    assert isinstance(back.record, Record)


def test_pods_that_an_earlier_version_named_stay_and_are_called_by_their_names() -> None:
    """Until this version the first pod of a place bore its incarnation, too."""
    old = [(replace(pod(n), name=f"job-workers-{n}-0", uid=f"uid-{n}"), running()) for n in range(3)]
    upgraded = plan(observed(job(trains(3), policy(2, 3)), old))
    assert not [a for a in upgraded.actions if not isinstance(a, StartWorkers)]
    shrinks = plan(observed(job(trains(2), policy(2, 2)), old))
    assert [d.name for d in acts(shrinks, DeletePod)] == ["job-workers-2-0"]
    crashed = plan(observed(job(trains(3), policy(2, 3)), [(old[0][0], faulted()), *old[1:]]))
    assert crashed.status["latestFaultyPodInstanceList"]["faultyPodList"] == ["job-workers-0-0"]
    lost = plan(observed(job(trains(2), policy(2, 2)), [old[0]]))
    assert [c.pod.name("job") for c in acts(lost, CreatePod)] == ["job-workers-1-1"], "its name cannot be an old pod's"
