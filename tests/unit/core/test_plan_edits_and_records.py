"""Edits of a running job, lost records, and records of newer operators."""

from __future__ import annotations

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
    pod,
    policy,
    ready,
    running,
    seconds,
    trains,
    transition,
)

from elastipod_operator.core.actions import CreatePod, DeletePod, Plan, SetFinalizer, StartWorkers, StopWorkers
from elastipod_operator.core.plan import plan
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import Record, TransitionKind
from elastipod_operator.core.snapshot import Condition, ObservedAgent

BOTH = [(pod(0), running()), (pod(1), running())]
EDITED = ("spec.replicaSpecs[workers].template",)
STARTS = Record(transition=transition(TransitionKind.START, target_size=2))


def warning(todo: Plan) -> Condition:
    return next(c for c in todo.conditions if c.type == "Warning")


def test_an_edit_that_acts_later_is_told() -> None:
    todo = plan(observed(job(trains(), policy(2, 2), pending_edits=EDITED), BOTH))
    assert todo.record.transition is None
    assert not todo.adopts_spec
    assert (warning(todo).status, warning(todo).reason) == (False, "EditsPending")
    assert "spec.replicaSpecs[workers].template" in warning(todo).message
    assert "suspended and resumed" in warning(todo).message
    assert "EditsPending" in [n.reason for n in todo.events]


def test_it_acts_when_the_job_is_resumed() -> None:
    suspended = trains(members=(), transition=transition(TransitionKind.SUSPEND, from_size=2))
    todo = plan(observed(job(suspended, policy(2, 2), pending_edits=EDITED)))
    assert todo.adopts_spec
    still = plan(observed(job(suspended, policy(2, 2, suspend=True), pending_edits=EDITED)))
    assert not still.adopts_spec


def test_pods_that_a_quick_resumption_finds_are_made_anew() -> None:
    """The user resumed the job while it was still being drained."""
    suspends = trains(transition=transition(TransitionKind.SUSPEND, from_size=2))
    is_idle = [(pod(n), ready(1, drained=True)) for n in range(2)]
    todo = plan(observed(job(suspends, policy(2, 2), pending_edits=EDITED), is_idle))
    assert todo.adopts_spec
    assert len(acts(todo, DeletePod)) == 2
    then = plan(observed(job(todo.record, policy(2, 2)), is_idle))
    assert {a.pod for a in acts(then, CreatePod)} == {pid(0, 1), pid(1, 1)}
    same = plan(observed(job(suspends, policy(2, 2)), is_idle))
    assert not acts(same, DeletePod), "without an edit they are as good as ever"


def test_before_the_training_began_a_mended_template_acts_at_once() -> None:
    """An image that cannot be pulled is put right by an edit, as with other workloads."""
    stuck = [(pod(0), None), (pod(1), None)]
    todo = plan(observed(job(STARTS, policy(2, 2), pending_edits=EDITED), stuck))
    assert todo.adopts_spec
    assert {a.name for a in acts(todo, DeletePod)} == {pod(0).name, pod(1).name}
    assert [n.reason for n in todo.events] == ["EditsTaken"]
    then = plan(observed(job(todo.record, policy(2, 2)), stuck))
    assert {a.pod for a in acts(then, CreatePod)} == {pid(0, 1), pid(1, 1)}


@pytest.mark.parametrize(
    ("record", "mine", "replaced"),
    [
        pytest.param(STARTS, agent(None), True, id="no answer for long"),
        pytest.param(STARTS, agent(None, trying_since=NOW - seconds(29)), False, id="it may only begin"),
        pytest.param(STARTS, ready(0), False, id="it answers where it was told to listen"),
        pytest.param(STARTS, agent(None, authentication_failed=True), False, id="it answers, and has another key"),
        pytest.param(STARTS, agent(None, refused_answer="no JSON"), False, id="it answers nonsense"),
        pytest.param(trains(), agent(None), True, id="a newcomer"),
    ],
)
def test_a_pod_that_does_not_answer_is_made_anew_once_the_port_was_edited(
    record: Record, mine: ObservedAgent, replaced: bool
) -> None:
    """The edit mends a job whose command names another port; pods that answer keep theirs."""
    others = [(pod(n, agent_port=8080), running() if record.members else ready(0)) for n in range(2)]
    pods = [*others, (pod(2, agent_port=8080), mine)]
    todo = plan(observed(job(record, policy(3, 3, agent_port=9000)), pods))
    said = [(one.name, one.reason) for one in acts(todo, DeletePod)]
    why = f"nothing answers on port 8080 of pod {pod(2).name}, and the job's agents now listen on port 9000"
    assert said == ([(pod(2).name, why)] if replaced else [])
    same = plan(observed(job(record, policy(3, 3)), pods))
    assert not acts(same, DeletePod), "without an edit it is only told"


def test_a_suspended_job_that_never_trained_waits_for_its_resumption() -> None:
    todo = plan(observed(job(STARTS, policy(2, 2, suspend=True), pending_edits=EDITED)))
    assert not todo.adopts_spec


def test_what_the_spec_asks_for_in_vain_is_told_in_one_condition() -> None:
    wishes = policy(2, 2, warnings=("restartPolicy is Never",))
    todo = plan(observed(job(trains(), wishes, pending_edits=EDITED), BOTH))
    assert "restartPolicy is Never" in warning(todo).message
    assert warning(todo).reason == "EditsPending"


@pytest.mark.parametrize(
    ("labels", "history", "generation", "cause"),
    [
        pytest.param(0, 0, 0, "JobCreated", id="a new job"),
        pytest.param(4, 0, 4, "RecordLost", id="labels of pods tell, though no agent lives"),
        pytest.param(0, 7, 7, "RecordLost", id="the history tells, though no pod is left"),
        pytest.param(9, 7, 9, "RecordLost", id="whichever tells of more"),
    ],
)
def test_a_lost_record_is_made_anew_above_everything_that_is_known(
    labels: int, history: int, generation: int, cause: str
) -> None:
    pods = [(pod(0, generation=labels), None)] if labels else []
    todo = plan(observed(job(None, history_generation=history), pods))
    assert todo.record.transition is not None
    assert (todo.record.generation, todo.record.transition.cause) == (generation, cause)
    then = plan(observed(job(todo.record, policy(2, 2)), [(pod(n), ready(0)) for n in range(2)]))
    assert then.record.generation == generation + 1


@pytest.mark.parametrize(
    ("late", "waits"),
    [
        pytest.param(ObservedAgent(trying_since=NOW - seconds(29.9)), True, id="an agent that may answer yet"),
        pytest.param(ObservedAgent(trying_since=NOW - seconds(30)), False, id="not for ever"),
        pytest.param(None, True, id="an agent that is to be asked yet"),
        pytest.param(ready(0), False, id="all have told"),
    ],
)
@pytest.mark.parametrize("labels", [0, 4])
def test_after_the_loss_of_a_record_nobody_starts_before_all_have_told(
    late: ObservedAgent | None, waits: bool, labels: int
) -> None:
    """One of them may run the generation that would be given away once more."""
    wishes = policy(1, 2)
    pods = [(pod(0, generation=labels), ready(0)), (pod(1), late)]
    todo = plan(observed(job(None, wishes), pods))
    assert todo.record.transition is None or todo.record.transition.cause == "RecordLost"
    assert bool(acts(todo, StartWorkers)) is not waits
    if waits:
        assert todo.wake_at is not None
        told = plan(observed(job(todo.record, wishes), [pods[0], (pod(1), running(9))]))
        assert [a.generation for a in acts(told, StopWorkers)] == [9]
        then = plan(observed(job(told.record, wishes), [pods[0], (pod(1), ready(9))]))
        assert then.record.generation == 10


@pytest.mark.parametrize(
    "gone", [{"phase": "Pending", "started": False}, {"phase": "Failed"}], ids=["has not begun", "has ended"]
)
def test_who_has_nothing_to_tell_is_not_waited_for(gone: dict[str, Any]) -> None:
    todo = plan(observed(job(None, policy(1, 2)), [(pod(0), ready(0)), (pod(1, **gone), None)]))
    assert acts(todo, StartWorkers)


@pytest.mark.parametrize("outcome", ["Completed", "Failed"])
def test_a_job_that_has_ended_does_not_begin_again_when_its_record_is_lost(outcome: str) -> None:
    end = Condition(outcome, True, Reason.WORKER_FAULT, "rank 0 exited with code 1", NOW - seconds(60))
    alone = replace(job(None, policy(2, 2), history_generation=7), conditions=(end,))
    todo = plan(observed(alone, [(pod(0), None)]))
    assert (todo.record.generation, todo.record.transition) == (7, None)
    assert (todo.record.outcome, todo.record.ended_at) == (outcome, end.since)
    assert todo.conditions[-1] == end
    assert not acts(todo, CreatePod)


def test_an_edited_template_is_on_record_before_pods_are_made_from_it() -> None:
    """Otherwise those of the very pass in which the job is resumed would be made from the old one."""
    stopped = trains(members=(), transition=transition(TransitionKind.SUSPEND, target_size=0))
    todo = plan(observed(job(stopped, policy(2, 2), pending_edits=EDITED)))
    assert todo.adopts_spec
    assert not acts(todo, CreatePod)
    assert todo.wake_at == NOW
    then = plan(observed(job(todo.record, policy(2, 2))))
    assert len(acts(then, CreatePod)) == 2


def test_pods_carry_the_generation_in_which_they_were_made() -> None:
    todo = plan(observed(job(trains(generation=5)), [(pod(0), running(5)), (pod(1), running(5))]))
    assert {a.generation for a in acts(todo, CreatePod)} == {5}


NEWER = "the state record has version 2; this operator reads version 1 and does not manage the job"
RUNS = Condition("Running", True, Reason.TRAINING, "2 replicas train in generation 1", NOW - seconds(60))


def test_the_record_of_a_newer_operator_is_left_alone() -> None:
    todo = plan(observed(job(None, unmanaged=NEWER, conditions=(RUNS,)), BOTH))
    assert (todo.actions, todo.skips_record) == ((), True)
    assert warning(todo).message == NEWER
    assert todo.conditions[-1] == RUNS, "the state is as the one who knows told it"
    assert [n.reason for n in todo.events] == ["RecordOfNewerOperator"]
    again = plan(observed(job(None, unmanaged=NEWER, conditions=todo.conditions), BOTH))
    assert (again.conditions, again.events) == (todo.conditions, ())


def test_such_a_job_can_be_deleted_all_the_same() -> None:
    leaving = job(None, unmanaged=NEWER, deleting_since=NOW)
    todo = plan(observed(leaving, BOTH))
    assert len(acts(todo, DeletePod)) == 2
    assert todo.skips_record
    assert plan(observed(leaving)).actions == (SetFinalizer(False),)


def test_a_spec_that_cannot_be_used_touches_nothing_of_a_job_that_trains() -> None:
    todo = plan(observed(replace(job(trains()), policy=None, spec_error="no"), BOTH))
    assert (todo.actions, todo.record.members) == ((), (pid(0), pid(1)))
