"""Quota and places: spares that train instead, increments for which there are none, and bases that Kueue may place anew."""

from __future__ import annotations

import pytest
from tests.unit.core.builders import NOW, acts, policy, ready, running, seconds, trains, transition
from tests.unit.core.quota_builders import evicted, look, on, pending, queued, workload

from elastipod_operator.core.actions import CreatePod, CreateWorkload, DeletePod, DeleteWorkload, ReleaseBaseQuota
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import TransitionKind
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import ObservedWorkload, SpecLimits

SPARE = policy(sizes=Sizes((1, 2), 2), specs=(SpecLimits("workers", 2, spares=1),), payback=False)


@pytest.mark.parametrize(
    ("requests", "cause", "why"),
    [
        pytest.param([evicted(1)], "Preempted", "Kueue evicts an increment: a more important job came", id="evicted"),
        pytest.param([], "QuotaLost", "only 1 of 2 replicas has quota", id="taken away"),
    ],
)
def test_the_job_shrinks_for_kueues_reason(requests: list[ObservedWorkload], cause: str, why: str) -> None:
    pods = [(on(0, ordinal), running()) for ordinal in range(2)]
    todo = plan(look(queued(trains(2)), [workload(0, 2), *requests], *pods, wishes=SPARE))
    assert todo.record.transition is not None
    assert (todo.record.transition.cause, todo.record.transition.message) == (cause, why)
    assert todo.record.transition.target_size == 1


def test_an_increment_is_given_back_though_one_of_its_pods_takes_its_time_to_go() -> None:
    """The pod without a place is gone at once; the one with a place still ends, and is no reason to begin anew."""
    wishes = policy(sizes=Sizes((2, 4), 4), specs=(SpecLimits("workers", 4),), payback=False)
    record = queued(trains(2, shrank_after_fault=True))
    requests, members = [workload(0, 2), workload(1, 2)], [(on(0, ordinal), running()) for ordinal in range(2)]
    waits = (on(1, 3, node="", phase="Pending", started=False, created_at=NOW - seconds(120)), None)
    given_up = plan(look(record, requests, *members, (on(1, 2), ready()), waits, wishes=wishes))
    assert {a.name for a in acts(given_up, DeletePod)} == {on(1, 2).name, on(1, 3).name}
    going = (on(1, 2, kill_at=NOW + seconds(30)), ready())
    then = plan(look(given_up.record, requests, *members, going, wishes=wishes))
    assert not acts(then, CreatePod)
    assert not acts(then, DeleteWorkload)
    gone = plan(look(then.record, requests, *members, wishes=wishes))
    assert [a.name for a in acts(gone, DeleteWorkload)] == [workload(1).name]


def test_increments_are_given_back_before_their_base_is_or_comes_back() -> None:
    """Kueue may place it elsewhere, where increments that were pinned to its first place would not be beside it."""
    record = queued(trains(members=(), transition=transition(TransitionKind.SUSPEND, cause="Preempted", target_size=0)))
    leaving = (on(1, 2, kill_at=NOW + seconds(30)), ready())
    going = plan(look(record, [evicted(0, 2), workload(1)], leaving))
    assert (acts(going, ReleaseBaseQuota), acts(going, DeleteWorkload)) == ([], [])
    for request in (workload(1), evicted(1), pending(1)):
        gone = plan(look(going.record, [evicted(0, 2), request]))
        assert (acts(gone, ReleaseBaseQuota), [a.name for a in acts(gone, DeleteWorkload)]) == ([], [request.name])
    for left in ([], [workload(1, is_deleting=True)], [workload(1, finished=True)]):
        assert acts(plan(look(going.record, [evicted(0, 2), *left])), ReleaseBaseQuota) == [
            ReleaseBaseQuota(workload(0).name, "uid-0")
        ]
    taken_away = plan(look(record, [workload(1)], leaving))
    assert (acts(taken_away, CreateWorkload), acts(taken_away, DeleteWorkload)) == ([], [])
    for request in (workload(1), pending(1)):
        last = plan(look(taken_away.record, [request]))
        assert (acts(last, CreateWorkload), len(acts(last, DeleteWorkload))) == ([], 1)
    assert [a.number for a in acts(plan(look(last.record, [])), CreateWorkload)] == [0]
