"""Windows, offenders and growth at their limits, to the second; the stories are in the files beside."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    Seen,
    agent,
    context,
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

from elastipod_operator.core.actions import DeletePod, JobEvent, ShutDownAgent
from elastipod_operator.core.avoided_nodes import (
    MAX_KEPT,
    avoided,
    count_node_fault,
    drop_expired_faults,
    next_fault_expiry,
)
from elastipod_operator.core.backoff import jitter
from elastipod_operator.core.escalation import (
    BudgetCheck,
    check_budgets,
    close_window,
    does_not_progress,
    next_window_end,
)
from elastipod_operator.core.grant import grant_all
from elastipod_operator.core.growth import (
    growth_due,
    growth_failed,
    growth_window,
    mark_interrupted_growth,
    possible_size,
    warm,
    warming_until,
)
from elastipod_operator.core.health import assess
from elastipod_operator.core.names import Slot
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import FaultyReplica, NodeFaults, Record, RestartMode, RestartWindow, TransitionKind
from elastipod_operator.core.replica import Replicas
from elastipod_operator.core.sizes import Sizes
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
    assert found.events == (JobEvent(Reason.FULL_JOB_RESTART, why, warning=True),)
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
    told = JobEvent(Reason.NODE_AVOIDED, "node a had 2 faults; new pods avoid it for 600 s", warning=True)
    assert weighed(record, replace(PERIOD, max_retries=0)).events == (told,)
    assert weighed(record).events == (told,)
    restarts = weighed(replace(record, window=RestartWindow(0, NOW, 1, 0)), replace(PERIOD, restarts_before_full=0))
    assert [n.reason for n in restarts.events] == ["NodeAvoided", "FullJobRestart"]


# ---- offenders


def test_each_node_is_booked_once_for_a_fault() -> None:
    faulty_replicas = (
        FaultyReplica(pid(0), 0, "b"),
        FaultyReplica(pid(1), 1, "b"),
        FaultyReplica(pid(2), 2, ""),
        FaultyReplica(pid(3), 3, "a"),
    )
    before = (NodeFaults("a", 4, NOW - seconds(5)), NodeFaults("old", 7, NOW - seconds(600)))
    record, events = count_node_fault(
        trains(transition=RECOVERY, faulty_replicas=faulty_replicas, node_faults=before), PERIOD, NOW
    )
    assert record.node_faults == (NodeFaults("a", 5, NOW), NodeFaults("b", 1, NOW))
    assert events == (), "a was avoided before"


def test_the_newest_offences_are_kept() -> None:
    before = tuple(NodeFaults(f"n{n:02}", 1, NOW - seconds(MAX_KEPT - n)) for n in range(MAX_KEPT))
    record, _ = count_node_fault(
        trains(transition=RECOVERY, faulty_replicas=(FaultyReplica(pid(0), 0, "x"),), node_faults=before), PERIOD, NOW
    )
    assert record.node_faults == (*before[1:], NodeFaults("x", 1, NOW))


@pytest.mark.parametrize(
    ("limit", "nodes"),
    [(0, ()), (1, ("c",)), (2, ("b", "c")), (3, ("a", "b", "c"))],
)
def test_the_latest_offenders_are_avoided_and_named_in_order(limit: int, nodes: tuple[str, ...]) -> None:
    node_faults = (
        NodeFaults("c", 2, NOW),
        NodeFaults("b", 3, NOW),
        NodeFaults("a", 2, NOW - seconds(1)),
        NodeFaults("d", 1, NOW),
    )
    assert avoided(Record(node_faults=node_faults), replace(PERIOD, max_offenders=limit), NOW) == nodes


def test_more_than_can_be_kept_are_never_avoided() -> None:
    node_faults = tuple(NodeFaults(f"n{n:02}", 2, NOW) for n in range(MAX_KEPT + 3))
    assert len(avoided(Record(node_faults=node_faults), replace(PERIOD, max_offenders=99), NOW)) == MAX_KEPT


def test_old_offences_are_dropped() -> None:
    young, old = NodeFaults("a", 1, NOW - seconds(599)), NodeFaults("b", 1, NOW - seconds(600))
    assert drop_expired_faults(Record(node_faults=(young, old)), PERIOD, NOW).node_faults == (young,)
    assert drop_expired_faults(Record(node_faults=(young, old)), policy(), NOW).node_faults == (), (
        "nothing is avoided any more"
    )
    same = Record(node_faults=(young,))
    assert drop_expired_faults(same, PERIOD, NOW) is same


def test_the_next_pardon() -> None:
    node_faults = tuple(NodeFaults("n", 1, NOW - seconds(ago)) for ago in (10, 590, 600))
    assert next_fault_expiry(Record(node_faults=node_faults), PERIOD, NOW) == NOW + seconds(10)
    assert next_fault_expiry(Record(node_faults=node_faults[2:]), PERIOD, NOW) is None


# ---- growth


@pytest.mark.parametrize(
    ("changes", "wait_s"),
    [
        pytest.param({"window_since": None}, None, id="no window is open"),
        pytest.param({}, 60, id="scalingTimeout"),
        pytest.param({"recovered_at": NOW}, 70, id="the snooze after a recovery"),
        pytest.param({"recovered_at": NOW - seconds(20)}, 60, id="which may be over before"),
        pytest.param({"resized_at": NOW}, 80, id="the stable time after a resize"),
        pytest.param({"resized_at": NOW - seconds(30)}, 60, id="which may be over before, too"),
        pytest.param({"resized_at": NOW - seconds(5), "recovered_at": NOW}, 75, id="the later one"),
        pytest.param(
            {"resize_failures": 4, "resize_failed_at": NOW}, 80 * (1 + 0.25 * jitter("k", 4)), id="the back-off"
        ),
        pytest.param({"resize_failures": 1, "resize_failed_at": NOW}, 60, id="which may be over before as well"),
        pytest.param({"resize_failures": 0, "resize_failed_at": NOW + seconds(900)}, 60, id="no failure"),
        pytest.param({"resize_failures": 4, "resize_failed_at": None}, 60, id="no time of it"),
    ],
)
def test_when_a_window_closes(changes: dict[str, Any], wait_s: float | None) -> None:
    wishes = policy(snooze=seconds(70), min_stable=seconds(80))
    record = trains(**{"window_since": NOW, **changes})
    assert growth_due(record, wishes, "k") == (None if wait_s is None else NOW + seconds(wait_s))


def looked(record: Record, *pods: Seen, wishes: Policy | None = None) -> tuple[Record, datetime | None]:
    wishes = wishes or policy(2, 4)
    snapshot = observed(job(record, wishes), pods)
    replicas = assess(snapshot)
    members = [r for m in record.members if (r := replicas.get(m)) is not None]
    return growth_window(record, context(snapshot, replicas), members)


RUN: list[Seen] = [(pod(0), running()), (pod(1), running())]
COLD = ready(warming=True, answering_since=NOW - seconds(50))


@pytest.mark.parametrize(
    ("ago_s", "pods", "since_s", "wait_s"),
    [
        pytest.param(None, [(pod(2), ready())], 0, 60, id="the first newcomer opens it"),
        pytest.param(40, [(pod(2), ready())], 40, 20, id="it stays open"),
        pytest.param(40, [], None, None, id="nobody is left: it is closed"),
        pytest.param(None, [(pod(2), COLD)], None, 100, id="one that still loads does not open it"),
        pytest.param(10, [(pod(2), ready()), (pod(3), COLD)], 10, 50, id="nor does it put it off"),
        pytest.param(None, [(pod(2), ready(warming=True, answering_since=NOW - seconds(150)))], 0, 60, id="one that loads for ever does"),
        pytest.param(None, [(pod(2), ready(warming=True, answering_since=None))], 0, 60, id="and one of which nobody knows since when"),
        pytest.param(10, [(pod(2), ready()), (pod(3), ready(warming=True, answering_since=NOW - seconds(120)))], 10, 30,
                     id="it is looked at when that one is ready"),
    ],
)  # fmt: skip
def test_the_window(ago_s: float | None, pods: list[Seen], since_s: float | None, wait_s: float | None) -> None:
    record = trains(window_since=None if ago_s is None else NOW - seconds(ago_s))
    after, wake = looked(record, *RUN, *pods)
    assert after.window_since == (None if since_s is None else NOW - seconds(since_s))
    assert wake == (None if wait_s is None else NOW + seconds(wait_s))
    assert after.transition is None


@pytest.mark.parametrize(
    ("number", "message"),
    [
        pytest.param(1, "1 more replica is ready", id="one"),
        pytest.param(2, "2 more replicas are ready", id="two"),
        pytest.param(5, "2 more replicas are ready", id="no more than there is room for"),
    ],
)
def test_what_a_growth_is_for(number: int, message: str) -> None:
    after, wake = looked(trains(window_since=NOW - seconds(60)), *RUN, *((pod(2 + n), ready()) for n in range(number)))
    began = after.transition
    assert began is not None
    assert (began.kind, began.cause, began.message) == (TransitionKind.RESIZE, "CapacityAvailable", message)
    assert (began.from_size, began.target_size, wake) == (2, min(4, 2 + number), None)


@pytest.mark.parametrize(
    ("record", "first"),
    [
        pytest.param(trains(window_since=LONG_AGO, running_since=None), (pod(0), running()), id="not all run yet"),
        pytest.param(trains(window_since=LONG_AGO), (pod(0), silent(20)), id="one does not answer"),
        pytest.param(trains(window_since=LONG_AGO), (pod(0, disruption="x"), running()), id="one is about to go"),
        pytest.param(trains(3, window_since=LONG_AGO), (pod(0), running()), id="one is not seen"),
    ],
)
def test_no_growth_begins_while(record: Record, first: Seen) -> None:
    others = [(pod(1), running(step=9, step_at=NOW)), (pod(3), ready()), (pod(4), ready())]
    after, wake = looked(record, first, *others)
    assert (after.window_since, after.transition, wake) == (None, None, None)


def test_half_an_increment_opens_nothing() -> None:
    pairs = policy(sizes=Sizes((2, 4), 2))
    assert looked(trains(), *RUN, (pod(2), ready()), wishes=pairs)[0].window_since is None
    assert looked(trains(), *RUN, (pod(2), ready()), (pod(3), ready()), wishes=pairs)[0].window_since == NOW


def replicas_of(*pods: Seen) -> Replicas:
    return assess(observed(job(trains()), pods))


def test_the_size_that_would_be_possible() -> None:
    replicas = replicas_of(*RUN, (pod(2), ready()), (pod(3), agent()))
    assert possible_size(trains(), replicas, grant_all(policy(2, 4))) == 3
    assert possible_size(trains(), replicas, grant_all(policy(sizes=Sizes((2, 4), 2)))) == 2


def test_who_is_warm() -> None:
    slow, cold = (
        ready(warming=True, answering_since=NOW - seconds(150)),
        ready(warming=True, answering_since=NOW - seconds(149)),
    )
    replicas = replicas_of((pod(0), ready()), (pod(1), slow), (pod(2), cold))
    assert [r.id for r in warm(replicas.candidates(), NOW)] == [pid(0), pid(1)]
    assert [warming_until(replicas.by_id[pid(n)]) for n in range(3)] == [None, NOW, NOW + seconds(1)]


@pytest.mark.parametrize(
    ("record", "has_failed"),
    [
        pytest.param(trains(size_before_growth=2), True, id="the larger size did not come to run"),
        pytest.param(trains(transition=transition(cause="CapacityAvailable")), True, id="in the middle of it"),
        pytest.param(trains(transition=transition(cause="PodDisrupted")), False, id="another resize"),
        pytest.param(
            trains(transition=transition(TransitionKind.START, cause="CapacityAvailable")), False, id="a start"
        ),
        pytest.param(trains(), False, id="training"),
    ],
)
def test_a_fault_breaks_a_growth(record: Record, has_failed: bool) -> None:
    before = replace(record, resize_failures=2)
    after = mark_interrupted_growth(before, NOW)
    assert after == (growth_failed(before, NOW) if has_failed else before)
    assert growth_failed(before, NOW) == replace(before, size_before_growth=0, resize_failures=3, resize_failed_at=NOW)
