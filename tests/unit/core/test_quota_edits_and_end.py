"""What edits, a suspension and the end of a job do to its quota."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import (
    NOW,
    Seen,
    acts,
    agent,
    pid,
    pod,
    policy,
    ready,
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
    ObservedWorkload,
    Policy,
    Snapshot,
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


@pytest.mark.parametrize(
    "ended", [pytest.param([], id="no pods"), pytest.param([(on(0, 1, phase="Succeeded"), None)], id="a pod has ended")]
)
@pytest.mark.parametrize(
    "base", [pytest.param(workload(0, 2), id="granted"), pytest.param(pending(0, 2), id="pending")]
)
def test_an_edited_template_needs_quota_of_its_own_before_it_runs(base: ObservedWorkload, ended: list[Seen]) -> None:
    held = plan(look(None, [pending(0, 2)])).record
    todo = plan(look(held, [base], *ended, pending_edits=("spec.replicaSpecs[workers].template",)))
    assert todo.adopts_spec
    assert not acts(todo, CreatePod)
    assert todo.wake_at == NOW, (
        "the Workload is compared with the adopted template in the next pass, which nothing else brings"
    )
    dropped = plan(look(todo.record, [replace(base, is_outdated=True)], *ended))
    assert [a.name for a in acts(dropped, DeleteWorkload)] == [workload(0).name]


def test_a_job_that_recovers_without_a_pod_left_keeps_its_quota_and_its_template() -> None:
    """An edit does not take effect before the job is suspended, whether all pods of a full restart end at once or not."""
    begun = transition(TransitionKind.RECOVERY, recreates_pods=True, is_budget_checked=True)
    record = queued(trains(1, members=(), transition=begun))
    ended = [(on(0, 0, phase="Failed"), None)]
    todo = plan(look(record, [workload(0, 2)], *ended, pending_edits=("spec.replicaSpecs[workers].template",)))
    assert not todo.adopts_spec
    assert not acts(todo, DeleteWorkload)
    assert todo.conditions[-1].type != "Suspended"


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


DELETING = on(0, 1, kill_at=NOW)


@pytest.mark.parametrize(
    ("workloads", "pods", "words"),
    [
        pytest.param([], [], "requesting quota for 2 replicas from queue gpus", id="nothing is in the way"),
        pytest.param([], [on(0, 0, phase="Failed")], "requesting quota for 2 replicas", id="nor is a pod that has ended"),
        pytest.param(
            [],
            [on(0, 0, phase="Failed"), DELETING],
            f"there is no base Workload; quota is requested when pod {DELETING.name} has ended",
            id="a pod does not end",
        ),
        pytest.param([], [DELETING, on(0, 2, kill_at=NOW)], f"pod {DELETING.name} (and 1 more) has ended", id="several do not"),
        pytest.param(
            [pending(0, 2, is_deleting=True)],
            [],
            f"Workload {workload(0).name} is being deleted; quota is requested again when it is gone; if it stays, see its "
            "metadata.finalizers",
            id="the base is being deleted",
        ),
        pytest.param(
            [workload(0, 2, is_deleting=True, finished=True)], [], "is being deleted", id="it is not to be deleted again"
        ),
        pytest.param(
            [evicted(0, 2, is_deleting=True)], [], "a more important job came; Workload", id="it is deleted in an eviction"
        ),
    ],
)  # fmt: skip
def test_what_a_base_waits_for_is_told(workloads: list[ObservedWorkload], pods: list[Any], words: str) -> None:
    suspended = plan(look(None, [pending(0, 2)])).record
    todo = plan(look(suspended, workloads, *((one, None) for one in pods)))
    assert todo.conditions[-1].type == "Suspended"
    assert words in todo.conditions[-1].message


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


def with_spares(low: int, high: int, spares: int, limit: int = 0) -> Policy:
    return replace(policy(low, high, payback=False), specs=(SpecLimits("workers", limit or high, spares),))


@pytest.mark.parametrize(
    ("wishes", "base", "size", "spares"),
    [
        pytest.param(with_spares(2, 4, 1), 2, 4, 0, id="a spare is added"),
        pytest.param(with_spares(2, 4, 2), 3, 4, 1, id="another spare is added"),
        pytest.param(with_spares(2, 2, 0), 3, 2, 0, id="the spare is taken away"),
        pytest.param(with_spares(3, 4, 1), 3, 4, 0, id="the spare is needed for a larger minimum"),
    ],
)
def test_a_granted_base_that_covers_the_minimum_stays_when_spares_are_edited(
    wishes: Policy, base: int, size: int, spares: int
) -> None:
    held = [workload(0, base), *(workload(n + 1) for n in range(size - base + spares))]
    pods = [(on(max(0, n + 1 - base), n), running() if n < size else ready(0)) for n in range(size + spares)]
    todo = plan(look(queued(trains(size)), held, *pods, wishes=wishes))
    assert todo.record.transition is None
    assert not [a for a in todo.actions if isinstance(a, DeleteWorkload | CreateWorkload | StopWorkers | DeletePod)]
    told = next(c for c in todo.conditions if c.type == "Warning")
    assert told.reason == "EditsPending"
    assert ("spec.replicaSpecs[workers].spares" in told.message) is (spares < wishes.specs[0].spares)


def test_a_base_beyond_a_lower_maximum_stays_too() -> None:
    """Minimum, maximum and the replicas of the spec are lowered together: the job shrinks, but does not queue again."""
    wishes = with_spares(1, 1, 0)
    begun = plan(look(queued(trains(4)), FOUR, *train(4), wishes=wishes))
    assert begun.record.transition is not None
    assert (begun.record.transition.kind, begun.record.transition.target_size) == (TransitionKind.RESIZE, 1)
    small = plan(look(queued(trains(1)), FOUR[:1], *train(1), wishes=wishes))
    assert small.record.transition is None
    assert not [a for a in small.actions if isinstance(a, DeleteWorkload | SetPodsReady | DeletePod | CreatePod)]
    told = next(c for c in small.conditions if c.type == "Warning")
    assert (told.reason, "more pods of spec.replicaSpecs[workers] than the job may have" in told.message) == (
        "EditsPending",
        True,
    )
    surplus = plan(look(queued(trains(1)), FOUR[:1], *train(1), (on(0, 1), ready(0)), wishes=wishes))
    assert [a.name for a in acts(surplus, DeletePod)] == [pod(1).name], (
        "what the base has room for is not wanted any more"
    )


def _after_two_edits(first: ObservedWorkload) -> Snapshot:
    """Give a job of which a spare was added and then the minimum lowered: its increments begin with a pod of the base spec now.

    Its elastic pod was created on the first increment, and the second one stands for its slot now.
    """
    specs = (SpecLimits("base", 2, spares=1), SpecLimits("extra", 4))
    wishes = policy(1, 3, payback=False, specs=specs)
    members = (pid(0, spec="base"), pid(0, spec="extra"))
    base = workload(0, counts=(("base", 2),))
    second = workload(2, counts=(("extra", 1),))
    pods = [
        (on(0, pid(0, spec="base"), node="a"), running()),
        (on(0, pid(1, spec="base"), node="b"), ready(0)),
        (on(1, pid(0, spec="extra"), node="c"), running()),
    ]
    return look(queued(replace(trains(2), members=members)), [base, first, second], *pods, wishes=wishes)


@pytest.mark.parametrize(
    ("first", "cause"),
    [
        pytest.param(workload(1, counts=(("extra", 1),)), "SpecEdited", id="it fits no more"),
        pytest.param(evicted(1, counts=(("base", 1),)), "Preempted", id="Kueue takes it back"),
        pytest.param(
            workload(1, counts=(("base", 1),), finished=True), "QuotaLost", id="somebody marked it as finished"
        ),
    ],
)
def test_a_pod_leaves_an_increment_that_must_go_although_another_one_stands_for_its_slot(
    first: ObservedWorkload, cause: str
) -> None:
    """Else the increment would never be free of pods, and the job never grow again."""
    todo = plan(_after_two_edits(first))
    assert todo.record.transition is not None
    assert (todo.record.transition.kind, todo.record.transition.cause) == (TransitionKind.RESIZE, cause)


def test_a_pod_stays_whose_increment_went_while_another_one_stands_for_its_slot() -> None:
    """Also while the increment that has its former number is on its way to being admitted."""
    for first in (pending(1, counts=(("base", 1),)), workload(1, counts=(("base", 1),), admitted=False)):
        assert plan(_after_two_edits(first)).record.transition is None


def test_a_spare_that_is_taken_away_goes_while_its_quota_stays() -> None:
    """Both where its spec is at its limit, and where the pod may train now."""
    specs = (SpecLimits("workers", 2), SpecLimits("extra", 2))
    wishes = replace(policy(2, 4, payback=False), specs=specs)
    todo = plan(look(queued(trains(2)), [workload(0, 3)], *train(2), (on(0, 2), ready(0)), wishes=wishes))
    assert todo.record.transition is None
    assert [a.name for a in acts(todo, DeletePod)] == [pod(2).name]
    assert not acts(todo, DeleteWorkload)


def test_spares_come_with_the_next_request_for_the_base() -> None:
    wishes = with_spares(2, 4, 1)
    held = plan(look(None, [], wishes=wishes))
    assert [a.counts for a in acts(held, CreateWorkload)] == [(("workers", 3),)]
    waits = plan(look(held.record, [pending(0, 2)], wishes=wishes))
    assert [a.name for a in acts(waits, DeleteWorkload)] == [workload(0).name]


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
