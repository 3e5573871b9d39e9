"""What a job that is deleted has of quota: what waits goes at once, what is granted goes with its pods, and the job goes last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.unit.core.builders import NOW, acts, job, observed, pod, policy, running, seconds, trains
from tests.unit.core.quota_builders import FOUR, QUEUE, evicted, on, pending, train, workload

from elastipod_operator.core.actions import CreatePod, DeletePod, DeleteWorkload, Plan, SetFinalizer
from elastipod_operator.core.ending import DELETION_LIMIT
from elastipod_operator.core.plan import plan
from elastipod_operator.core.quota_requests import QUOTA_RETURN_PATIENCE
from elastipod_operator.core.record import Record
from elastipod_operator.core.snapshot import ObservedWorkload, Snapshot

AWAY = "Kueue does not answer"


def deleted(workloads: Sequence[ObservedWorkload], *pods: Any, since_s: float = 2, **changes: Any) -> Snapshot:
    record: Record | None = changes.pop("record", replace(trains(4), queue=QUEUE))
    kept = {name: changes.pop(name) for name in ("drain_on_delete",) if name in changes}
    fact = job(record, policy(2, 4, payback=False), queue=QUEUE, deleting_since=NOW - seconds(since_s), **kept)
    return observed(fact, pods, workloads=tuple(workloads), **changes)


def dropped(todo: Plan) -> list[int]:
    """Give the numbers of the Workloads that go."""
    return [int(action.uid.removeprefix("uid-")) for action in acts(todo, DeleteWorkload)]


def test_what_waits_goes_at_once_and_what_has_pods_stays() -> None:
    todo = plan(deleted([workload(0, 2), workload(1), pending(2)], *train(3)))
    assert dropped(todo) == [2]
    assert len(acts(todo, DeletePod)) == 3
    assert not acts(todo, CreatePod)


def test_so_it_does_while_the_workers_save() -> None:
    todo = plan(deleted([workload(0, 2), workload(1), pending(2)], *train(3), drain_on_delete=True))
    assert dropped(todo) == [2]
    assert not acts(todo, DeletePod)


def test_a_share_goes_as_its_own_pods_are_gone() -> None:
    assert dropped(plan(deleted(FOUR, *train(2)))) == [1, 2]
    in_its_slot = [(pod(3), running())]  # from before there was a queue
    assert dropped(plan(deleted(FOUR, *in_its_slot))) == [1, 0], "the base comes last"


@pytest.mark.parametrize("record", [None, Record(), replace(trains(2), queue=QUEUE)])
def test_the_job_goes_when_all_is_given_back(record: Record | None) -> None:
    todo = plan(deleted([workload(0, 2), evicted(1)], record=record))
    assert todo.actions == tuple(acts(todo, DeleteWorkload))
    assert dropped(todo) == [1, 0]
    assert plan(deleted([], record=record)).actions == (SetFinalizer(False),)


def test_what_holds_no_quota_or_is_on_its_way_is_not_waited_for() -> None:
    left = [workload(0, 2, finished=True), workload(1, is_deleting=True)]
    assert plan(deleted(left)).actions == (SetFinalizer(False),)


def test_a_job_whose_spec_cannot_be_read_gives_back_by_what_its_pods_say() -> None:
    snapshot = deleted(FOUR, (on(1, 2), running()))
    todo = plan(replace(snapshot, job=replace(snapshot.job, policy=None)))
    assert dropped(todo) == [2, 0]


LIMIT_S = (DELETION_LIMIT + QUOTA_RETURN_PATIENCE).total_seconds()


@pytest.mark.parametrize(
    ("since_s", "workloads", "problem", "goes"),
    [
        pytest.param(2, FOUR, AWAY, False, id="it cannot be given back"),
        pytest.param(2, [], AWAY, False, id="nobody knows what there is"),
        pytest.param(LIMIT_S - 1, FOUR, AWAY, False, id="not yet"),
        pytest.param(LIMIT_S, FOUR, AWAY, True, id="the garbage collector has it"),
        pytest.param(LIMIT_S, FOUR, "", False, id="nobody tried yet: the pods took so long"),
    ],
)
def test_a_job_does_not_wait_for_ever(
    since_s: float, workloads: list[ObservedWorkload], problem: str, goes: bool
) -> None:
    todo = plan(deleted(workloads, since_s=since_s, quota_return_error=problem))
    assert (SetFinalizer(False) in todo.actions) is goes
    if not goes:
        assert len(dropped(todo)) == len(workloads), "it is tried again"
        due = NOW + timedelta(seconds=LIMIT_S - since_s)
        assert todo.wake_at == (due if problem else None)


def test_pods_are_never_left_behind_for_that() -> None:
    todo = plan(deleted(FOUR, *train(4), since_s=LIMIT_S + 60, quota_return_error=AWAY))
    assert SetFinalizer(False) not in todo.actions


def test_the_user_reads_why_the_job_is_still_there() -> None:
    todo = plan(deleted(FOUR, quota_return_error=AWAY))
    warning = next(c for c in todo.conditions if c.type == "Warning")
    assert (warning.status, warning.reason) == (False, "QuotaNotReturned")
    assert warning.message.startswith(f"{AWAY}; the job is deleted nevertheless")
    assert [note.reason for note in todo.events] == ["QuotaNotReturned"]
    assert todo.conditions[-1].type != "Warning"
    assert not [c for c in plan(deleted(FOUR)).conditions if c.reason == "QuotaNotReturned"]
