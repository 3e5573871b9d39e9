"""Drains: for the user, for nodes that go, for somebody else."""

from __future__ import annotations

import pytest
from tests.unit.core.builders import (
    NOW,
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

from elastipod_operator.core.actions import CreatePod, DeletePod, StartWorkers, StopWorkers
from elastipod_operator.core.names import PodId
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Record, TransitionKind
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import AgentState, ObservedAgent, ObservedNode, ObservedPod

ALL_RUN = [(pod(n), running()) for n in range(3)]
DRAINED = ready(1, drained=True)


def test_a_lower_ceiling_drains_to_it() -> None:
    todo = plan(observed(job(trains(3), policy(2, 2)), ALL_RUN))
    began = todo.record.transition
    assert began is not None
    assert (began.kind, began.cause, began.target_size) == (TransitionKind.RESIZE, "ScaledByUser", 2)
    assert len(acts(todo, StopWorkers)) == 3
    assert [n.reason for n in todo.events] == ["Draining"]


def test_a_size_that_is_no_longer_allowed_is_left() -> None:
    todo = plan(observed(job(trains(3), policy(sizes=Sizes((2, 4), 2))), ALL_RUN))
    assert todo.record.transition is not None
    assert todo.record.transition.target_size == 2
    below = plan(observed(job(trains(3), policy(sizes=Sizes((4, 5), 4))), ALL_RUN))
    assert below.record.transition is None, "a minimum that was raised waits for the replicas"


def test_a_higher_ceiling_stops_nobody() -> None:
    todo = plan(observed(job(trains(3), policy(2, 9)), ALL_RUN))
    assert todo.record.transition is None
    assert not acts(todo, StopWorkers)


def test_a_user_who_changes_his_mind_in_a_drain_gets_the_size_that_is_allowed_at_its_end() -> None:
    record = trains(3, transition=transition(target_size=4))
    todo = plan(observed(job(record, policy(2, 2)), [(pod(n), DRAINED) for n in range(3)]))
    assert len(todo.record.members) == 2


def test_a_doomed_member_drains_all_within_its_time() -> None:
    kill_at = NOW + seconds(100)
    members = [(pod(0, kill_at=kill_at, disruption="EvictionByEvictionAPI"), running()), *ALL_RUN[1:]]
    todo = plan(observed(job(trains(3)), members))
    began = todo.record.transition
    assert began is not None
    assert (began.cause, began.target_size, began.deadline) == ("PodDisrupted", 2, kill_at - seconds(5))
    assert {a.timeout_s for a in acts(todo, StopWorkers)} == {95}
    assert pid(0, 1) in [a.pod for a in acts(todo, CreatePod)], "its replacement warms up meanwhile"


@pytest.mark.parametrize(
    ("leavers", "leaves"),
    [
        pytest.param((pid(0),), [True, False, False], id="the others stay"),
        pytest.param((pid(0), pid(2)), [True, False, True], id="one of the others goes too"),
        pytest.param((), [True, False, False], id="its notice came when the change was decided"),
        pytest.param(None, [True, None, None], id="an operator of the previous version has begun the change"),
    ],
)
def test_agents_are_told_whose_memory_outlives_a_drain(
    leavers: tuple[PodId, ...] | None, leaves: list[bool | None]
) -> None:
    record = trains(3, transition=transition(cause="PodDisrupted", leavers=leavers))
    members = [(pod(0, disruption="Spot"), running()), *ALL_RUN[1:]]
    assert [a.leaves for a in acts(plan(observed(job(record), members)), StopWorkers)] == leaves


SUSPENDS = policy(suspend=True)


def test_suspend_drains_then_removes_all_pods_then_does_nothing() -> None:
    first = plan(observed(job(trains(), SUSPENDS), [(pod(0), running()), (pod(1), running())]))
    assert first.record.transition is not None
    assert (first.record.transition.kind, first.record.transition.graceful) == (TransitionKind.SUSPEND, True)
    assert not acts(first, DeletePod)
    then = plan(observed(job(first.record, SUSPENDS), [(pod(0), DRAINED), (pod(1), DRAINED)]))
    assert len(acts(then, DeletePod)) == 2
    last = plan(observed(job(then.record, SUSPENDS)))
    assert (last.actions, last.record) == ((), then.record)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(TransitionKind.START, id="start"),
        pytest.param(TransitionKind.RESIZE, id="resize"),
        pytest.param(TransitionKind.RECOVERY, id="recovery"),
    ],
)
def test_suspend_takes_over_once_the_workers_are_stopped(kind: TransitionKind) -> None:
    record = trains(transition=transition(kind))
    todo = plan(observed(job(record, SUSPENDS), [(pod(0), ready(1)), (pod(1), ready(1))]))
    assert todo.record.transition is not None
    assert todo.record.transition.kind is TransitionKind.SUSPEND
    assert len(acts(todo, DeletePod)) == 2
    assert not acts(todo, StartWorkers)


def test_a_resumed_job_wants_its_size_back_and_no_deadline_ran_meanwhile() -> None:
    suspended = trains(
        members=(), started_at=NOW - seconds(1000), fault_at=NOW - seconds(900),
        transition=transition(TransitionKind.SUSPEND, began_s=600, from_size=3),
    )  # fmt: skip
    created = NOW - seconds(1000)
    todo = plan(observed(job(suspended, policy(active_deadline=seconds(500)), created_at=created)))
    began = todo.record.transition
    assert began is not None
    assert (began.kind, began.target_size, todo.record.outcome) == (TransitionKind.START, 3, "")
    assert todo.record.suspended_time == seconds(600)
    assert todo.adopts_spec, "what was edited meanwhile acts from here on"
    assert todo.record.fault_at is None
    assert todo.wake_at == NOW


def test_cordon_alone_stops_nobody() -> None:
    todo = plan(observed(job(trains(3)), ALL_RUN, [ObservedNode(name="node-0", cordoned=True)]))
    assert todo.record.transition is None


CORDONED = [ObservedNode(name="node-2", cordoned=True)]


@pytest.mark.parametrize("mine", [ready(), running(), None], ids=["ready", "busy by mistake", "not heard yet"])
def test_growth_takes_nobody_on_a_cordoned_node(mine: ObservedAgent | None) -> None:
    """A pod that was placed there before it was cordoned goes, so that another one can be placed elsewhere."""
    snapshot = observed(
        job(trains(2), policy(2, 3, scaling_timeout=seconds(0))), [*ALL_RUN[:2], (pod(2), mine)], CORDONED
    )
    todo = plan(snapshot)
    assert todo.record.transition is None
    is_idle = mine is None or mine.state is AgentState.READY
    assert [a.name for a in acts(todo, DeletePod)] == ([pod(2).name] if is_idle else [])
    assert [a.pod for a in acts(todo, CreatePod)] == ([pid(2, 1)] if is_idle else [])
    if is_idle:
        assert "was cordoned before" in acts(todo, DeletePod)[0].reason


@pytest.mark.parametrize(
    ("record", "pods"),
    [
        pytest.param(
            trains(
                0,
                generation=0,
                running_since=None,
                started_at=None,
                transition=transition(TransitionKind.START, began_s=1, target_size=3),
            ),
            [(pod(n), ready()) for n in range(3)],
            id="a start",
        ),
        pytest.param(
            trains(3, transition=transition(TransitionKind.RECOVERY, began_s=1, target_size=3), lost=(pid(2),)),
            [(pod(0), ready(1)), (pod(1), ready(1)), (pod(pid(2, 1)), ready())],
            id="a recovery",
        ),
        pytest.param(trains(2), [*ALL_RUN[:2], (pod(2), ready(1, is_spare=True))], id="a spare"),
    ],
)
def test_a_cordon_sends_nobody_else_away(record: Record, pods: list[tuple[ObservedPod, ObservedAgent]]) -> None:
    wishes = policy(2, 3, scaling_timeout=seconds(0))
    todo = plan(observed(job(record, wishes), pods, CORDONED))
    assert not acts(todo, DeletePod)
    if record.transition is not None:
        assert len(acts(todo, StartWorkers)) == 3


def test_a_drain_that_leaves_too_few_waits_for_a_replacement() -> None:
    record = trains(transition=transition())
    todo = plan(
        observed(job(record, policy(sizes=Sizes((2,), 2))), [(pod(0), DRAINED), (pod(1, disruption="x"), DRAINED)])
    )
    assert todo.record.generation == 1
    assert [a.name for a in acts(todo, DeletePod)] == [pod(1).name]
    assert [a.pod for a in acts(todo, CreatePod) if a.pod.ordinal == 1] == [pid(1, 1)]
