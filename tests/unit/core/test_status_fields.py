"""The fields of the status beside its conditions: sizes, members and the status of scaling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import (
    NOW,
    Seen,
    granted,
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
from tests.unit.core.conditions.reports import ENDED, FULL, RESIZING, RUN, STARTS, unschedulable

from elastipod_operator.api.job_status import RUNNING, SELECTOR
from elastipod_operator.core.health import assess
from elastipod_operator.core.names import PodId
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import (
    FaultyReplica,
    Record,
    RestartWindow,
    TransitionKind,
)
from elastipod_operator.core.snapshot import ObservedAgent, Snapshot, SpecLimits
from elastipod_operator.core.status_fields import job_size, status_fields


@pytest.mark.parametrize(
    ("record", "pods", "size"),
    [
        pytest.param(trains(running_since=None), RUN, "0/2/4", id="not all run"),
        pytest.param(trains(3), [*RUN], "3/3/4", id="those on record"),
        pytest.param(
            trains(), [*RUN, *((pod(n), ready()) for n in (2, 3, 4))], "2/4/4", id="as many as are ready and allowed"
        ),
        pytest.param(trains(transition=transition(target_size=3)), RUN, "0/3/4", id="the goal of a change"),
        pytest.param(ENDED, RUN, "0/0/4", id="after the end"),
    ],
)
def test_size(record: Record, pods: list[Seen], size: str) -> None:
    snapshot = observed(job(record), pods)
    assert str(job_size(snapshot, record, assess(snapshot), granted(snapshot))) == size


def test_the_size_of_a_job_that_cannot_be_used() -> None:
    snapshot = observed(replace(job(trains()), policy=None, spec_error="no"), RUN)
    assert str(job_size(snapshot, trains(), assess(snapshot), granted(snapshot))) == "2/2/0"


def status(record: Record, wishes: Any = FULL, *pods: Seen) -> dict[str, Any]:
    snapshot = observed(job(record, wishes), pods)
    return status_fields(snapshot, record, assess(snapshot), granted(snapshot))


def test_the_status_of_a_new_job_of_one_size() -> None:
    assert status(STARTS) == {
        "startTime": "2026-03-01T11:00:00Z", "restartCount": 0,
        "restartStatus": {"currentEvalPeriod": 0, "fullJobRestartCount": 0, "restartCount": 0},
    }  # fmt: skip


def test_the_whole_status() -> None:
    faulty_replicas = (
        FaultyReplica(pid(1), 1, "node-b"),
        FaultyReplica(pid(0), 0, "node-b"),
        FaultyReplica(pid(7), -1, ""),
        FaultyReplica(pid(2), 2, "node-a"),
    )
    record = trains(
        generation=3,
        restarts=4,
        window=RestartWindow(1, NOW, 2, 3),
        faulty_replicas=faulty_replicas,
        is_full_restart=True,
        ended_at=NOW,
        resize_failures=5,
        resized_at=NOW - seconds(9),
        recovered_at=NOW - seconds(8),
        shrank_after_fault=True,
    )
    assert status(record, policy(2, 4), *RUN) == {
        "startTime": "2026-03-01T11:00:00Z", "completionTime": "2026-03-01T12:00:00Z", "restartCount": 4,
        "masterAddr": "10.0.0.0", "masterPort": "10030",
        "restartStatus": {"currentEvalPeriod": 1, "fullJobRestartCount": 3, "restartCount": 2},
        "latestFaultyPodInstanceList": {
            "restartType": "JLR", "faultyInstanceIdList": ["node-a", "node-b"],
            "faultyPodList": ["job-workers-1", "job-workers-0", "job-workers-7", "job-workers-2"],
            "faultyRankList": ["1", "0", "2"],
        },
        "elasticScalingStatus": {
            "targetReplicas": {"workers": 2, "Running": 2}, "podsScaled": True,
            "isFaultyPodScaleDown": True, "consecutiveScalingFailures": 5,
            "lastScalingTime": "2026-03-01T11:59:51Z", "lastRestartTime": "2026-03-01T11:59:52Z", "lastUpdated": "2026-03-01T12:00:00Z",
        },
        "elasticWorkloadRef": {"selector": "HPJob=job"},
    }  # fmt: skip


def test_the_base_spec_is_the_first_to_be_wanted() -> None:
    two = policy(2, 6, specs=(SpecLimits("base", 2), SpecLimits("extra", 4)))
    wanted = {
        target_size: status(Record(transition=transition(TransitionKind.START, target_size=target_size)), two)[
            "elasticScalingStatus"
        ]["targetReplicas"]
        for target_size in (1, 2, 5, 9)
    }
    assert [(t["base"], t["extra"]) for t in wanted.values()] == [(1, 0), (2, 0), (2, 3), (2, 4)]
    members = (PodId("base", 0, 0), PodId("extra", 0, 0))
    missing = status(trains(members=members), two, (pod(members[0]), running()))
    assert missing["elasticScalingStatus"]["podsScaled"] is False


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
    assert str(plan(snapshot).size) == size


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
        pytest.param([*RUN, (pod(2), ready()), unschedulable(3)], True, id="all exist, if not ready"),
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
    snapshot = observed(job(trains()), [*RUN, unschedulable(2), unschedulable(3)])
    first = plan(snapshot).status["elasticScalingStatus"]
    assert first["lastUpdated"] == "2026-03-01T12:00:00Z"
    later = replace(snapshot, now=NOW + seconds(60), job=replace(snapshot.job, scaling=first))
    assert plan(later).status["elasticScalingStatus"] == first
    changed = replace(later, job=replace(later.job, record=trains(resize_failures=1)))
    assert plan(changed).status["elasticScalingStatus"]["lastUpdated"] == "2026-03-01T12:01:00Z"
