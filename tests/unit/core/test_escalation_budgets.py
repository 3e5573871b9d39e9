"""Windows, offenders and growth at their limits, to the second; the stories are in the files beside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    Seen,
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

from elastipod_operator.core.actions import DeletePod, JobEvent, ShutDownAgent
from elastipod_operator.core.escalation import (
    BudgetCheck,
    check_budgets,
    close_window,
    does_not_progress,
    next_window_end,
)
from elastipod_operator.core.health import assess
from elastipod_operator.core.names import Slot
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import FaultyReplica, NodeFaults, Record, RestartMode, RestartWindow, TransitionKind
from elastipod_operator.core.snapshot import Policy

PERIOD = policy(2, 2, eval_period=seconds(600), max_offenders=2)
RECOVERY = transition(TransitionKind.RECOVERY, cause="WorkerCrash", uses_budget=True)


# ---- evaluation windows


@pytest.mark.parametrize(
    ("since_s", "began", "closed", "wait_s"),
    [
        pytest.param(None, None, False, None, id="nothing was counted"),
        pytest.param(599, None, False, 1, id="not yet"),
        pytest.param(600, None, True, None, id="now"),
        pytest.param(599, RECOVERY, False, None, id="in a change nobody waits for it"),
        pytest.param(999, RECOVERY, False, None, id="nor is it closed"),
    ],
)
def test_the_end_of_a_window(since_s: float | None, began: Any, closed: bool, wait_s: float | None) -> None:
    window = RestartWindow(4, None if since_s is None else NOW - seconds(since_s), 3, 2)
    record = trains(window=window, transition=began)
    assert close_window(record, PERIOD, NOW).window == (RestartWindow(5) if closed else window)
    assert next_window_end(record, PERIOD, NOW) == (None if wait_s is None else NOW + seconds(wait_s))


@pytest.mark.parametrize(("stalled", "ends"), [(2, False), (3, True)])
def test_three_recoveries_without_progress_are_too_many(stalled: int, ends: bool) -> None:
    assert does_not_progress(Record(stalled_recoveries=stalled)) is ends


# ---- weighing


def weighed(record: Record, wishes: Policy = PERIOD, *pods: Seen) -> BudgetCheck:
    snapshot = observed(job(record, wishes), pods)
    return check_budgets(record, assess(snapshot), wishes, NOW)


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(trains(transition=transition()), id="a planned change"),
        pytest.param(
            trains(transition=replace(RECOVERY, is_budget_checked=True), retries=9, stalled_recoveries=9, best_step=3),
            id="what was weighed",
        ),
    ],
)
def test_nothing_is_weighed_but_recoveries_and_those_once(record: Record) -> None:
    assert weighed(record, policy(max_retries=0)) == BudgetCheck(record)


@pytest.mark.parametrize(
    ("changes", "limits", "reason", "words"),
    [
        pytest.param({"retries": 3}, {"max_retries": 3}, "", "", id="so many retries are allowed"),
        pytest.param({"retries": 4}, {"max_retries": 3}, "WorkerCrash", "jobMaxRetryCount 3", id="one more ends it"),
        pytest.param(
            {"stalled_recoveries": 3, "best_step": 0},
            {},
            "NoProgress",
            "the last 3 recoveries reached no step after 0",
            id="no progress",
        ),
        pytest.param(
            {"stalled_recoveries": 3, "best_step": -1}, {}, "", "", id="who reports no steps is not judged by them"
        ),
        pytest.param(
            {"stalled_recoveries": 3, "best_step": 0},
            {"max_retries": 9},
            "",
            "",
            id="nor where the user said how often",
        ),
        pytest.param(
            {"window": RestartWindow(0, NOW, 2, 1)},
            {"restarts_before_full": 1, "max_full_restarts": 1},
            "WorkerCrash",
            "maxFullJobRestarts 1",
            id="full restarts",
        ),
        pytest.param(
            {"window": RestartWindow(0, NOW, 1, 1)},
            {"restarts_before_full": 1, "max_full_restarts": 1},
            "",
            "",
            id="none is due",
        ),
        pytest.param(
            {"window": RestartWindow(0, NOW, 1, 1), "transition": replace(RECOVERY, reach=RestartMode.JOB)},
            {"max_full_restarts": 1},
            "WorkerCrash",
            "maxFullJobRestarts 1",
            id="one is asked for",
        ),
        pytest.param(
            {"retries": 9, "transition": replace(RECOVERY, uses_budget=False)},
            {"max_retries": 3},
            "",
            "",
            id="what does not count",
        ),
    ],
)
def test_what_ends_a_job(changes: dict[str, Any], limits: dict[str, Any], reason: str, words: str) -> None:
    found = weighed(trains(**{"transition": RECOVERY, **changes}), policy(2, 2, **limits))
    assert found.reason == reason
    assert words in found.message
    assert not reason or found.message.startswith("a test; ")
    assert found.record.transition is not None
    assert (found.record.transition.is_budget_checked, found.actions) == (True, ())


@pytest.mark.parametrize(
    ("changes", "limits", "why", "window"),
    [
        pytest.param(
            {"window": RestartWindow(0, LONG_AGO, 3, 1)},
            {"restarts_before_full": 2, "eval_period": seconds(600)},
            "3 restarts within 600 s, more than numRestartBeforeFullJobRestart 2: all pods are recreated",
            RestartWindow(0, LONG_AGO, 0, 2),
            id="too many restarts",
        ),
        pytest.param(
            {"transition": replace(RECOVERY, reach=RestartMode.JOB), "window": RestartWindow(0, LONG_AGO, 3, 1)},
            {},
            "a worker requested a job-level restart: all pods are recreated",
            RestartWindow(0, LONG_AGO, 0, 2),
            id="a worker's wish",
        ),
        pytest.param(
            {
                "transition": replace(RECOVERY, reach=RestartMode.JOB, uses_budget=False),
                "window": RestartWindow(0, LONG_AGO, 3, 1),
            },
            {},
            "a worker requested a job-level restart: all pods are recreated",
            RestartWindow(0, LONG_AGO, 3, 1),
            id="that costs nothing",
        ),
    ],
)
def test_a_full_restart(changes: dict[str, Any], limits: dict[str, Any], why: str, window: RestartWindow) -> None:
    record = trains(**{"transition": RECOVERY, "lost": (pid(1),), **changes})
    pods = [
        (pod(0), ready(1)), (pod(1), ready(1)), (pod(pid(2, 1)), running(1)), (pod(3, phase="Failed"), None),
        (pod(4, node="", started=False), None),
    ]  # fmt: skip
    found = weighed(record, policy(2, 4, **limits), *pods)
    after = found.record
    assert found.events == (JobEvent(Reason.FULL_JOB_RESTART, why),)
    assert (after.members, after.is_full_restart, after.window) == ((), True, window)
    assert after.lost == (pid(1), pid(0), pid(2, 1)), "who has a place and has not ended, each once"
    assert {Slot("workers", 0): 0, Slot("workers", 1): 0, Slot("workers", 2): 1} == dict(after.incarnations)
    assert after.transition is not None
    assert (after.transition.recreates_pods, after.transition.is_budget_checked) == (True, True)
    assert [(a.name, a.reason) for a in found.actions if isinstance(a, DeletePod)] == [
        (pod(p).name, "full job restart") for p in (pid(0), pid(1), pid(2, 1))
    ]
    assert len([a for a in found.actions if isinstance(a, ShutDownAgent)]) == 2, "a lost one is not called"


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        pytest.param({"window": RestartWindow(0, NOW, 2, 0)}, {"restarts_before_full": 2}, id="so many are tolerated"),
        pytest.param({"window": RestartWindow(0, NOW, 99, 0)}, {}, id="any number without a limit"),
        pytest.param(
            {"window": RestartWindow(0, NOW, 9, 0), "transition": replace(RECOVERY, uses_budget=False)},
            {"restarts_before_full": 2},
            id="what does not count",
        ),
    ],
)
def test_no_full_restart(changes: dict[str, Any], limits: dict[str, Any]) -> None:
    record = trains(**{"transition": RECOVERY, **changes})
    assert record.transition is not None
    found = weighed(record, policy(2, 2, **limits), (pod(0), ready(1)))
    assert found == BudgetCheck(replace(record, transition=replace(record.transition, is_budget_checked=True)))


def test_a_node_that_is_avoided_now_is_told_with_the_end_and_with_the_restart() -> None:
    record = trains(
        transition=RECOVERY,
        faulty_replicas=(FaultyReplica(pid(0), 0, "a"),),
        node_faults=(NodeFaults("a", 1, NOW),),
        retries=9,
    )
    told = JobEvent(Reason.NODE_AVOIDED, "node a had 2 faults; new pods avoid it for 600 s")
    assert weighed(record, replace(PERIOD, max_retries=0)).events == (told,)
    assert weighed(record).events == (told,)
    restarts = weighed(replace(record, window=RestartWindow(0, NOW, 1, 0)), replace(PERIOD, restarts_before_full=0))
    assert [n.reason for n in restarts.events] == ["NodeAvoided", "FullJobRestart"]
