"""What a fault costs: how a recovery begins, waits, reaches and is widened."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    Seen,
    faulted,
    pid,
    pod,
    policy,
    replicas_of,
    running,
    seconds,
    trains,
    transition,
)

from elastipod_operator.core.backoff import jitter
from elastipod_operator.core.depth_reasons import DepthReason
from elastipod_operator.core.faults import Fault
from elastipod_operator.core.reasons import OpenReason, Reason
from elastipod_operator.core.record import FaultyReplica, Record, RestartMode, RestartWindow, Transition, TransitionKind
from elastipod_operator.core.recovery import begin_recovery, requested_restart, widen_restart

CRASH = Fault(OpenReason("WorkerCrash"), "boom", True, (), (FaultyReplica(pid(0), 0, "node-0"),))
LOSS = Fault(Reason.NODE_LOST, "gone", False, (pid(1),), (FaultyReplica(pid(1), 1, "node-1"),))


def recover(record: Record, fault: Fault = CRASH, *pods: Seen, key: str = "k") -> Record:
    return begin_recovery(record, replicas_of(record, *pods), policy(), NOW, fault, key)


def test_what_a_recovery_begins_with() -> None:
    record = trains(3, window_since=LONG_AGO, lost=(pid(9),), is_full_restart=True, window=RestartWindow(2, None, 0, 1))
    after = recover(record)
    assert after.transition == Transition(
        kind=TransitionKind.RECOVERY, cause=OpenReason("WorkerCrash"), message="boom", from_size=3, target_size=3,
        began_at=NOW, detected_at=NOW,
        deadline=NOW + seconds(30), uses_budget=True, depth_code=DepthReason.NOTHING_KEPT,
    )  # fmt: skip
    assert (after.window_since, after.fault_at, after.lost, after.is_full_restart) == (None, NOW, (pid(9),), False)
    assert (after.restarts, after.retries, after.window, after.faulty_replicas) == (
        1,
        1,
        RestartWindow(2, NOW, 1, 1),
        CRASH.faulty_replicas,
    )


def test_what_does_not_count_spends_nothing() -> None:
    record = trains(
        3, running_since=None, lost=(pid(9), pid(1)), stalled_recoveries=1, window=RestartWindow(2, LONG_AGO, 1, 1)
    )
    after = recover(record, LOSS)
    assert (after.restarts, after.retries, after.window, after.stalled_recoveries) == (1, 0, record.window, 1)
    assert after.lost == (pid(9), pid(1)), "once"
    assert recover(trains(3, lost=(pid(9),)), LOSS).lost == (pid(9), pid(1))
    assert after.transition is not None
    assert not after.transition.uses_budget


def test_a_fault_after_a_fault_is_dated_from_the_first_and_opens_no_new_window() -> None:
    after = recover(trains(fault_at=LONG_AGO, window=RestartWindow(0, LONG_AGO, 4, 0)))
    assert (after.fault_at, after.window) == (LONG_AGO, RestartWindow(0, LONG_AGO, 5, 0))


@pytest.mark.parametrize(
    ("old", "target_size"),
    [
        pytest.param(None, 2, id="the present size"),
        pytest.param(transition(target_size=4), 4, id="or the one that a drain was for"),
        pytest.param(transition(TransitionKind.SUSPEND, target_size=0), 2, id="of which a suspension has none"),
    ],
)
def test_the_size_that_a_recovery_wants(old: Transition | None, target_size: int) -> None:
    after = recover(trains(transition=old)).transition
    assert after is not None
    assert after.target_size == target_size


@pytest.mark.parametrize(
    ("changes", "step", "failures", "stalled", "best"),
    [
        pytest.param(
            {"best_step": 7, "consecutive_failures": 2, "stalled_recoveries": 2}, 7, 3, 3, 7, id="no newer step"
        ),
        pytest.param(
            {"best_step": 7, "consecutive_failures": 2, "stalled_recoveries": 2}, 8, 1, 0, 8, id="a newer one"
        ),
        pytest.param(
            {"best_step": 7, "consecutive_failures": 2, "stalled_recoveries": 2}, 3, 3, 3, 7, id="an older one"
        ),
        pytest.param({"running_since": NOW - seconds(60)}, None, 1, 1, -1, id="a minute of life proves nothing"),
        pytest.param(
            {"running_since": NOW - seconds(60), "consecutive_failures": 1}, None, 2, 1, -1, id="however often"
        ),
        pytest.param(
            {"running_since": NOW - seconds(61), "consecutive_failures": 1, "stalled_recoveries": 1},
            None,
            1,
            0,
            -1,
            id="more than one does",
        ),
        pytest.param(
            {"running_since": None, "consecutive_failures": 1}, None, 2, 1, -1, id="who never ran has not lived"
        ),
        pytest.param(
            {"running_since": LONG_AGO, "consecutive_failures": 1, "best_step": 9},
            9,
            2,
            1,
            9,
            id="steps count more than life",
        ),
    ],
)
def test_what_is_progress(changes: dict[str, Any], step: int | None, failures: int, stalled: int, best: int) -> None:
    after = recover(trains(**changes), CRASH, (pod(0), faulted(step=None)), (pod(1), running(step=step)))
    assert (after.consecutive_failures, after.stalled_recoveries, after.best_step) == (failures, stalled, best)


@pytest.mark.parametrize("key", ["k", "other"])
@pytest.mark.parametrize(("failures", "wait_s"), [(0, 0), (1, 10), (2, 20), (9, 300)])
def test_failures_in_a_row_are_spaced(failures: int, wait_s: float, key: str) -> None:
    after = recover(
        trains(best_step=9, consecutive_failures=failures), CRASH, (pod(0), faulted(step=9)), key=key
    ).transition
    assert after is not None
    wait = seconds(wait_s) * (1 + 0.25 * jitter(key, failures))
    assert after.not_before == (NOW + wait if wait_s else None)


@pytest.mark.parametrize(
    ("pods", "reach"),
    [
        pytest.param(
            [(pod(0), faulted(restart_mode=RestartMode.JOB)), (pod(1), running())],
            RestartMode.JOB,
            id="who failed is heard",
        ),
        pytest.param(
            [(pod(0), running(restart_mode=RestartMode.JOB)), (pod(1), faulted())],
            RestartMode.IN_PROCESS,
            id="not who runs",
        ),
        pytest.param(
            [(pod(0), faulted(7, restart_mode=RestartMode.JOB))],
            RestartMode.IN_PROCESS,
            id="nor who ran another generation",
        ),
        pytest.param(
            [(pod(5), faulted(restart_mode=RestartMode.JOB))], RestartMode.IN_PROCESS, id="nor who is no member"
        ),
        pytest.param(
            [(pod(0), faulted(restart_mode="?")), (pod(1), faulted(restart_mode=RestartMode.LOCAL))],
            RestartMode.PROCESSES,
            id="what?",
        ),
    ],
)
def test_how_far_a_recovery_reaches(pods: list[Seen], reach: RestartMode) -> None:
    assert requested_restart(trains(), replicas_of(trains(), *pods)) is reach
    began = recover(trains(), CRASH, *pods).transition
    assert began is not None
    assert began.reach is reach


@pytest.mark.parametrize(
    ("began", "reach"),
    [
        pytest.param(
            transition(TransitionKind.RECOVERY, reach=RestartMode.LOCAL), RestartMode.PROCESSES, id="more is asked for"
        ),
        pytest.param(transition(TransitionKind.RECOVERY, reach=RestartMode.JOB), RestartMode.JOB, id="less is not"),
        pytest.param(
            transition(TransitionKind.RECOVERY, reach=RestartMode.LOCAL, is_budget_checked=True),
            RestartMode.LOCAL,
            id="it is decided already",
        ),
        pytest.param(transition(reach=RestartMode.LOCAL), RestartMode.LOCAL, id="a planned change"),
    ],
)
def test_a_recovery_is_widened(began: Transition, reach: RestartMode) -> None:
    record = trains(transition=began)
    after = widen_restart(record, replicas_of(record, (pod(0), faulted(restart_mode=RestartMode.PROCESSES))))
    assert after.transition is not None
    assert after.transition.reach is reach
    assert widen_restart(trains(), replicas_of(trains(), (pod(0), faulted(restart_mode=RestartMode.JOB)))) == trains()
