"""What edits, a suspension and the end of a job do to its quota."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.core.builders import (
    NOW,
    acts,
    agent,
    policy,
    running,
    trains,
    transition,
)
from tests.unit.core.quota_builders import FOUR, evicted, look, on, pending, queued, train, workload

from elastipod_operator.core.actions import (
    CreatePod,
    CreateWorkload,
    DeletePod,
    DeleteWorkload,
    FinishWorkload,
    ReleaseBaseQuota,
    SetPodsReady,
    StopWorkers,
)
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Record, TransitionKind
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import (
    AgentState,
    Policy,
    SpecLimits,
)


def test_a_suspended_job_gives_everything_back_once_its_pods_are_gone() -> None:
    wishes = policy(2, 4, suspend=True)
    begun = plan(look(queued(trains(3)), FOUR[:2], *train(3), wishes=wishes))
    assert not acts(begun, DeleteWorkload)
    todo = plan(look(replace(begun.record, members=()), FOUR[:2], wishes=wishes))
    assert [a.name for a in acts(todo, DeleteWorkload)] == [workload(1).name, workload(0).name]
    assert not acts(todo, CreateWorkload)
    assert todo.conditions[-1].reason == "SuspendedByUser"


def test_an_edited_template_needs_quota_of_its_own_before_it_runs() -> None:
    held = plan(look(None, [pending(0, 2)])).record
    todo = plan(look(held, [workload(0, 2)], pending_edits=("spec.replicaSpecs[workers].template",)))
    assert todo.adopts_spec
    assert not acts(todo, CreatePod)
    dropped = plan(look(todo.record, [workload(0, 2, is_outdated=True)]))
    assert [a.name for a in acts(dropped, DeleteWorkload)] == [workload(0).name]


def test_a_larger_minimum_is_asked_for_anew() -> None:
    todo = plan(look(queued(trains()), [workload(0, 2)], *train(2), wishes=policy(3, 4)))
    assert todo.record.transition is not None
    assert (todo.record.transition.kind, todo.record.transition.cause) == (TransitionKind.SUSPEND, "SpecEdited")


def test_of_two_bases_the_newer_one_says_why_the_job_is_suspended() -> None:
    """The old one, of another size, is not gone yet; what the job waits for is the new one's quota."""
    suspended = plan(look(None, [pending(0, 2)])).record
    todo = plan(look(suspended, [evicted(0, 3, is_deleting=True), pending(0, 2)]))
    condition = todo.conditions[-1]
    assert (condition.type, condition.reason) == ("Suspended", "Queued")
    assert "no room" in condition.message


@pytest.mark.parametrize(
    ("wishes", "size"),
    [
        pytest.param(policy(1, 4, payback=False), 4, id="lower by one"),
        pytest.param(
            policy(1, 4, payback=False, sizes=Sizes((1, 3, 4), 1)), 4, id="so that its base is no allowed size"
        ),
        pytest.param(policy(1, 4, payback=False, sizes=Sizes(range(1, 5), 1)), 4, id="many sizes"),
    ],
)
def test_a_lower_minimum_stops_nobody(wishes: Policy, size: int) -> None:
    """The base was granted for the old one and stays; a condition says so."""
    todo = plan(look(queued(trains(size)), FOUR, *train(size), wishes=wishes))
    assert todo.record.transition is None
    assert not [
        a
        for a in todo.actions
        if isinstance(a, DeleteWorkload | CreateWorkload | StopWorkers | DeletePod | SetPodsReady)
    ]
    told = next(c for c in todo.conditions if c.type == "Warning")
    assert (told.reason, "a base of 2 replicas" in told.message) == ("EditsPending", True)


def test_below_the_old_minimum_a_job_may_shrink_and_keeps_its_base() -> None:
    wishes = policy(1, 1, payback=False)
    begun = plan(
        look(queued(trains(2)), [workload(0, 2)], *train(2), wishes=replace(wishes, specs=(SpecLimits("workers", 2),)))
    )
    assert begun.record.transition is not None
    assert (begun.record.transition.kind, begun.record.transition.cause) == (TransitionKind.RESIZE, "ScaledByUser")
    small = look(
        queued(trains(1)), [workload(0, 2)], *train(1), wishes=replace(wishes, specs=(SpecLimits("workers", 2),))
    )
    assert not [a for a in plan(small).actions if isinstance(a, DeleteWorkload | SetPodsReady | DeletePod)]


def test_a_base_that_waits_is_asked_for_anew_when_the_minimum_is_lowered() -> None:
    todo = plan(look(plan(look(None, [pending(0, 2)])).record, [pending(0, 2)], wishes=policy(1, 4)))
    assert [a.name for a in acts(todo, DeleteWorkload)] == [workload(0).name]


def test_a_base_that_kueue_takes_back_comes_back_as_the_smaller_one() -> None:
    record = queued(trains(2))
    todo = plan(look(record, [evicted(0, 2)], *train(2), wishes=policy(1, 4)))
    assert todo.record.transition is not None
    assert todo.record.transition.kind is TransitionKind.SUSPEND
    held = replace(todo.record, members=())
    assert acts(plan(look(held, [evicted(0, 2)], wishes=policy(1, 4))), ReleaseBaseQuota)
    again = plan(look(held, [pending(0, 2)], wishes=policy(1, 4)))
    assert [a.name for a in acts(again, DeleteWorkload)] == [workload(0).name]
    asked = plan(look(held, [], wishes=policy(1, 4)))
    assert [(a.number, a.counts) for a in acts(asked, CreateWorkload)] == [(0, (("workers", 1),))]


def test_a_lowered_minimum_acts_on_the_quota_at_the_next_suspension() -> None:
    wishes = policy(1, 4, suspend=True)
    todo = plan(
        look(
            queued(replace(trains(2), members=(), transition=transition(TransitionKind.SUSPEND))),
            [workload(0, 2)],
            wishes=wishes,
        )
    )
    assert [a.name for a in acts(todo, DeleteWorkload)] == [workload(0).name]


def test_a_lower_maximum_gives_the_last_increment_back() -> None:
    todo = plan(look(queued(trains(3)), FOUR, *train(3), wishes=policy(2, 3)))
    assert [a.name for a in acts(todo, DeleteWorkload)] == [workload(2).name]


@pytest.mark.parametrize("outcome", ["Completed", "Failed"])
def test_the_end_is_told_to_kueue_once_the_pods_are_gone(outcome: str) -> None:
    record = queued(trains(outcome=outcome, outcome_reason=outcome, outcome_message="why", ended_at=NOW))
    runs = (on(0, 0), agent(AgentState.COMPLETED))
    assert not acts(plan(look(record, [workload(0, 2)], runs)), FinishWorkload)
    todo = plan(look(record, FOUR[:2], (replace(runs[0], phase="Succeeded"), None)))
    assert acts(todo, FinishWorkload) == [
        FinishWorkload(w.name, w.uid, outcome == "Completed", "why") for w in FOUR[:2]
    ]  # fmt: skip
    for over in ({"finished": True}, {"is_deleting": True}):
        rest = plan(look(record, [workload(0, 2, **over), workload(1)]))
        assert [a.name for a in acts(rest, FinishWorkload)] == [workload(1).name]


def test_what_waits_at_the_end_is_asked_for_no_more() -> None:
    """Kueue could grant an increment while it is told that the job has ended. A base that waited is told of: users look for it."""
    record = queued(trains(2, outcome="Failed", outcome_message="why", ended_at=NOW))
    todo = plan(look(record, [workload(0, 2), workload(1), pending(2)], *train(2)))
    assert [a.name for a in acts(todo, DeleteWorkload)] == [pending(2).name], "before the pods are gone"
    assert [a.name for a in acts(todo, FinishWorkload)] == [workload(1).name]
    never = plan(look(record, [pending(0, 2)]))
    assert [a.name for a in acts(never, FinishWorkload)] == [pending(0, 2).name]


@pytest.mark.parametrize(
    ("known", "pods", "expected"),
    [
        pytest.param(None, 2, [True], id="all are there"),
        pytest.param(True, 2, [], id="known"),
        pytest.param(True, 1, [False], id="one went"),
        pytest.param(None, 1, [], id="not yet, which needs no word"),
    ],
)
def test_kueue_is_told_of_ready_pods(known: bool | None, pods: int, expected: list[bool]) -> None:
    todo = plan(look(queued(trains()), [workload(0, 2, pods_ready=known)], *train(pods)))
    assert [a.ready for a in acts(todo, SetPodsReady)] == expected


def test_ready_pods_count_for_the_base_first() -> None:
    """One pod of the base waits for a place: what Kueue takes back for that is the last increment, whose pod has one."""
    pods = [(on(0, 0), running()), (on(0, 1, phase="Pending", started=False, ip=""), None), *train(4)[2:]]
    todo = plan(look(queued(trains(4)), FOUR, *pods))
    assert [(a.name, a.ready) for a in acts(todo, SetPodsReady)] == [(workload(2).name, False)]
    one_of_two = [workload(0, 2), workload(1), workload(2, pods_ready=None)]
    assert not acts(plan(look(queued(trains(4)), one_of_two, *pods)), SetPodsReady)


def test_a_spare_stands_in_for_a_pod_of_an_increment() -> None:
    wishes = replace(policy(2, 3, payback=False), specs=(SpecLimits("workers", 3, 1),))
    granted = [workload(0, 3), workload(1, pods_ready=None)]
    for spares, expected in ((1, [True]), (0, [])):
        pods = [(on(0, n), running()) for n in range(2 + spares)]
        todo = plan(look(queued(trains(2)), granted, *pods, wishes=wishes))
        assert [a.ready for a in acts(todo, SetPodsReady)] == expected


def test_a_job_that_has_left_its_queue_returns_what_no_pod_uses() -> None:
    left = Record(transition=transition(TransitionKind.START))
    todo = plan(look(left, FOUR, queue=""))
    assert {(a.name, a.reason) for a in acts(todo, DeleteWorkload)} == {
        (w.name, "the job is no longer in a queue") for w in FOUR
    }
