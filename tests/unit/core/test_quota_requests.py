"""How a job's quota grows and shrinks: which increments are asked for, told of, left and given back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import (
    NOW,
    acts,
    agent,
    job,
    observed,
    pid,
    policy,
    ready,
    running,
    seconds,
    silent,
    trains,
    transition,
)
from tests.unit.core.quota_builders import FOUR, evicted, look, on, pending, queued, train, workload

from elastipod_operator.core.actions import (
    CreatePod,
    CreateWorkload,
    DeletePod,
    DeleteWorkload,
    StopWorkers,
)
from elastipod_operator.core.backoff import backoff
from elastipod_operator.core.growth_mode import GrowthMode
from elastipod_operator.core.names import PodId
from elastipod_operator.core.plan import plan
from elastipod_operator.core.pod_removal import LEAVERS_STAY
from elastipod_operator.core.quota import quota_requests_of
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import PartialGang, Record, RequeueBackoff, TransitionKind
from elastipod_operator.core.requested_pods import READ_EVERY
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import (
    ObservedNode,
    SpareCapacity,
    SpecLimits,
)


def test_granted_increments_bring_their_pods() -> None:
    todo = plan(look(queued(trains()), [workload(0, 2), workload(1), pending(2)], *train(2)))
    assert [(a.pod, a.workload) for a in acts(todo, CreatePod)] == [(pid(2), workload(1).name)]
    assert not acts(todo, CreateWorkload)


def test_what_increments_wait_for_is_told_in_kueues_words() -> None:
    todo = plan(look(queued(trains()), [workload(0, 2), pending(1), pending(2)], *train(2)))
    scaling = next(c for c in todo.conditions if c.type == "Scaling")
    assert (scaling.reason, scaling.message) == (
        "Queued",
        "2 more replicas are wanted; the request waits in queue gpus: no room",
    )
    assert str(todo.size) == "2/2/4"


@pytest.mark.parametrize(
    ("record", "changes", "rest"),
    [
        pytest.param(trains(), {}, "requesting quota from queue gpus", id="it is being requested"),
        pytest.param(
            trains(), {"queue_problem": (Reason.PRIORITY_CLASS_MISSING, "no class x")},
            "requesting quota from queue gpus: no class x", id="what is wrong with the request",
        ),
        pytest.param(
            trains(requeue_backoff=RequeueBackoff(1, NOW + seconds(5))), {},
            "next request to queue gpus at 12:00:05 UTC", id="later",
        ),
    ],
)  # fmt: skip
def test_increments_that_are_not_requested_yet_are_told_of(record: Record, changes: dict[str, Any], rest: str) -> None:
    todo = plan(look(queued(record), [workload(0, 2)], *train(2), **changes))
    scaling = next(c for c in todo.conditions if c.type == "Scaling")
    assert (scaling.reason, scaling.message) == ("Queued", f"2 more replicas are wanted; {rest}")


def test_an_evicted_increment_is_left_in_order_and_then_given_back() -> None:
    record = queued(trains(4))
    requests = [workload(0, 2), workload(1), evicted(2)]
    todo = plan(look(record, requests, *train(4)))
    assert todo.record.transition is not None
    assert (todo.record.transition.cause, todo.record.transition.target_size) == ("Preempted", 3)
    assert {a.graceful for a in acts(todo, StopWorkers)} == {True}
    assert not acts(todo, DeleteWorkload)
    is_idle = [(p, ready(1, drained=True)) for p, _ in train(4)]
    shrunk = plan(look(todo.record, requests, *is_idle))
    assert shrunk.record.members == (pid(0), pid(1), pid(2))
    later = plan(look(shrunk.record, requests, *is_idle, now=NOW + LEAVERS_STAY))
    assert [a.name for a in acts(later, DeletePod)] == [on(2, 3).name]
    assert not acts(shrunk, DeleteWorkload)
    gone = plan(look(shrunk.record, requests, *train(3)))
    assert [a.name for a in acts(gone, DeleteWorkload)] == [evicted(2).name]
    assert gone.record.requeue_backoff == RequeueBackoff(
        1, gone.record.requeue_backoff.until if gone.record.requeue_backoff else NOW
    )
    assert not acts(gone, CreateWorkload)
    later = plan(look(gone.record, requests[:2], *train(3)))
    assert not acts(later, CreateWorkload)
    assert gone.record.requeue_backoff is not None
    assert later.wake_at is not None
    assert later.wake_at <= gone.record.requeue_backoff.until
    asked = plan(replace(look(gone.record, requests[:2], *train(3)), now=gone.record.requeue_backoff.until))
    assert [a.number for a in acts(asked, CreateWorkload)] == [2]


def test_increments_that_go_together_are_told_of_together() -> None:
    requests = [workload(0, 2), evicted(1), evicted(2)]
    first = plan(look(queued(trains(2)), requests, *train(2), (on(2, 3), ready())))
    assert [a.name for a in acts(first, DeleteWorkload)] == [evicted(1).name], "the other still has a pod"
    (note,) = [n for n in first.events if n.reason == "QuotaGivenBack"]
    assert note.message == "the quota of 2 replicas (increments 1, 2) is returned to queue gpus"
    second = plan(look(first.record, [requests[0], requests[2]], *train(2)))
    assert [a.name for a in acts(second, DeleteWorkload)] == [evicted(2).name]
    assert "QuotaGivenBack" not in [n.reason for n in second.events]


@pytest.mark.parametrize(
    ("last", "tries"),
    [
        pytest.param(None, 1, id="for the first time"),
        pytest.param(RequeueBackoff(3, NOW), 4, id="at once again"),
        pytest.param(RequeueBackoff(3, NOW - seconds(1799)), 4, id="within half an hour"),
        pytest.param(RequeueBackoff(3, NOW - seconds(1800)), 1, id="later it is forgotten"),
    ],
)
def test_increments_that_are_lost_again_wait_longer(last: RequeueBackoff | None, tries: int) -> None:
    todo = plan(look(queued(trains(2, requeue_backoff=last)), [workload(0, 2), evicted(1)], *train(2)))
    wait = backoff(seconds(10), seconds(300), tries, "job-uid")
    assert todo.record.requeue_backoff == RequeueBackoff(tries, NOW + wait)
    assert "QuotaGivenBack" in [n.reason for n in todo.events]


def test_a_back_off_in_progress_is_not_prolonged() -> None:
    last = RequeueBackoff(3, NOW + seconds(1))
    todo = plan(look(queued(trains(2, requeue_backoff=last)), [workload(0, 2), evicted(1)], *train(2)))
    assert [a.name for a in acts(todo, DeleteWorkload)] == [evicted(1).name]
    assert todo.record.requeue_backoff == last
    assert "QuotaGivenBack" not in [n.reason for n in todo.events]


SPARE = policy(2, 4, payback=False, growth=GrowthMode.SPARE_CAPACITY_ONLY)


@pytest.mark.parametrize(
    ("places", "placed", "asked"),
    [
        pytest.param({}, 2, [], id="no room"),
        pytest.param({"a": 1}, 2, [1], id="room for one"),
        pytest.param({"a": 1, "b": 1}, 2, [1, 2], id="room for two"),
        pytest.param({"a": 2}, 1, [1], id="a pod has taken a place since then"),
    ],
)
def test_of_the_queue_no_more_is_requested_than_has_room(places: dict[str, int], placed: int, asked: list[int]) -> None:
    names = frozenset(on(0, n).name for n in range(placed))
    room = SpareCapacity(read_at=NOW - seconds(1), places=places, placed=names)
    todo = plan(look(queued(trains()), [workload(0, 2)], *train(2), wishes=SPARE, spare_capacity=room))
    assert [a.number for a in acts(todo, CreateWorkload)] == asked
    assert todo.wake_at == NOW - seconds(1) + READ_EVERY, "the nodes are read again"


def test_nothing_is_requested_of_the_queue_before_nodes_are_read_or_while_a_request_waits() -> None:
    room = SpareCapacity(read_at=NOW - seconds(1), places={"a": 9}, placed=frozenset(on(0, n).name for n in (0, 1)))
    unread = plan(look(queued(trains()), [workload(0, 2)], *train(2), wishes=SPARE))
    assert not acts(unread, CreateWorkload)
    waits = plan(look(queued(trains()), [workload(0, 2), pending(1)], *train(2), wishes=SPARE, spare_capacity=room))
    assert not acts(waits, CreateWorkload)
    full = plan(look(queued(trains(4)), FOUR, *train(4), wishes=SPARE, spare_capacity=room))
    assert full.wake_at is None or full.wake_at > NOW - seconds(1) + READ_EVERY, "nothing is missing"


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_a_first_start_with_increments_gives_the_first_ranks_to_the_base(order: Sequence[int]) -> None:
    """So increments that go later take the last ranks with them, and no pod of the base."""
    begun, wishes = (
        queued(Record(transition=transition(TransitionKind.START, target_size=4))),
        policy(2, 4, sizes=Sizes((2, 3, 4), 4)),
    )
    started = plan(look(begun, FOUR, *((on(max(0, n - 1), n), ready()) for n in order), wishes=wishes))
    assert started.record.members == (pid(0), pid(1), pid(2), pid(3))
    requests = [workload(0, 2), evicted(1), evicted(2)]
    record = replace(started.record, running_since=NOW)
    pods = [(on(max(0, n - 1), n), running(record.generation)) for n in order]
    going = plan(look(record, requests, *pods))
    is_idle = [(p, ready(record.generation, drained=True)) for p, _ in pods]
    shrunk = plan(look(going.record, requests, *is_idle))
    assert shrunk.record.members == (pid(0), pid(1))
    later = plan(look(shrunk.record, requests, *is_idle, now=NOW + LEAVERS_STAY))
    assert sorted(a.name for a in acts(later, DeletePod)) == [on(1, 2).name, on(2, 3).name]


def test_the_spares_of_a_base_come_after_those_who_train() -> None:
    """With a spare the base has a slot more than it has ranks; those of increments are the last all the same."""
    wishes = policy(sizes=Sizes((2, 3, 4), 4), specs=(SpecLimits("workers", 4, spares=1),), payback=False)
    requests = [workload(0, 3), workload(1), workload(2)]
    begun = queued(Record(transition=transition(TransitionKind.START, target_size=4)))
    pods = [(on(max(0, n - 2), n), ready()) for n in (4, 3, 2, 1, 0)]
    started = plan(look(begun, requests, *pods, wishes=wishes))
    assert started.record.members == (pid(0), pid(1), pid(2), pid(3))


def test_shares_are_worked_out_once_for_each_spec() -> None:
    wishes = policy(2, 4)
    assert quota_requests_of(wishes) is quota_requests_of(replace(wishes, suspend=True))


def test_a_silent_member_leaves_its_quota_too() -> None:
    heard = [(on(0, 0), running(step=1, step_at=NOW)), (on(0, 1), running(step=1, step_at=NOW))]
    unheard = (on(1, 2), silent(20))
    todo = plan(look(queued(trains(3)), [workload(0, 2), evicted(1)], *heard, unheard))
    assert todo.record.transition is not None
    assert (todo.record.transition.cause, todo.record.transition.target_size) == ("Preempted", 2)


def test_a_hole_in_the_middle_is_nothing_special() -> None:
    requests = [workload(0, 2), evicted(1), workload(2)]
    todo = plan(look(queued(trains(4)), requests, *train(4)))
    is_idle = [(p, ready(1, drained=True)) for p, _ in train(4)]
    shrunk = plan(look(todo.record, requests, *is_idle))
    assert shrunk.record.members == (pid(0), pid(1), pid(3))
    later = plan(look(shrunk.record, requests, *is_idle, now=NOW + LEAVERS_STAY))
    assert [a.name for a in acts(later, DeletePod)] == [on(1, 2).name]


def test_uneven_increments_are_asked_for_one_after_the_other() -> None:
    wishes = policy(sizes=Sizes((2, 4, 8), 2), specs=(SpecLimits("workers", 8),), payback=False)
    todo = plan(look(queued(trains()), [workload(0, 2)], *train(2), wishes=wishes))
    assert [a.counts for a in acts(todo, CreateWorkload)] == [(("workers", 2),)]
    assert not acts(
        plan(look(queued(trains()), [workload(0, 2), pending(1, 2)], *train(2), wishes=wishes)), CreateWorkload
    )


def test_increments_that_make_no_allowed_size_alone_are_given_back() -> None:
    wishes = policy(sizes=Sizes((2, 4, 8), 2), specs=(SpecLimits("workers", 8),), payback=False)
    todo = plan(look(queued(trains()), [workload(0, 2), workload(2, 4)], *train(2), wishes=wishes))
    assert [a.name for a in acts(todo, DeleteWorkload)] == [workload(2).name]
    assert not acts(todo, CreatePod)


def test_only_so_many_increments_wait_at_a_time() -> None:
    wishes = policy(2, 60, payback=False)
    todo = plan(look(queued(trains()), [workload(0, 2), *(pending(n) for n in range(1, 11))], *train(2), wishes=wishes))
    assert [a.number for a in acts(todo, CreateWorkload)] == list(range(11, 17))


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(trains(recovered_at=NOW - seconds(30)), id="it snoozes after a fault"),
        pytest.param(trains(requeue_backoff=RequeueBackoff(1, NOW + seconds(5))), id="increments were taken back"),
        pytest.param(trains(gang=PartialGang(NOW, 0, 1, NOW + seconds(60))), id="there was room for a part only"),
    ],
)
def test_when_no_increment_is_asked_for(record: Record) -> None:
    wishes = policy(2, 4, snooze=seconds(60), payback=False)
    requests = [workload(0, 2)]
    assert not acts(plan(look(queued(record), requests, *train(2), wishes=wishes)), CreateWorkload)
    assert acts(plan(look(queued(trains()), requests, *train(2), wishes=wishes)), CreateWorkload)


def test_an_increment_whose_pods_find_no_place_is_given_back() -> None:
    resting = queued(trains(gang=PartialGang(NOW, 0, 1, NOW + seconds(60))))
    waits = (on(1, 2, node="", phase="Pending", started=False), None)
    todo = plan(look(resting, FOUR, *train(2), waits))
    assert [a.name for a in acts(todo, DeletePod)] == [waits[0].name]
    assert [a.name for a in acts(todo, DeleteWorkload)] == [workload(2).name]
    assert [a.name for a in acts(plan(look(resting, FOUR, *train(2))), DeleteWorkload)] == [
        workload(1).name,
        workload(2).name,
    ]


def test_at_the_end_of_its_rest_an_increment_keeps_its_quota_and_gets_its_pods() -> None:
    rested = queued(trains(gang=PartialGang(NOW, 0, 1, NOW)))
    todo = plan(look(rested, FOUR, *train(2)))
    assert not acts(todo, DeleteWorkload)
    assert [a.pod for a in acts(todo, CreatePod)] == [pid(2), pid(3)]


def test_a_fault_that_leaves_no_place_gives_the_quota_of_its_pods_back() -> None:
    record = queued(trains(3, shrank_after_fault=True))
    waits = (on(2, 3, node="", phase="Pending", started=False, created_at=NOW - seconds(100)), None)
    todo = plan(look(record, FOUR, *train(3), waits))
    assert not acts(todo, DeletePod)
    assert todo.wake_at is not None
    assert todo.wake_at <= NOW + seconds(20)
    late = replace(look(record, FOUR, *train(3), waits), now=NOW + seconds(20))
    given_up = plan(late)
    assert [a.name for a in acts(given_up, DeletePod)] == [waits[0].name]
    assert not acts(given_up, DeleteWorkload)
    gone = plan(replace(look(given_up.record, FOUR, *train(3)), now=NOW + seconds(21)))
    assert [a.name for a in acts(gone, DeleteWorkload)] == [workload(2).name]
    assert not acts(gone, CreatePod)
    assert not acts(gone, CreateWorkload)


def test_quota_is_kept_while_a_pod_may_still_run() -> None:
    lost = replace(queued(trains()), lost=(PodId("workers", 3, 0),))
    gone_node = (on(2, 3, node="node-9"), agent(last_answer=NOW - seconds(60)))
    snapshot = look(lost, [workload(0, 2), workload(1), evicted(2)], *train(2), gone_node)
    down = ObservedNode(name="node-9", ready=False, not_ready_since=NOW - seconds(5))
    assert not acts(plan(replace(snapshot, nodes={**snapshot.nodes, "node-9": down})), DeleteWorkload)


def test_who_was_given_up_where_its_node_lives_holds_its_replacement_up() -> None:
    """Its kubelet still ends it: with both, the job would have more pods than quota. A node that is dead holds nothing up."""
    record = replace(queued(trains(2)), lost=(pid(2),))
    requests = [workload(0, 2), workload(1)]
    snapshot = look(record, requests, *train(2), (on(1, 2, kill_at=NOW + seconds(30)), silent(60)))
    assert not acts(plan(snapshot), CreatePod)
    down = ObservedNode(name="node-2", ready=False, not_ready_since=NOW - seconds(5))
    assert [a.pod for a in acts(plan(replace(snapshot, nodes={**snapshot.nodes, "node-2": down})), CreatePod)] == [
        pid(2, 1)
    ]
    gone = plan(look(replace(record, incarnations={pid(2).slot: 0}), requests, *train(2)))
    assert [a.pod for a in acts(gone, CreatePod)] == [pid(2, 1)]
    alone = observed(
        job(replace(record, queue="")), zip(snapshot.pods, (running(), running(), silent(60)), strict=True)
    )
    assert pid(2, 1) in [a.pod for a in acts(plan(alone), CreatePod)], "without a queue nothing is exceeded"
