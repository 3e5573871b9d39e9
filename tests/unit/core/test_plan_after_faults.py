"""Faults: what they are, what they cost, and how training goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.core.builders import (
    NOW,
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

from elastipod_operator.core.actions import CreatePod, DeletePod, StartWorkers, StopWorkers
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Record, TransitionKind
from elastipod_operator.core.snapshot import AgentState, Failure, ObservedAgent, ObservedNode, ObservedPod

DRAINED = ready(1, drained=True)
CRASHED = ready(1, failure=Failure(0, 1, "", "ValueError: boom"), reason="WorkerCrash")


@pytest.mark.parametrize(
    ("first", "mine", "cause", "counted"),
    [
        pytest.param(pod(0), faulted(), "WorkerCrash", True, id="a worker that crashes counts"),
        pytest.param(pod(0, phase="Failed", problem="out of memory"), None, "PodFailed", True, id="a pod that ends by itself counts"),
        pytest.param(pod(0, phase="Failed", kill_at=NOW), None, "PodFailed", False, id="a pod that was deleted does not"),
        pytest.param(pod(0, phase="Failed", disruption="Preempted"), None, "PodFailed", False, id="a pod that was evicted does not"),
        pytest.param(None, None, "PodLost", False, id="a pod that is gone does not"),
        pytest.param(pod(0), ready(1), "WorkersStopped", False, id="workers that somebody else stopped do not"),
        pytest.param(pod(0), running(9), "RecordBehind", False, id="an agent ahead of the record does not"),
    ],
)  # fmt: skip
def test_an_incident(first: ObservedPod | None, mine: ObservedAgent | None, cause: str, counted: bool) -> None:
    pods = [(first, mine)] if first is not None else []
    todo = plan(observed(job(trains()), [*pods, (pod(1), running())]))
    began = todo.record.transition
    assert began is not None
    assert (began.kind, began.cause, began.uses_budget, began.graceful) == (
        TransitionKind.RECOVERY,
        cause,
        counted,
        False,
    )
    assert (todo.record.restarts, todo.record.retries, todo.record.fault_at) == (1, int(counted), NOW)
    asked = [pod(0).name] if mine is not None and mine.state is not AgentState.READY else []
    assert {a.pod: a.graceful for a in acts(todo, StopWorkers)} == dict.fromkeys([*asked, pod(1).name], False)


@pytest.mark.parametrize(
    "mine",
    [
        pytest.param(faulted(generation=1), id="a failure of an older generation"),
        pytest.param(agent(AgentState.STOPPING, 2), id="workers that are just ending"),
        pytest.param(agent(AgentState.COMPLETED, 2), id="workers that finished before the others"),
        pytest.param(silent(14, generation=2), id="a missed answer"),
        pytest.param(ObservedAgent(trying_since=NOW - seconds(3)), id="an agent that this operator has not heard yet"),
    ],
)
def test_what_is_no_incident(mine: ObservedAgent) -> None:
    todo = plan(observed(job(trains(generation=2)), [(pod(0), mine), (pod(1), running(2))]))
    assert todo.record.transition is None
    assert todo.record.restarts == 0


def test_a_lost_node_is_the_cause_even_when_workers_failed_of_it() -> None:
    lost = ObservedNode(name="node-0", ready=False, not_ready_since=NOW)
    todo = plan(observed(job(trains()), [(pod(0), silent(20)), (pod(1), faulted())], [lost]))
    assert todo.record.transition is not None
    assert (todo.record.transition.cause, todo.record.retries, todo.record.lost) == ("NodeLost", 0, (pid(0),))


def test_one_incident_is_one_recovery_however_many_pods_it_hits() -> None:
    first = plan(observed(job(trains(3)), [(pod(n), faulted()) for n in range(3)]))
    again = plan(observed(job(first.record), [(pod(0), ready(1)), (pod(1), faulted()), (pod(2), faulted())]))
    assert (again.record.restarts, again.record.retries) == (1, 1)


def test_the_message_is_that_of_the_first_who_failed_by_itself() -> None:
    killed = faulted()
    killed = replace(killed, failure=Failure(0, None, "SIGTERM", ""))
    todo = plan(observed(job(trains()), [(pod(0), killed), (pod(1), faulted(message="ValueError: boom"))]))
    assert todo.record.transition is not None
    assert "group rank 1" in todo.record.transition.message
    assert todo.record.transition.message.endswith("exited with code 1: “ValueError: boom”")


def test_the_agents_own_sentence_is_not_said_twice() -> None:
    said = "rank 1 was killed by SIGKILL; if nobody sent it, the kernel's out-of-memory killer did"
    killed = replace(faulted(), failure=Failure(1, None, "SIGKILL", said))
    todo = plan(observed(job(trains()), [(pod(0), killed), (pod(1), ready(1))]))
    assert todo.record.transition is not None
    assert todo.record.transition.message.count("was killed by SIGKILL") == 1


RECOVERS = trains(
    3, transition=transition(TransitionKind.RECOVERY, target_size=3), fault_at=NOW - seconds(5), restarts=1
)


@pytest.mark.parametrize(
    ("found_s", "number", "size"),
    [
        pytest.param(5, 3, 3, id="all are back: at once"),
        pytest.param(29, 2, 0, id="replacements are awaited"),
        pytest.param(30, 2, 2, id="for faultyScaleDownTimeout"),
        pytest.param(300, 1, 0, id="below the minimum for ever"),
    ],
)
def test_the_size_after_a_fault(found_s: float, number: int, size: int) -> None:
    began = NOW - seconds(found_s)
    record = replace(
        RECOVERS, transition=transition(TransitionKind.RECOVERY, target_size=3, detected_at=began, began_at=began)
    )
    todo = plan(observed(job(record), [(pod(n), ready(1)) for n in range(number)]))
    assert len(acts(todo, StartWorkers)) == size
    assert (todo.record.generation == 2) is bool(size)


def test_a_recovery_that_succeeded_is_over() -> None:
    record = trains(generation=2, running_since=None, fault_at=NOW - seconds(20), restarts=1)
    todo = plan(observed(job(record), [(pod(0), running(2)), (pod(1), running(2))]))
    assert (todo.record.recovered_at, todo.record.fault_at, todo.record.resized_at) == (NOW, None, None)


@pytest.mark.parametrize(
    ("failures", "step", "wait_s"),
    [
        pytest.param(0, 10, None, id="the first failure is recovered at once"),
        pytest.param(1, 10, 10, id="the second without a newer step waits"),
        pytest.param(3, 10, 40, id="each further one twice as long"),
        pytest.param(30, 10, 300, id="up to the limit and a quarter"),
        pytest.param(30, 11, None, id="a newer step begins anew"),
    ],
)
def test_failures_without_progress_are_spaced(failures: int, step: int, wait_s: float | None) -> None:
    record = trains(consecutive_failures=failures, best_step=10)
    todo = plan(observed(job(record), [(pod(0), faulted(step=step)), (pod(1), running(step=step))]))
    began = todo.record.transition
    assert began is not None
    if wait_s is None:
        assert began.not_before is None
    else:
        assert began.not_before is not None
        assert wait_s <= (began.not_before - NOW).total_seconds() <= wait_s * 1.25
    after = plan(observed(job(todo.record, policy(2, 2)), [(pod(0), ready(1)), (pod(1), ready(1))]))
    assert (after.record.generation == 2) is (wait_s is None)


RETRY_ONCE = policy(max_retries=1)


def test_a_job_fails_when_its_retries_are_used_up_with_the_workers_own_words() -> None:
    first = plan(observed(job(trains(retries=1), RETRY_ONCE), [(pod(0), faulted()), (pod(1), running())]))
    assert first.record.outcome == "", "not before everybody is accounted for"
    then = plan(observed(job(first.record, RETRY_ONCE), [(pod(0), ready(1)), (pod(1), ready(1))]))
    assert (then.record.outcome, then.record.outcome_reason) == ("Failed", "WorkerCrash")
    assert "ValueError: boom" in then.record.outcome_message
    assert "jobMaxRetryCount 1 is used up" in then.record.outcome_message


def test_a_retry_is_given_back_when_a_lost_node_turns_out_to_be_the_cause() -> None:
    first = plan(observed(job(trains(retries=1), RETRY_ONCE), [(pod(0), silent(10)), (pod(1), faulted())]))
    assert first.record.retries == 2
    lost = ObservedNode(name="node-0", ready=False, not_ready_since=NOW)
    then = plan(observed(job(first.record, RETRY_ONCE), [(pod(0), silent(20)), (pod(1), ready(1))], [lost]))
    assert (then.record.outcome, then.record.retries, then.record.lost) == ("", 1, (pid(0),))
    assert then.record.transition is not None
    assert then.record.transition.cause == "NodeLost"


def test_a_lost_member_is_replaced_and_never_taken_back() -> None:
    lost = ObservedNode(name="node-0", ready=False, not_ready_since=NOW)
    todo = plan(observed(job(trains()), [(pod(0), silent(20)), (pod(1), running())], [lost]))
    assert [a.name for a in acts(todo, DeletePod)] == [pod(0).name]
    assert pid(0, 1) in [a.pod for a in acts(todo, CreatePod)]
    back = plan(observed(job(todo.record), [(pod(0), ready(1)), (pod(1), ready(1))]))
    assert not acts(back, StartWorkers)


DRAINS = trains(3, transition=transition(target_size=2))


@pytest.mark.parametrize(
    ("mine", "others", "recovers"),
    [
        pytest.param(None, (running(), running()), True, id="a member that is missing before the checkpoint"),
        pytest.param(None, (agent(AgentState.STOPPING), agent(AgentState.STOPPING)), True, id="also when all are draining"),
        pytest.param(None, (DRAINED, agent(AgentState.STOPPING)), False, id="but not once one stands at the checkpoint"),
        pytest.param(None, (ObservedAgent(trying_since=NOW), running()), False, id="nor before the others were heard"),
        pytest.param(faulted(), (running(), running()), True, id="a worker that fails"),
        pytest.param(CRASHED, (agent(AgentState.STOPPING), running()), True, id="a worker that fails while it is stopped"),
        pytest.param(ready(1), (agent(AgentState.STOPPING), running()), False, id="not one that was just stopped"),
    ],
)  # fmt: skip
def test_a_fault_in_a_drain(
    mine: ObservedAgent | None, others: tuple[ObservedAgent, ObservedAgent], recovers: bool
) -> None:
    first = [(pod(0), mine)] if mine is not None else []
    todo = plan(observed(job(DRAINS), [*first, (pod(1), others[0]), (pod(2), others[1])]))
    began = todo.record.transition
    assert began is not None
    assert (began.kind is TransitionKind.RECOVERY) is recovers
    assert began.target_size == 2, "the size that the drain was for stays"
    assert todo.record.restarts == int(recovers)


def test_what_fails_when_the_time_for_the_checkpoint_is_over_was_not_at_fault() -> None:
    record = trains(transition=transition(deadline=NOW + seconds(1)))
    todo = plan(observed(job(record), [(pod(0), ready(1, reason="DrainTimedOut")), (pod(1), faulted())]))
    assert (todo.record.restarts, todo.record.transition) == (0, record.transition)
    assert len(acts(todo, StopWorkers)) == 1


def test_losses_after_the_checkpoint_change_nothing_but_the_size() -> None:
    drained = plan(
        observed(job(DRAINS, policy(3, 3)), [(pod(0), DRAINED), (pod(1), DRAINED), (pod(2, disruption="x"), DRAINED)])
    )
    assert drained.record.transition is not None
    assert not drained.record.transition.graceful
    then = plan(observed(job(drained.record, policy(3, 3)), [(pod(0), DRAINED)]))
    assert then.record.restarts == 0


def test_a_fault_while_the_job_is_to_be_suspended_is_recovered_first_then_suspended() -> None:
    record = trains(transition=transition(TransitionKind.SUSPEND, target_size=0))
    wishes = policy(suspend=True)
    first = plan(observed(job(record, wishes), [(pod(0), faulted()), (pod(1), running())]))
    assert first.record.transition is not None
    assert first.record.transition.kind is TransitionKind.RECOVERY
    then = plan(observed(job(first.record, wishes), [(pod(0), ready(1)), (pod(1), ready(1))]))
    assert then.record.transition is not None
    assert then.record.transition.kind is TransitionKind.SUSPEND


def test_members_that_this_operator_has_not_heard_are_waited_for_before_the_next_start() -> None:
    unheard = ObservedAgent(trying_since=NOW)
    todo = plan(observed(job(RECOVERS), [(pod(0), ready(1)), (pod(1), ready(1)), (pod(2), unheard)]))
    assert not acts(todo, StartWorkers)


def test_nothing_is_concluded_from_an_empty_record() -> None:
    assert plan(observed(job(Record(transition=transition(TransitionKind.START))), [])).record.restarts == 0


def test_after_a_worker_fault_the_stops_are_looked_at_later_not_at_once() -> None:
    todo = plan(observed(job(trains()), [(pod(0), faulted()), (pod(1), running())]))
    assert todo.wake_at is not None
    assert todo.wake_at > NOW
