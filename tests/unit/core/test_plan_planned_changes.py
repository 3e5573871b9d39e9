"""Drains: for the user, for nodes that go, for somebody else."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.builders import (
    NOW,
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

from elastipod_operator.core.actions import CreatePod, DeletePod, ListPods, StartWorkers, StopWorkers
from elastipod_operator.core.faults import FIRST_ANSWER
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


def test_a_second_notice_in_a_drain_is_merged() -> None:
    record = trains(3, transition=transition(cause="PodDisrupted"))
    members = [(pod(0, disruption="x"), running()), (pod(1, disruption="y"), running()), ALL_RUN[2]]
    assert plan(observed(job(record), members)).record.transition == record.transition


@pytest.mark.parametrize(
    ("deadline_in_s", "state", "hard"),
    [
        pytest.param(60, AgentState.RUNNING, False, id="who has not heard of the drain is asked again"),
        pytest.param(60, AgentState.STOPPING, None, id="who drains is left alone"),
        pytest.param(-10, AgentState.STOPPING, None, id="the agent itself ends them first"),
        pytest.param(-16, AgentState.STOPPING, True, id="then it is told to"),
        pytest.param(60, AgentState.COMPLETED, True, id="who finished meanwhile becomes ready by a stop"),
    ],
)
def test_the_stop_of_a_member(deadline_in_s: float, state: AgentState, hard: bool | None) -> None:
    record = trains(transition=transition(deadline=NOW + seconds(deadline_in_s)))
    todo = plan(observed(job(record), [(pod(0), agent(state)), (pod(1), DRAINED)]))
    assert [not a.graceful for a in acts(todo, StopWorkers)] == ([] if hard is None else [hard])


@pytest.mark.parametrize(
    ("mine", "is_lost"),
    [
        pytest.param(agent(AgentState.STOPPING), True, id="who never stops is given up"),
        pytest.param(silent(60), True, id="who is silent all the time is given up"),
        pytest.param(
            agent(AgentState.STOPPING, answering_since=NOW - seconds(30)),
            False,
            id="who was out of reach has its time yet",
        ),
    ],
)
def test_the_end_of_patience(mine: ObservedAgent, is_lost: bool) -> None:
    record = trains(transition=transition(began_s=650, deadline=NOW - seconds(46)))
    other = agent(AgentState.STOPPING, answering_since=NOW)
    todo = plan(observed(job(record), [(pod(0), mine), (pod(1), other)]))
    assert (pid(0) in todo.record.lost) is is_lost
    assert bool(acts(todo, DeletePod)) is is_lost


def test_who_was_out_of_reach_all_the_time_is_asked_for_a_checkpoint_yet() -> None:
    record = trains(transition=transition(began_s=650, deadline=NOW - seconds(50)))
    back = running(answering_since=NOW - seconds(1))
    todo = plan(observed(job(record), [(pod(0), back), (pod(1), back)]))
    assert acts(todo, StopWorkers) == [
        StopWorkers(pod(n).name, 1, graceful=True, timeout_s=599, leaves=None) for n in range(2)
    ]


def test_when_all_are_silent_nobody_is_given_up_and_the_pods_are_looked_up() -> None:
    record = trains(transition=transition(deadline=NOW - seconds(1000)))
    todo = plan(observed(job(record), [(pod(0), silent(900)), (pod(1), silent(900))]))
    assert not todo.record.lost
    assert ListPods() in todo.actions


def test_a_generation_that_did_not_begin_everywhere_has_nothing_to_save() -> None:
    todo = plan(observed(job(trains(running_since=None), policy(1, 1)), [(pod(0), running()), (pod(1), ready(0))]))
    assert todo.record.transition is not None
    assert not todo.record.transition.graceful
    assert [a.graceful for a in acts(todo, StopWorkers)] == [False]


def test_an_operator_that_has_not_heard_of_anybody_drains_all_the_same() -> None:
    unheard = ObservedAgent(trying_since=NOW - FIRST_ANSWER)
    todo = plan(observed(job(trains(3), policy(2, 2)), [(pod(n), unheard) for n in range(3)]))
    assert todo.record.transition is not None
    assert todo.record.transition.graceful


def test_workers_that_somebody_else_drained_are_started_again() -> None:
    todo = plan(observed(job(trains(), policy(2, 2)), [(pod(0), DRAINED), (pod(1), DRAINED)]))
    assert todo.record.generation == 2
    assert len(acts(todo, StartWorkers)) == 2


def test_drained_is_not_completed() -> None:
    finished = agent(AgentState.COMPLETED)
    drained = plan(observed(job(trains()), [(pod(0), finished), (pod(1), DRAINED)]))
    assert drained.record.outcome == ""
    assert plan(observed(job(trains()), [(pod(0), finished), (pod(1), finished)])).record.outcome == "Completed"


def test_all_that_complete_in_a_recorded_drain_are_drained() -> None:
    record = trains(transition=transition())
    todo = plan(observed(job(record), [(pod(n), agent(AgentState.COMPLETED)) for n in range(2)]))
    assert todo.record.outcome == ""
    assert len(acts(todo, StopWorkers)) == 2


def test_completed_workers_of_an_older_generation_complete_nothing() -> None:
    finished = agent(AgentState.COMPLETED, generation=1)
    todo = plan(observed(job(trains(generation=2)), [(pod(0), finished), (pod(1), finished)]))
    assert todo.record.outcome == ""


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


DRAINING = trains(transition=transition(began_s=100))  # for ten minutes
STOPS = agent(AgentState.STOPPING)


@pytest.mark.parametrize(
    ("mine", "node", "left_s"),
    [
        pytest.param({"kill_at": NOW + seconds(60)}, {}, 55, id="a pod is deleted"),
        pytest.param({}, {"disruption": "spot", "leaves_at": NOW + seconds(120)}, 115, id="a notice of Spot"),
        pytest.param({"kill_at": NOW + seconds(3)}, {}, 0, id="hardly any time is left"),
        pytest.param({"kill_at": NOW - seconds(60)}, {}, 0, id="none is left"),
        pytest.param({"kill_at": NOW + seconds(900)}, {}, 500, id="a later end gives no more time"),
        pytest.param({}, {"disruption": "a taint that says no time"}, 500, id="a notice without a time"),
    ],
)
def test_a_second_notice_shortens_a_drain(mine: dict[str, Any], node: dict[str, Any], left_s: float) -> None:
    pods = [(pod(0, **mine), STOPS), (pod(1), STOPS)]
    todo = plan(observed(job(DRAINING), pods, [ObservedNode(name="node-0", **node)]))
    assert todo.record.transition is not None
    assert todo.record.transition.deadline == NOW + seconds(left_s)
    is_shorter = left_s < 500
    told = [(a.pod, a.graceful, a.timeout_s) for a in acts(todo, StopWorkers)]
    assert told == ([(pod(n).name, True, max(1, int(left_s))) for n in range(2)] if is_shorter else [])
    assert [n.reason for n in todo.events] == (["DrainShortened"] if is_shorter else [])
    again = plan(observed(job(todo.record), pods, [ObservedNode(name="node-0", **node)]))
    assert again.record.transition == todo.record.transition
    assert not again.events


@pytest.mark.parametrize(
    "first",
    [
        pytest.param((pod(0, kill_at=NOW + seconds(60)), ready(1, drained=True)), id="who has drained already"),
        pytest.param((pod(0), STOPS), id="nobody is to go"),
    ],
)
def test_a_drain_keeps_its_time_as_long_as_nobody_is_killed_in_it(first: tuple[ObservedPod, ObservedAgent]) -> None:
    todo = plan(observed(job(DRAINING), [first, (pod(1), STOPS)]))
    assert todo.record.transition == DRAINING.transition
    assert not acts(todo, StopWorkers)


def test_agents_that_know_no_generations_are_told_once() -> None:
    stops = agent(AgentState.STOPPING, None)
    todo = plan(observed(job(DRAINING), [(pod(0, kill_at=NOW + seconds(60)), stops), (pod(1), stops)]))
    assert not acts(todo, StopWorkers)


DEAF = agent(AgentState.STOPPING, no_drain_handler=True)


@pytest.mark.parametrize(
    ("agents", "is_ended"),
    [
        pytest.param((DEAF, DEAF), True, id="nobody can know of it"),
        pytest.param((DEAF, STOPS), False, id="one rank may ask for all"),
        pytest.param(
            (DEAF, silent(60, state=AgentState.STOPPING, no_drain_handler=True)), False, id="one is out of sight"
        ),
        pytest.param((DEAF, ready(1, drained=True)), False, id="one has drained, and tells the others"),
        pytest.param((DEAF, ready(1)), True, id="one was stopped before"),
        pytest.param((DEAF, running(1)), False, id="one has not been asked yet"),
    ],
)
def test_a_drain_that_no_worker_can_know_of_is_ended(
    agents: tuple[ObservedAgent, ObservedAgent], is_ended: bool
) -> None:
    todo = plan(observed(job(DRAINING), [(pod(n), a) for n, a in enumerate(agents)]))
    assert todo.record.transition is not None
    assert todo.record.transition.graceful is not is_ended
    hard = [a.pod for a in acts(todo, StopWorkers) if not a.graceful]
    assert bool(hard) is is_ended
    assert ("EventUnanswered" in [n.reason for n in todo.events]) is is_ended
    assert todo.record.retries == todo.record.restarts == 0, "nobody failed"


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
