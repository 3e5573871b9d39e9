"""What Kueue grants, in the terms of the other decisions: shares, holding, withdrawing, asking and giving back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import (
    NOW,
    Seen,
    acts,
    agent,
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

from elastipod_operator.core.actions import (
    CreatePod,
    CreateWorkload,
    DeletePod,
    DeleteWorkload,
    FinishWorkload,
    ReleaseBaseQuota,
    SetPodsReady,
    SetQueueLabel,
    StopWorkers,
)
from elastipod_operator.core.names import PodId, Slot, workload_name
from elastipod_operator.core.plan import plan
from elastipod_operator.core.quota import quota_requests_of
from elastipod_operator.core.record import PartialGang, Record, RequeueBackoff, TransitionKind
from elastipod_operator.core.record_codec import decode, encode
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import (
    AgentState,
    ObservedNode,
    ObservedWorkload,
    Policy,
    Snapshot,
    SpecLimits,
)

QUEUE = "gpus"


def workload(number: int, pods: int = 1, **changes: Any) -> ObservedWorkload:
    """Give an admitted Workload over the one spec."""
    base = ObservedWorkload(
        name=workload_name("job", "job-uid", number), uid=f"uid-{number}", number=number, counts=(("workers", pods),),
        created_at=NOW - seconds(3600), queue=QUEUE, reserved=True, admitted=True, pods_ready=True,
    )  # fmt: skip
    return replace(base, **changes)


def pending(number: int, pods: int = 1, **changes: Any) -> ObservedWorkload:
    return workload(number, pods, reserved=False, admitted=False, pods_ready=None, pending_message="no room", **changes)


def evicted(number: int, pods: int = 1, **changes: Any) -> ObservedWorkload:
    return workload(number, pods, eviction_reason="Preempted", eviction_message="a more important job came", **changes)


def look(
    record: Record | None,
    workloads: Sequence[ObservedWorkload],
    *pods: Seen,
    wishes: Policy | None = None,
    **changes: Any,
) -> Snapshot:
    """Give an observation of a job in the queue."""
    about = {name: changes.pop(name) for name in ("queue", "queue_in_template", "pending_edits") if name in changes}
    fact = job(record, wishes or policy(2, 4, payback=False), **{"queue": QUEUE, **about})
    return observed(fact, pods, workloads=tuple(workloads), **changes)


def queued(record: Record) -> Record:
    return replace(record, queue=QUEUE)


def on(number: int, ordinal: int, **changes: Any) -> Any:
    return pod(ordinal, workload=workload_name("job", "job-uid", number), **changes)


def train(size: int, **changes: Any) -> list[Seen]:
    """Give the pods of a job that trains with its base of 2 and increments of one."""
    return [(on(max(0, n - 1), n, **changes), running()) for n in range(size)]


FOUR = [workload(0, 2), workload(1), workload(2)]


# ---- shares


def test_the_base_is_the_smallest_size_and_each_increment_the_way_to_the_next() -> None:
    base, first, second = quota_requests_of(policy(2, 4))
    assert base.slots == (Slot("workers", 0), Slot("workers", 1))
    assert (first.slots, second.slots) == ((Slot("workers", 2),), (Slot("workers", 3),))


def test_spares_come_with_the_first_share_of_their_spec() -> None:
    wishes = policy(
        sizes=Sizes((2, 3, 5), 2), specs=(SpecLimits("base", 3, spares=1), SpecLimits("extra", 2, spares=2))
    )
    base, first, second = quota_requests_of(wishes)
    assert base.counts == (("base", 3),)
    assert (base.slots[-1], first.slots) == (Slot("base", 2), (Slot("base", 3),))
    assert second.counts == (("extra", 4),)
    assert (base.trains, second.trains) == ({"base": 2}, {"extra": 2})


def test_a_share_may_reach_over_two_specs() -> None:
    wishes = policy(sizes=Sizes((2, 4), 2), specs=(SpecLimits("base", 3), SpecLimits("extra", 1)))
    assert quota_requests_of(wishes)[1].counts == (("base", 1), ("extra", 1))


# ---- in which queue


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        pytest.param({"queue": QUEUE}, [], id="the job's label"),
        pytest.param({"queue": "", "queue_in_template": "t"}, [SetQueueLabel("t")], id="the template's one becomes the job's"),
        pytest.param({"queue": "", "default_queue": True}, [SetQueueLabel("default")], id="a queue named default adopts it"),
    ],
)  # fmt: skip
def test_a_new_job_learns_its_queue(changes: dict[str, Any], named: list[SetQueueLabel]) -> None:
    todo = plan(look(None, [], **changes))
    assert todo.record.queue
    assert acts(todo, SetQueueLabel) == named
    assert [a.queue for a in acts(todo, CreateWorkload)] == [todo.record.queue]
    assert not acts(todo, CreatePod)


def test_a_job_without_a_queue_asks_nobody() -> None:
    todo = plan(look(None, [], queue="", default_queue=False))
    assert todo.record.queue == ""
    assert not acts(todo, CreateWorkload)
    assert len(acts(todo, CreatePod)) == 2


def test_a_label_that_comes_while_the_job_runs_acts_when_nothing_runs() -> None:
    todo = plan(look(trains(), [], *train(2)))
    assert (todo.record.queue, acts(todo, CreateWorkload), todo.record.transition) == ("", [], None)
    idle = replace(trains(), members=(), transition=transition(TransitionKind.SUSPEND, target_size=0))
    assert plan(look(idle, [], wishes=policy(2, 4, suspend=True))).record.queue == QUEUE


def test_a_job_that_leaves_its_queue_gives_back_what_waits() -> None:
    todo = plan(look(queued(Record(transition=transition(TransitionKind.SUSPEND))), [pending(0, 2)], queue=""))
    assert todo.record.queue == ""
    assert [a.name for a in acts(todo, DeleteWorkload)] == [pending(0).name]


def test_a_job_in_another_queue_asks_there() -> None:
    record = Record(queue="old", transition=transition(TransitionKind.SUSPEND, cause="Queued"))
    todo = plan(look(record, [pending(0, 2, queue="old")]))
    assert todo.record.queue == QUEUE
    assert [a.name for a in acts(todo, DeleteWorkload)] == [pending(0).name]
    again = plan(look(todo.record, []))
    assert acts(again, CreateWorkload) == [CreateWorkload(0, (("workers", 2),), QUEUE)]


# ---- held


def test_no_pod_before_the_base_is_admitted() -> None:
    todo = plan(look(None, []))
    assert acts(todo, CreateWorkload) == [CreateWorkload(0, (("workers", 2),), QUEUE)]
    waiting = plan(look(todo.record, [pending(0, 2)]))
    assert not acts(waiting, CreatePod)
    assert not acts(waiting, CreateWorkload)
    state = waiting.conditions[-1]
    assert (state.type, state.reason, state.message) == ("Suspended", "Queued", "waits in queue gpus: no room")
    assert waiting.record.phase_times.phase == "queued"


def test_kueue_that_is_not_there_is_told() -> None:
    todo = plan(look(None, [], queue_problem=("KueueUnavailable", "the API server has no Workloads")))
    state = todo.conditions[-1]
    assert (state.type, state.reason) == ("Suspended", "KueueUnavailable")


def test_an_admitted_base_lets_its_pods_come_and_the_increments_be_asked_for() -> None:
    held = plan(look(None, [pending(0, 2)])).record
    todo = plan(look(held, [workload(0, 2, pods_ready=None)]))
    assert (todo.record.transition and todo.record.transition.cause) == "Admitted"
    assert [(a.pod, a.workload) for a in acts(todo, CreatePod)] == [(pid(n), workload(0).name) for n in range(2)]
    assert [a.number for a in acts(todo, CreateWorkload)] == [1, 2]
    assert str(todo.size) == "0/2/4"


def test_a_quota_that_is_only_reserved_starts_nothing() -> None:
    held = plan(look(None, [pending(0, 2)])).record
    assert not acts(plan(look(held, [workload(0, 2, admitted=False)])), CreatePod)


def test_an_evicted_base_stops_the_job_and_is_released_when_its_pods_are_gone() -> None:
    todo = plan(look(queued(trains()), [evicted(0, 2)], *train(2)))
    assert todo.record.transition is not None
    assert (todo.record.transition.kind, todo.record.transition.cause) == (TransitionKind.SUSPEND, "Preempted")
    assert {a.graceful for a in acts(todo, StopWorkers)} == {True}
    assert not acts(todo, ReleaseBaseQuota)
    is_idle = [(on(0, n), ready(1, drained=True)) for n in range(2)]
    going = plan(look(todo.record, [evicted(0, 2)], *is_idle))
    assert len(acts(going, DeletePod)) == 2
    assert not acts(going, ReleaseBaseQuota)
    gone = plan(look(going.record, [evicted(0, 2)]))
    assert acts(gone, ReleaseBaseQuota) == [ReleaseBaseQuota(workload(0).name, "uid-0")]
    assert not acts(gone, CreateWorkload)
    back = plan(look(gone.record, [workload(0, 2)]))
    assert back.record.transition is not None
    assert (back.record.transition.kind, len(acts(back, CreatePod))) == (TransitionKind.START, 2)


def test_increments_go_with_their_base() -> None:
    record = queued(trains(members=(), transition=transition(TransitionKind.SUSPEND, cause="Preempted", target_size=0)))
    todo = plan(look(record, [evicted(0, 2), workload(1), pending(2)]))
    assert [a.name for a in acts(todo, DeleteWorkload)] == [workload(1).name, pending(2).name]


def test_a_base_that_somebody_took_away_stops_the_job() -> None:
    todo = plan(look(queued(trains()), [], *train(2)))
    assert todo.record.transition is not None
    assert todo.record.transition.kind is TransitionKind.SUSPEND
    assert not acts(todo, CreateWorkload), "a new base may be placed elsewhere than its pods are"
    gone = plan(look(todo.record, [], (on(0, 0, phase="Failed"), None)))
    assert [a.number for a in acts(gone, CreateWorkload)] == [0]


# ---- growing and shrinking


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
    assert [a.name for a in acts(shrunk, DeletePod)] == [on(2, 3).name]
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
    shrunk = plan(look(going.record, requests, *((p, ready(record.generation, drained=True)) for p, _ in pods)))
    assert shrunk.record.members == (pid(0), pid(1))
    assert sorted(a.name for a in acts(shrunk, DeletePod)) == [on(1, 2).name, on(2, 3).name]


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


# ---- since when a job counts as started


def test_a_job_in_a_queue_has_started_when_it_was_admitted_first() -> None:
    at = NOW - seconds(60)
    assert "startTime" not in plan(look(queued(Record()), [pending(0, 2)])).status
    granted = look(queued(trains()), [workload(0, 2, admitted_at=at)], *train(2))
    assert plan(granted).status["startTime"] == "2026-03-01T11:59:00Z"
    told = replace(granted, job=replace(granted.job, start_time=at), workloads=(pending(0, 2),))
    assert plan(told).status["startTime"] == "2026-03-01T11:59:00Z", "what was told once stays"
    anew = replace(told, workloads=(workload(0, 2, admitted_at=NOW),))
    assert plan(anew).status["startTime"] == "2026-03-01T11:59:00Z"


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
    assert [a.name for a in acts(shrunk, DeletePod)] == [on(1, 2).name]


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


# ---- edits, suspension, the end


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
    assert not acts(plan(look(record, [workload(0, 2, finished=True)])), FinishWorkload)


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


# ---- the record


def test_the_record_keeps_queue_and_losses() -> None:
    for record in (queued(trains()), replace(queued(trains()), requeue_backoff=RequeueBackoff(3, NOW))):
        assert decode(encode(record)) == record


def test_the_same_look_gives_the_same_actions() -> None:
    snapshot = look(queued(trains()), [workload(0, 2), pending(1), evicted(2)], *train(2))
    assert plan(snapshot) == plan(snapshot)


@pytest.mark.parametrize(
    "changes",
    [{"is_deleting": True}, {"finished": True}, {"eviction_reason": "Preempted"}, {"admitted": False}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_workload_that_is_on_its_way_out_grants_nothing(changes: dict[str, Any]) -> None:
    assert workload(0, 4).is_granted
    assert not workload(0, 4, **changes).is_granted
