"""What the user is told: conditions, size and status."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.nonempty import every
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
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

from elastipod_operator.api.job_status import RUNNING, SELECTOR
from elastipod_operator.core.actions import Plan
from elastipod_operator.core.plan import plan
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import Record, TransitionKind
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import AgentState, Condition, ObservedAgent, ObservedPod, Snapshot, SpecLimits

RUN = [(pod(0), running()), (pod(1), running())]
UNSCHEDULABLE = "0/4 nodes are available: 4 Insufficient cpu"


def waits(ordinal: int, **changes: object) -> tuple[ObservedPod, None]:
    pending: dict[str, object] = {"phase": "Pending", "ip": "", "node": "", "started": False, "problem": UNSCHEDULABLE,
               "problem_reason": Reason.UNSCHEDULABLE}  # fmt: skip
    return pod(ordinal, **{**pending, **changes}), None


def state(todo: Plan) -> tuple[str, bool, str]:
    last = todo.conditions[-1]
    return last.type, last.status, last.reason


def condition(todo: Plan, kind: str) -> Condition:
    return next(c for c in todo.conditions if c.type == kind)


STARTING = Record(transition=transition(TransitionKind.START))
RESIZING = trains(transition=transition())
RECOVERING = trains(transition=transition(TransitionKind.RECOVERY, cause="WorkerCrash"))


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [
        pytest.param(observed(job(STARTING)), ("Created", True, "WaitingForPods"), id="no pod runs"),
        pytest.param(observed(job(STARTING), [(pod(0), None), (pod(1), None)]), ("PodsRunning", True, "WaitingForAgents"),
                     id="pods run, agents are awaited"),
        pytest.param(observed(job(trains(running_since=None)), [(pod(0), running()), (pod(1), ready())]), ("Running", True, "Starting"),
                     id="workers are being started"),
        pytest.param(observed(job(trains()), RUN), ("Running", True, "Training"), id="training"),
        pytest.param(observed(job(RESIZING), RUN), ("Running", True, "Resizing"), id="Running stays through a planned resize"),
        pytest.param(observed(job(replace(RECOVERING, fault_at=NOW - seconds(29))), RUN), ("Running", True, "Recovering"),
                     id="Running stays through a short recovery"),
        pytest.param(observed(job(replace(RECOVERING, fault_at=NOW - seconds(31))), RUN), ("Faulted", True, "WorkerCrash"),
                     id="Faulted after half a minute"),
        pytest.param(observed(job(replace(RECOVERING, fault_at=NOW, consecutive_failures=2)), RUN), ("Faulted", True, "WorkerCrash"),
                     id="Faulted at once when failures repeat"),
        pytest.param(observed(job(trains(transition=transition(TransitionKind.SUSPEND)), policy(suspend=True))),
                     ("Suspended", True, "SuspendedByUser"), id="suspended"),
        pytest.param(observed(job(trains(transition=transition(TransitionKind.SUSPEND))), RUN), ("Suspended", True, "Resuming"),
                     id="resumed before its workers were stopped"),
        pytest.param(observed(job(trains(outcome="Completed", outcome_reason="Completed", ended_at=NOW))), ("Completed", True, "Completed"),
                     id="completed"),
        pytest.param(observed(job(trains(outcome="Failed", outcome_reason="WorkerCrash", ended_at=NOW))), ("Failed", True, "WorkerCrash"),
                     id="failed"),
        pytest.param(observed(replace(job(), policy=None, spec_error="no size is left")), ("Suspended", True, "InvalidSpec"),
                     id="a spec that cannot be used"),
        pytest.param(observed(replace(job(trains()), policy=None, spec_error="no size is left"), RUN), ("Running", True, "Training"),
                     id="a running job whose spec cannot be used any more"),
    ],
)  # fmt: skip
def test_the_state_is_the_last_condition(snapshot: Snapshot, expected: tuple[str, bool, str]) -> None:
    assert state(plan(snapshot)) == expected


EVERY_SNAPSHOT = [
    observed(job(), []),
    observed(job(trains()), [*RUN, (pod(2), ready()), waits(3)]),
    observed(job(trains(), policy(sizes=Sizes((2,), 2, ("a warning",)))), RUN),
    observed(job(trains(window_since=NOW)), [*RUN, (pod(2), ready())]),
    observed(job(trains()), [(pod(0), silent(99)), (pod(1), silent(99))]),
    observed(job(RESIZING), [(pod(0), agent(AgentState.STOPPING)), (pod(1), running())]),
    observed(job(trains()), [(pod(0), faulted()), (pod(1), running())]),
    observed(job(trains(), policy(suspend=True)), RUN),
    observed(job(trains(), deleting_since=NOW), RUN),
    observed(replace(job(trains()), policy=None, spec_error="no"), RUN),
]


@pytest.mark.parametrize("snapshot", EVERY_SNAPSHOT)
def test_types_occur_once_and_auxiliary_ones_come_before_and_are_never_true(snapshot: Snapshot) -> None:
    conditions = plan(snapshot).conditions
    types = [c.type for c in conditions]
    assert len(set(types)) == len(types)
    assert types[-1] not in ("Scaling", "PodsReady", "Warning")
    assert not [c for c in conditions if c.type in ("Scaling", "PodsReady", "Warning") and c.status]


@pytest.mark.parametrize("snapshot", EVERY_SNAPSHOT)
def test_what_was_decided_once_is_decided_again_from_the_same_facts(snapshot: Snapshot) -> None:
    assert plan(snapshot) == plan(snapshot)


@pytest.mark.parametrize(
    "snapshot", [observed(job(trains(4)), [(pod(n), running()) for n in range(4)]), observed(job(trains()), [*RUN, waits(2), waits(3)])],
    ids=["at its maximum", "waiting for capacity"],
)  # fmt: skip
def test_a_steady_job_asks_for_nothing_and_writes_nothing(snapshot: Snapshot) -> None:
    first = plan(snapshot)
    told = replace(
        snapshot.job, record=first.record, conditions=first.conditions, scaling=first.status["elasticScalingStatus"]
    )
    later = replace(snapshot, now=NOW + seconds(3), job=told)
    second = plan(later)
    assert (first.actions, second.actions) == ((), ())
    assert (second.record, second.conditions, second.size, second.status, second.events) == (
        first.record, first.conditions, first.size, first.status, (),
    )  # fmt: skip


def test_the_time_of_a_condition_is_that_of_its_status() -> None:
    before = Condition("Running", True, Reason.STARTING, "x", LONG_AGO)
    todo = plan(observed(job(trains(), conditions=(before,)), RUN))
    assert todo.conditions[-1].since == LONG_AGO
    assert plan(observed(job(trains()), RUN)).conditions[-1].since == NOW


def test_a_job_that_trained_says_that_it_does_not_run_any_more() -> None:
    before = (Condition("Running", True, Reason.TRAINING, "x", LONG_AGO),)
    record = replace(RECOVERING, fault_at=NOW - seconds(60))
    todo = plan(observed(job(record, conditions=before), RUN))
    assert not condition(todo, "Running").status
    assert state(todo)[0] == "Faulted"


@pytest.mark.parametrize(
    ("pods", "reason", "words"),
    [
        pytest.param([*RUN, waits(2), waits(3)], "WaitingForCapacity", ("2 more replicas are wanted", UNSCHEDULABLE), id="no room"),
        pytest.param([*RUN, (pod(2), ready()), (pod(3), ready())], "Growing", ("grows at about 12:01:00 UTC",), id="about to grow"),
    ],
)  # fmt: skip
def test_scaling_says_why_the_job_has_its_size(
    pods: list[tuple[object, ObservedAgent | None]], reason: str, words: tuple[str, ...]
) -> None:
    told = condition(plan(observed(job(trains()), pods)), "Scaling")  # type: ignore[arg-type]
    assert told.reason == reason
    assert every(word in told.message for word in words), told.message


@pytest.mark.parametrize(
    ("snapshot", "reason", "words"),
    [
        pytest.param(observed(job(STARTING), [waits(0, problem="image x cannot be pulled", problem_reason=Reason.IMAGE_PULL_FAILED)]),
                     "ImagePullFailed", "image x", id="an image"),
        pytest.param(observed(job(STARTING), [(pod(0), ObservedAgent(trying_since=LONG_AGO))]), "AgentNotAnswering", "hyperpodrun",
                     id="a container without an agent"),
        pytest.param(observed(job(STARTING), pod_creation_error="2 pods were refused: quota"), "PodsRefused", "quota", id="a quota"),
        pytest.param(observed(job(trains()), [(pod(0), silent(99)), (pod(1), silent(99))]), "OperatorCutOff", "training continues",
                     id="an operator that is cut off"),
    ],
)  # fmt: skip
def test_pods_ready_says_what_keeps_them_from_training_once(snapshot: Snapshot, reason: str, words: str) -> None:
    todo = plan(snapshot)
    told = condition(todo, "PodsReady")
    assert told.reason == reason
    assert words in told.message
    assert reason in [n.reason for n in todo.events]
    again = replace(snapshot, job=replace(snapshot.job, conditions=todo.conditions))
    assert reason not in [n.reason for n in plan(again).events]


def test_an_operator_that_just_began_does_not_say_that_it_is_cut_off() -> None:
    unheard = ObservedAgent(trying_since=NOW)
    todo = plan(observed(job(trains()), [(pod(0), unheard), (pod(1), unheard)]))
    assert not [c for c in todo.conditions if c.reason == "OperatorCutOff"]
    assert state(todo) == ("Running", True, "Training")


def test_repeated_failures_are_told_with_the_next_try() -> None:
    record = replace(
        RECOVERING, fault_at=NOW, consecutive_failures=3,
        transition=replace(transition(TransitionKind.RECOVERY), not_before=NOW + seconds(40), message="rank 0 exited with code 1"),
    )  # fmt: skip
    told = plan(observed(job(record), [(pod(0), ready(1)), (pod(1), ready(1))])).conditions[-1].message
    assert "rank 0 exited with code 1" in told
    assert "3 failures in a row" in told
    assert "next attempt at 12:00:40 UTC" in told


@pytest.mark.parametrize(
    ("snapshot", "size"),
    [
        pytest.param(observed(job(trains()), RUN), "2/2/4", id="nothing more is there"),
        pytest.param(observed(job(trains()), [*RUN, (pod(2), ready())]), "2/3/4", id="one more is ready"),
        pytest.param(observed(job(RESIZING), RUN), "0/2/4", id="in transit nobody trains"),
        pytest.param(observed(job(trains(outcome="Completed", ended_at=NOW))), "0/0/4", id="at the end"),
    ],
)
def test_the_size_is_running_target_and_maximum(snapshot: Snapshot, size: str) -> None:
    assert plan(snapshot).size == size


def test_the_status_holds_only_fields_that_clients_know() -> None:
    from elastipod_operator.api.job_status import JobStatus

    record = trains(
        3, generation=7, recovered_at=NOW, resized_at=NOW, restarts=2, members=(pid(0), pid(1), pid(0, 0, "x"))
    )
    members = [(pod(member), running(7)) for member in record.members]
    status = plan(observed(job(record), members)).status
    known = JobStatus.model_validate(status)
    assert set(status) <= set(known.model_dump(by_alias=True))
    assert (status["restartCount"], status["masterAddr"], status["masterPort"]) == (2, "10.0.0.0", "10070")
    assert status["elasticScalingStatus"]["targetReplicas"] == {"workers": 2, "x": 1, RUNNING: 3}


TWO_SPECS = policy(2, 6, specs=(SpecLimits("base", 2), SpecLimits("extra", 4)))
BASE = (pid(0, spec="base"), pid(1, spec="base"))
EXTRA = (pid(0, spec="extra"), pid(1, spec="extra"))


@pytest.mark.parametrize(
    ("record", "targets", "running_now"),
    [
        pytest.param(trains(members=BASE), {"base": 2, "extra": 0}, 2, id="who trains"),
        pytest.param(trains(members=(*BASE, *EXTRA)), {"base": 2, "extra": 2}, 4, id="of both specs"),
        pytest.param(
            trains(members=BASE, transition=transition(target_size=5)),
            {"base": 2, "extra": 3},
            2,
            id="who is waited for",
        ),
        pytest.param(
            Record(transition=transition(TransitionKind.START, target_size=2)),
            {"base": 2, "extra": 0},
            0,
            id="before the first training",
        ),
        pytest.param(
            trains(members=(), transition=transition(TransitionKind.RECOVERY, target_size=4, from_size=4)),
            {"base": 2, "extra": 2},
            4,
            id="while all pods are recreated an autoscaler must not see the job vanish",
        ),
        pytest.param(
            trains(members=(*BASE, *EXTRA), transition=transition(TransitionKind.SUSPEND, target_size=0)),
            {"base": 0, "extra": 0},
            0,
            id="nobody while it is suspended",
        ),
        pytest.param(
            trains(members=BASE, outcome="Failed", ended_at=NOW), {"base": 0, "extra": 0}, 0, id="nor after the end"
        ),
    ],
)
def test_target_replicas(record: Record, targets: dict[str, int], running_now: int) -> None:
    status = plan(observed(job(record, TWO_SPECS), [(pod(m), running()) for m in record.members])).status
    assert status["elasticScalingStatus"]["targetReplicas"] == {**targets, RUNNING: running_now}
    assert status["elasticWorkloadRef"] == {SELECTOR: "HPJob=job"}


@pytest.mark.parametrize(
    ("pods", "scaled"),
    [
        pytest.param([*RUN, (pod(2), ready())], False, id="one is missing"),
        pytest.param([*RUN, (pod(2), ready()), waits(3)], True, id="all exist, if not ready"),
        pytest.param(
            [*RUN, (pod(2), ready()), (pod(3, kill_at=NOW), ready())], False, id="one that goes does not count"
        ),
        pytest.param([*RUN, *((pod(n), ready()) for n in range(2, 6))], True, id="more than that"),
    ],
)
def test_pods_are_scaled_when_those_of_the_target_exist(
    pods: list[tuple[object, ObservedAgent | None]], scaled: bool
) -> None:
    record = trains(transition=transition(target_size=4))
    status = plan(observed(job(record), pods)).status  # type: ignore[arg-type]
    assert status["elasticScalingStatus"]["podsScaled"] is scaled


@pytest.mark.parametrize(
    ("kind", "before", "size", "was", "told"),
    [
        pytest.param(TransitionKind.RECOVERY, 3, 2, False, True, id="a fault took one"),
        pytest.param(TransitionKind.RECOVERY, 2, 2, True, True, id="a fault that took none changes nothing"),
        pytest.param(TransitionKind.RESIZE, 3, 2, True, False, id="a planned shrink"),
        pytest.param(TransitionKind.RESIZE, 2, 3, True, False, id="a growth"),
    ],
)
def test_a_shrink_after_a_fault_is_told_from_others(
    kind: TransitionKind, before: int, size: int, was: bool, told: bool
) -> None:
    changing = transition(kind, began_s=100, target_size=size, from_size=before, graceful=False, is_budget_checked=True)
    record = trains(before, transition=changing, shrank_after_fault=was)
    todo = plan(observed(job(record), [(pod(n), ready(1)) for n in range(size)]))
    assert len(todo.record.members) == size
    assert todo.record.shrank_after_fault is told
    assert todo.status["elasticScalingStatus"]["isFaultyPodScaleDown"] is told


def test_the_time_of_the_scaling_status_is_that_of_its_last_change() -> None:
    snapshot = observed(job(trains()), [*RUN, waits(2), waits(3)])
    first = plan(snapshot).status["elasticScalingStatus"]
    assert first["lastUpdated"] == "2026-03-01T12:00:00Z"
    later = replace(snapshot, now=NOW + seconds(60), job=replace(snapshot.job, scaling=first))
    assert plan(later).status["elasticScalingStatus"] == first
    changed = replace(later, job=replace(later.job, record=trains(resize_failures=1)))
    assert plan(changed).status["elasticScalingStatus"]["lastUpdated"] == "2026-03-01T12:01:00Z"
