"""The frame of a decision: which situation a job is in, what is added to every step, and when it is looked at again."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    Seen,
    acts,
    agent,
    faulted,
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
    DeletePod,
    ListPods,
    SetFinalizer,
    ShutDownAgent,
    StartWorkers,
    StopWorkers,
)
from elastipod_operator.core.growth_mode import GrowthMode
from elastipod_operator.core.names import Slot
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import NodeFaults, PartialGang, PhaseTimes, Record, ResizeStatistics, TransitionKind
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import AgentState, ObservedNode, SpecLimits

BOTH: list[Seen] = [(pod(0), running()), (pod(1), running())]
PAIR = policy(2, 2)
NEW = Record(transition=transition(TransitionKind.START, target_size=2))


# ---- new jobs


def test_a_new_job_aims_at_its_first_size_from_now_on() -> None:
    todo = plan(observed(job(None, policy(sizes=Sizes((2, 3, 4), 3)))))
    began = todo.record.transition
    assert began is not None
    assert (began.kind, began.cause, began.message) == (TransitionKind.START, "JobCreated", "the job was accepted")
    assert (began.from_size, began.target_size, began.graceful) == (0, 3, False)
    assert (began.began_at, began.detected_at, began.deadline) == (NOW, NOW, NOW + seconds(30))
    assert (todo.record.generation, todo.record.members, todo.adopts_spec) == (0, (), True)


def test_a_job_that_cannot_be_used_gets_a_record_and_no_pods() -> None:
    todo = plan(observed(replace(job(None), policy=None, spec_error="no")))
    assert todo.record.transition is not None
    assert todo.record.transition.target_size == 1
    assert todo.actions == ()


def test_a_lost_record_names_those_who_may_still_run() -> None:
    pods = [(pod(2), running(6)), (pod(0), running(6)), (pod(1), ready(0)), (pod(3), ready(None))]
    todo = plan(observed(job(None), pods))
    assert todo.record.members == (pid(0), pid(2))
    assert todo.record.transition is not None
    assert (todo.record.transition.kind, todo.record.transition.message) == (
        TransitionKind.RECOVERY,
        "the job's state record was lost",
    )
    assert not todo.adopts_spec, "their pods were made from another one perhaps"
    assert [a.pod for a in acts(todo, StopWorkers)] == [pod(2).name, pod(0).name]


# ---- what is added to every step


@pytest.mark.parametrize(
    ("fact", "first"),
    [
        pytest.param(job(trains(), PAIR, has_finalizer=False), SetFinalizer(True), id="it is set before anything else is done"),
        pytest.param(job(None, PAIR, has_finalizer=False), SetFinalizer(True), id="also on a new job"),
        pytest.param(job(trains(), PAIR), None, id="once"),
    ],
)  # fmt: skip
def test_the_finalizer(fact: Any, first: Any) -> None:
    actions = plan(observed(fact, BOTH)).actions
    assert [a for a in actions if isinstance(a, SetFinalizer)] == ([first] if first else [])
    assert not first or actions[0] == first


def test_no_finalizer_is_set_on_a_job_that_is_being_deleted() -> None:
    todo = plan(observed(job(trains(), PAIR, has_finalizer=False, deleting_since=NOW), BOTH))
    assert SetFinalizer(True) not in todo.actions


def test_pods_that_the_api_server_forgot_are_not_kept_in_mind() -> None:
    record = trains(lost=(pid(5), pid(2), pid(6)))
    gone = plan(observed(job(record, PAIR), [*BOTH, (pod(2), ready(1))]))
    assert gone.record.lost == (pid(2),)


def test_incarnations_that_were_seen_are_on_record() -> None:
    todo = plan(observed(job(NEW, PAIR), [(pod(pid(0, 3)), None), (pod(1), None)]))
    assert todo.record.incarnations == {Slot("workers", 0): 3, Slot("workers", 1): 0}


@pytest.mark.parametrize(
    "fact",
    [
        pytest.param(job(trains(transition=transition(TransitionKind.SUSPEND), members=()), policy(suspend=True)), id="suspended"),
        pytest.param(job(trains(), policy(suspend=True)), id="about to be"),
        pytest.param(job(trains(outcome="Failed"), PAIR), id="ended"),
    ],
)  # fmt: skip
def test_no_pods_are_made_for_a_job_that_is(fact: Any) -> None:
    assert not acts(plan(observed(fact)), CreatePod)


def test_no_pods_are_made_while_a_job_still_drains_for_a_suspension_that_was_called_off() -> None:
    record = trains(transition=transition(TransitionKind.SUSPEND, target_size=0))
    todo = plan(observed(job(record), [(pod(n), agent(AgentState.STOPPING)) for n in range(2)]))
    assert todo.record.transition == record.transition
    assert not acts(todo, CreatePod)


def test_a_pod_is_not_deleted_twice_in_one_plan() -> None:
    wishes = policy(2, 2, restarts_before_full=0)
    began = transition(TransitionKind.RECOVERY, uses_budget=True)
    record = trains(transition=began, window=replace(trains().window, restarts=1, since=NOW))
    todo = plan(observed(job(record, wishes), [(pod(0), ready(1)), (pod(1), ready(1))]))
    assert [a.name for a in acts(todo, DeletePod)] == [pod(0).name, pod(1).name]
    assert [a.pod for a in acts(todo, ShutDownAgent)] == [pod(0).name, pod(1).name]


def test_new_pods_keep_off_offenders_wait_for_refusals_and_for_what_pays() -> None:
    offended = policy(2, 4, max_offenders=1, eval_period=seconds(600))
    avoiding = plan(observed(job(trains(node_faults=(NodeFaults("bad", 2, NOW),)), offended), BOTH))
    assert [(a.pod.ordinal, a.avoids) for a in acts(avoiding, CreatePod)] == [(2, ("bad",))]
    refused = plan(observed(job(trains()), BOTH, pod_creation_retry_at=NOW + seconds(9)))
    assert (acts(refused, CreatePod), refused.wake_at) == ([], NOW + seconds(9))
    slow = ResizeStatistics(seconds(10), ((2, seconds(2)), (4, seconds(1))))
    held = plan(observed(job(trains(running_since=NOW, resize_statistics=slow)), BOTH))
    assert (acts(held, CreatePod), held.wake_at) == ([], NOW + seconds(10))


# ---- asking whether pods still exist


CHANGING = [(pod(n), agent(AgentState.STOPPING)) for n in range(2)]


@pytest.mark.parametrize(
    ("record", "pods", "ago_s", "asks", "wait_s"),
    [
        pytest.param(trains(), BOTH, 10_000, False, None, id="nobody is waited for"),
        pytest.param(trains(), BOTH, None, False, None, id="nobody lists"),
        pytest.param(trains(1), [(pod(0), running()), (pod(1), None)], 299, False, 1, id="a pod is waited for: every five minutes"),
        pytest.param(trains(1), [(pod(0), running()), (pod(1), None)], 300, True, 1, id="now"),
        pytest.param(trains(1, generation_began_at=NOW - seconds(299)), [(pod(0), running()), (pod(1), None)], 9000, False, 1,
                     id="since it is waited for"),
        pytest.param(trains(transition=transition(began_s=299)), CHANGING, 9000, False, 1, id="also in a change"),
        pytest.param(trains(transition=transition(began_s=300)), CHANGING, 300, True, 1, id="which lasts"),
        pytest.param(trains(transition=transition(began_s=300)), CHANGING, 299, False, 1, id="and was listed in"),
        pytest.param(trains(), [(pod(0), silent(20)), (pod(1), running(step=9, step_at=NOW))], 29, False, 1,
                     id="one does not answer: twice a minute"),
        pytest.param(trains(), [(pod(0), silent(20)), (pod(1), running(step=9, step_at=NOW))], 30, True, 1, id="now too"),
        pytest.param(trains(), [(pod(0), silent(20)), (pod(1), silent(20))], 29, False, 1, id="nobody answers: just the same"),
        pytest.param(trains(), [(pod(0), silent(20)), (pod(1), silent(20))], None, True, 1780.001, id="without a list at once"),
    ],
)  # fmt: skip
def test_when_the_api_server_is_asked_for_the_pods(
    record: Record, pods: list[Seen], ago_s: float | None, asks: bool, wait_s: float | None
) -> None:
    pods_listed_at = None if ago_s is None else NOW - seconds(ago_s)
    todo = plan(observed(job(record, PAIR), pods, pods_listed_at=pods_listed_at))
    assert (ListPods() in todo.actions) is asks
    assert todo.wake_at == (None if wait_s is None else NOW + seconds(wait_s))


@pytest.mark.parametrize(
    ("began_s", "ago_s", "asks", "wait_s"),
    [
        pytest.param(29, 9000, False, 1, id="they have half a minute to go"),
        pytest.param(30, 9000, True, 1, id="then it is asked"),
        pytest.param(900, 29, False, 1, id="twice a minute"),
        pytest.param(900, 30, True, 1, id="as long as they are there"),
    ],
)
def test_a_suspended_job_does_not_wait_for_ever_for_the_end_of_pods_that_the_watch_missed(
    began_s: float, ago_s: float, asks: bool, wait_s: float
) -> None:
    stopped = trains(
        members=(), transition=transition(TransitionKind.SUSPEND, began_s=began_s, deadline=NOW - seconds(1))
    )
    going = [(pod(n, kill_at=NOW - seconds(5)), None) for n in range(2)]
    todo = plan(observed(job(stopped, policy(suspend=True)), going, pods_listed_at=NOW - seconds(ago_s)))
    assert (ListPods() in todo.actions) is asks
    assert todo.wake_at == NOW + seconds(wait_s)


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param({}, id="they have not been told to end"),
        pytest.param({"kill_at": NOW - seconds(5), "phase": "Succeeded"}, id="they have ended"),
    ],
)
def test_a_suspended_job_waits_for_the_end_of_no_pod_but_those_that_are_deleted_and_live(ends: dict[str, Any]) -> None:
    stopped = trains(transition=transition(TransitionKind.SUSPEND, began_s=900, deadline=NOW + seconds(60)))
    pods = [(pod(n, **ends), running()) for n in range(2)]
    todo = plan(observed(job(stopped, policy(suspend=True)), pods, pods_listed_at=NOW - seconds(900)))
    assert ListPods() not in todo.actions


def test_a_suspended_job_without_pods_rests() -> None:
    stopped = trains(members=(), transition=transition(TransitionKind.SUSPEND, began_s=900))
    assert plan(observed(job(stopped, policy(suspend=True)), [], pods_listed_at=NOW - seconds(900))).wake_at is None


# ---- the time of the next look


@pytest.mark.parametrize(
    ("record", "wishes", "pods", "changes", "wait_s"),
    [
        pytest.param(trains(), policy(2, 2, active_deadline=seconds(3607)), BOTH, {}, 7, id="a deadline"),
        pytest.param(trains(best_step=53, phase_times=PhaseTimes("recomputing", NOW)), PAIR,
                     [(pod(n), running(step=50, step_at=NOW, step_pace=seconds(3))) for n in range(2)], {}, 12, id="the end of repetition"),
        pytest.param(trains(gang=PartialGang(NOW - seconds(20), 0, 1, NOW + seconds(30))), PAIR, BOTH, {}, 30, id="the end of a rest"),
        pytest.param(trains(), PAIR, [(pod(n), running()) for n in range(2)],
                     {"nodes": [ObservedNode(name="node-0", ready=False, not_ready_since=NOW - seconds(590))]},
                     10.001, id="a node that is away for too long"),
        pytest.param(trains(running_since=None, fault_at=NOW - seconds(20)), PAIR,
                     [(pod(0), running()), (pod(1), agent(AgentState.INIT, 1))], {}, 10, id="a recovery that becomes a fault"),
        pytest.param(trains(transition=transition(TransitionKind.RECOVERY, is_budget_checked=True, not_before=NOW + seconds(4))), PAIR,
                     [(pod(n), ready(1)) for n in range(2)], {}, 4, id="a back-off"),
    ],
)  # fmt: skip
def test_what_wakes_a_job(
    record: Record, wishes: Any, pods: list[Seen], changes: dict[str, Any], wait_s: float
) -> None:
    todo = plan(observed(job(record, wishes), pods, **changes))
    assert todo.wake_at == NOW + seconds(wait_s)


# ---- edits and hands off


def test_edits_before_the_first_start_give_up_the_pods_and_forget_their_gang() -> None:
    stuck = [(pod(0), None), (pod(1), ready(0))]
    record = replace(NEW, gang=PartialGang(LONG_AGO, 1))
    todo = plan(observed(job(record, PAIR, pending_edits=("a", "b")), stuck))
    assert (todo.record.gang, todo.record.lost, todo.adopts_spec) == (None, (pid(0), pid(1)), True)
    assert [a.reason for a in acts(todo, DeletePod)] == ["the template was edited before the training began"] * 2
    assert [n.message for n in todo.events] == ["a, b: pods are recreated from the edited spec"]
    assert todo.wake_at == NOW + seconds(1)
    assert not acts(todo, CreatePod), "not before that is on record"
    assert not [c for c in todo.conditions if c.reason == "EditsPending"]


def test_edits_wait_once_a_generation_was_begun() -> None:
    todo = plan(observed(job(replace(NEW, generation=1), PAIR, pending_edits=("a",)), [(pod(0), None)]))
    assert (acts(todo, DeletePod), todo.adopts_spec) == ([], False)
    assert [c.reason for c in todo.conditions if c.type == "Warning"] == ["EditsPending"]


def test_a_job_that_is_left_alone_keeps_even_its_pods() -> None:
    todo = plan(observed(job(trains(), PAIR, unmanaged="newer"), [*BOTH, (pod(9), running())]))
    assert (todo.actions, todo.record, todo.skips_record, todo.wake_at) == ((), Record(), True, None)
    mine = plan(observed(job(trains(), PAIR), BOTH))
    assert not mine.skips_record


def test_a_deletion_is_carried_out_whatever_else_is_the_case() -> None:
    for changes in ({"unmanaged": "newer"}, {"policy": None, "spec_error": "no"}, {"pending_edits": ("a",)}):
        leaving = replace(job(trains(), PAIR, deleting_since=NOW), **changes)
        assert len(acts(plan(observed(leaving, BOTH)), DeletePod)) == 2


# ---- what a plan tells


def test_a_deadline_ends_a_job_and_says_which_one() -> None:
    todo = plan(observed(job(trains(), policy(2, 2, active_deadline=seconds(60))), BOTH))
    ended = todo.record
    assert (ended.outcome, ended.outcome_reason, ended.ended_at) == ("Failed", "DeadlineExceeded", NOW)
    assert ended.outcome_message == "the job ran for longer than spec.runPolicy.activeDeadlineSeconds (60 s)"
    assert [n.message for n in todo.events] == [ended.outcome_message]
    assert not acts(todo, CreatePod)


def test_a_start_is_told_with_history_and_size() -> None:
    todo = plan(observed(job(NEW, policy(2, 4)), [(pod(n), ready(0)) for n in range(2)]))
    assert [(e.generation, e.at) for e in todo.history] == [(1, NOW)]
    assert todo.running_since is None
    assert str(todo.size) == "0/2/4"
    assert len(acts(todo, StartWorkers)) == 2
    runs = plan(observed(job(todo.record, policy(2, 4)), BOTH))
    assert (runs.running_since, runs.history, str(runs.size)) == (NOW, (), "2/2/4")


def test_an_ended_job_lets_its_pods_go_and_looks_again() -> None:
    todo = plan(
        observed(job(trains(outcome="Completed", ended_at=NOW), policy(2, 2)), [(pod(0), agent(AgentState.COMPLETED))])
    )
    assert [type(a) for a in todo.actions] == [ShutDownAgent, DeletePod]
    later = plan(observed(job(trains(outcome="Completed", ended_at=NOW), policy(2, 2, ttl=seconds(77)))))
    assert later.wake_at == NOW + seconds(77)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param((SpecLimits("workers", 4),), 4, id="pods for the largest size"),
        pytest.param((SpecLimits("workers", 3),), 3, id="of a spec no more than its limit"),
    ],
)
def test_how_many_pods_are_asked_for(spec: tuple[SpecLimits, ...], expected: int) -> None:
    todo = plan(observed(job(NEW, policy(2, 4, specs=spec, growth=GrowthMode.MAXIMUM))))
    assert [a.pod for a in acts(todo, CreatePod)] == [pid(n) for n in range(expected)]
    assert {a.nnodes for a in acts(todo, CreatePod)} == {2}


def test_a_fault_and_its_replacement_are_one_plan() -> None:
    dead = ObservedNode(name="node-1", out_of_service=True)
    todo = plan(observed(job(trains(), PAIR), BOTH, [dead]))
    assert [type(a) for a in todo.actions] == [StopWorkers, CreatePod, DeletePod]


def test_a_record_from_the_future_does_not_make_a_job_wait_longer() -> None:
    ahead: datetime = NOW + seconds(500)
    record = trains(
        transition=transition(TransitionKind.RECOVERY, began_s=-500, is_budget_checked=True), window_since=ahead
    )
    todo = plan(observed(job(record, policy(2, 4)), [(pod(0), faulted()), (pod(1), ready(1))]))
    assert todo.record.transition is not None
    assert todo.record.transition.began_at == NOW
