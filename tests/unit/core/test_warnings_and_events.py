"""The whole of what is told in each situation, in its order: conditions, size, status, and the time phase_times."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    agent,
    granted,
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

from elastipod_operator.core.conditions import StatusReport, describe
from elastipod_operator.core.health import assess
from elastipod_operator.core.names import PodId
from elastipod_operator.core.phase_accounting import (
    Phase,
    account_phases,
    goodput,
    next_phase_change,
    phase_of,
    phase_times_since,
    total,
)
from elastipod_operator.core.plan import plan
from elastipod_operator.core.reasons import OpenReason, Reason
from elastipod_operator.core.record import (
    FaultyReplica,
    PartialGang,
    PhaseTimes,
    Record,
    ResizeStatistics,
    RestartWindow,
    TransitionKind,
)
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import AgentState, Condition, ObservedAgent, ObservedPod, Snapshot, SpecLimits
from elastipod_operator.core.status_fields import size_text, status_fields

Seen = tuple[ObservedPod, ObservedAgent | None]
Told = list[tuple[str, bool, str]]
RUN: list[Seen] = [(pod(0), running()), (pod(1), running())]
ACCEPTED = ("Created", True, "Accepted")
ANSWER = ("PodsReady", False, "AgentsAnswer")
PODS_RUN = ("PodsRunning", True, "PodsRunning")
STARTS = Record(transition=transition(TransitionKind.START))
FULL = policy(2, 2)
ENDED = trains(outcome="Failed", outcome_reason="WorkerCrash", ended_at=NOW)


def report(snapshot: Snapshot) -> StatusReport:
    return describe(snapshot, snapshot.job.record or Record(), assess(snapshot), granted(snapshot))


def told(snapshot: Snapshot) -> Told:
    return [(c.type, c.status, c.reason) for c in report(snapshot).conditions]


def waits(ordinal: int, **changes: Any) -> Seen:
    return pod(ordinal, **{"phase": "Pending", "ip": "", "node": "", "started": False, **changes}), None


def scaling(reason: str) -> tuple[str, bool, str]:
    return "Scaling", False, reason


RECOVERS = trains(
    transition=transition(TransitionKind.RECOVERY, cause="WorkerCrash", is_budget_checked=True),
    fault_at=NOW - seconds(29.9),
)
BROKEN = replace(RECOVERS, fault_at=NOW, consecutive_failures=2)


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [
        pytest.param(observed(job(STARTS)), [("Created", True, "WaitingForPods")], id="a new job"),
        pytest.param(observed(job(STARTS), [(pod(0), None), waits(1)]), [("Created", True, "WaitingForPods")], id="one pod of two"),
        pytest.param(observed(job(STARTS), [(pod(0), None), (pod(1), None)]), [ACCEPTED, ("PodsRunning", True, "WaitingForAgents")],
                     id="both"),
        pytest.param(observed(job(STARTS), [(pod(0), ready(0)), (pod(1, phase="Failed"), None)]),
                     [("PodsReady", False, "AgentsAnswer"), ("Created", True, "WaitingForPods")], id="one has ended"),
        pytest.param(observed(job(trains(), FULL), RUN), [ACCEPTED, PODS_RUN, ANSWER, scaling("AtMaximum"), ("Running", True, "Training")],
                     id="training"),
        pytest.param(observed(job(trains(running_since=None), FULL), RUN),
                     [ACCEPTED, PODS_RUN, ANSWER, scaling("AtMaximum"), ("Running", True, "Starting")], id="starting"),
        pytest.param(observed(job(trains(transition=transition()), FULL), RUN),
                     [ACCEPTED, PODS_RUN, ANSWER, ("Running", True, "Resizing")], id="resizing"),
        pytest.param(observed(job(RECOVERS, FULL), RUN), [ACCEPTED, PODS_RUN, ANSWER, ("Running", True, "Recovering")], id="recovering"),
        pytest.param(observed(job(replace(RECOVERS, fault_at=NOW - seconds(30)), FULL), RUN),
                     [ACCEPTED, PODS_RUN, ANSWER, ("Faulted", True, "WorkerCrash")], id="for half a minute"),
        pytest.param(observed(job(BROKEN, FULL), RUN), [ACCEPTED, PODS_RUN, ANSWER, ("Faulted", True, "WorkerCrash")], id="again"),
        pytest.param(observed(job(replace(BROKEN, transition=None), FULL), RUN),
                     [ACCEPTED, PODS_RUN, ANSWER, scaling("AtMaximum"), ("Faulted", True, "Recovering")], id="until all run"),
        pytest.param(observed(job(trains(transition=transition(TransitionKind.SUSPEND)), policy(2, 2, suspend=True))),
                     [ACCEPTED, ("Suspended", True, "SuspendedByUser")], id="suspended"),
        pytest.param(observed(job(ENDED, FULL)), [ACCEPTED, ("Running", False, "Failed"), ("Failed", True, "WorkerCrash")], id="ended"),
        pytest.param(observed(replace(job(STARTS), policy=None, spec_error="no")), [ACCEPTED, ("Suspended", True, "InvalidSpec")],
                     id="a spec that cannot be used"),
        pytest.param(observed(replace(job(trains(transition=transition())), policy=None, spec_error="no")),
                     [ACCEPTED, ("Suspended", True, "InvalidSpec")], id="in a change"),
        pytest.param(observed(replace(job(trains()), policy=None, spec_error="no")),
                     [ACCEPTED, ("Warning", False, "InvalidSpec"), ("Running", True, "Training")], id="while it trains"),
        pytest.param(observed(job(trains(), FULL, unmanaged="newer")),
                     [("Warning", False, "RecordOfNewerOperator"), ("Created", True, "Accepted")], id="left alone"),
    ],
)  # fmt: skip
def test_conditions(snapshot: Snapshot, expected: Told) -> None:
    assert told(snapshot) == expected


def test_why_a_spec_cannot_be_used_is_told() -> None:
    assert sentence(observed(replace(job(STARTS), policy=None, spec_error="no size")), "Suspended") == "no size"
    assert sentence(observed(replace(job(trains()), policy=None, spec_error="no size")), "Warning") == "no size"


@pytest.mark.parametrize(
    ("number", "whose"),
    [
        pytest.param(1, f"the agent of pod {pod(0).name} and the operator do not accept each other", id="one"),
        pytest.param(
            3,
            f"the agent of pod {pod(0).name} (and of 2 more pods) and the operator do not accept each other",
            id="three",
        ),
    ],
)
def test_agents_that_do_not_know_the_operator_are_counted(number: int, whose: str) -> None:
    pods = [(pod(n), ready(authentication_failed=n < number)) for n in (3, 2, 1, 0)]
    assert sentence(observed(job(STARTS), pods), "PodsReady").startswith(whose)


@pytest.mark.parametrize(
    ("record", "changes", "pods", "reason"),
    [
        pytest.param(trains(), {}, RUN, "WaitingForCapacity", id="nobody is there"),
        pytest.param(trains(4), {}, [(pod(n), running()) for n in range(4)], "AtMaximum", id="all are"),
        pytest.param(trains(5), {}, [(pod(n), running()) for n in range(5)], "AtMaximum", id="and more"),
        pytest.param(trains(window_since=NOW), {}, [*RUN, (pod(2), ready())], "Growing", id="a window is open"),
        pytest.param(
            trains(), {}, [*RUN, (pod(2), ready(warming=True, answering_since=NOW))], "WarmingUp", id="one still loads"
        ),
        pytest.param(trains(), {"pod_creation_error": "quota"}, RUN, "LimitReached", id="the API server refused one"),
        pytest.param(
            trains(gang=PartialGang(NOW, 0, 1, NOW + seconds(9))),
            {},
            RUN,
            "WaitingForCapacity",
            id="places are given back",
        ),
        pytest.param(
            trains(
                running_since=NOW, resize_statistics=ResizeStatistics(seconds(9), ((2, seconds(2)), (4, seconds(1.9))))
            ),
            {},
            RUN,
            "NotWorthwhile",
            id="it does not pay",
        ),
        pytest.param(
            trains(
                running_since=NOW, resize_statistics=ResizeStatistics(seconds(9), ((2, seconds(2)), (4, seconds(1.9))))
            ),
            {},
            [*RUN, waits(2)],
            "WaitingForCapacity",
            id="it was asked for before",
        ),
        pytest.param(
            trains(resize_statistics=ResizeStatistics(seconds(9), ((2, seconds(2)), (4, seconds(1.9))))),
            {},
            RUN,
            "WaitingForCapacity",
            id="the time is over",
        ),
    ],
)
def test_why_a_job_has_its_size(record: Record, changes: dict[str, Any], pods: list[Seen], reason: str) -> None:
    assert scaling(reason) in told(observed(job(record), pods, **changes))


def sentence(snapshot: Snapshot, kind: str) -> str:
    return next(c.message for c in report(snapshot).conditions if c.type == kind)


@pytest.mark.parametrize(
    ("pods", "words"),
    [
        pytest.param(RUN, "2 more replicas are wanted and 0 pods wait", id="no pods"),
        pytest.param(
            [*RUN, waits(2), waits(3, problem="no room")],
            "2 more replicas are wanted and 2 pods wait: no room",
            id="two",
        ),
        pytest.param(
            [*RUN, (pod(2), agent(AgentState.INIT))],
            "2 more replicas are wanted and 1 pod waits",
            id="one that comes up",
        ),
        pytest.param([*RUN, waits(2), waits(7)], "2 more replicas are wanted and 2 pods wait", id="whichever they are"),
    ],
)
def test_the_wait_for_capacity_is_told_in_figures(pods: list[Seen], words: str) -> None:
    assert sentence(observed(job(trains()), pods), "Scaling") == words


@pytest.mark.parametrize(
    ("failures", "words"),
    [
        pytest.param(0, "more replicas are ready; the job grows at about 12:01:00 UTC", id="when"),
        pytest.param(
            2,
            "more replicas are ready; the job grows at about 12:01:00 UTC (growths that failed in a row: 2)",
            id="and how often in vain",
        ),
    ],
)
def test_a_growth_is_told_in_figures(failures: int, words: str) -> None:
    record = trains(window_since=NOW, resize_failures=failures, resize_failed_at=LONG_AGO)
    assert sentence(observed(job(record), [*RUN, (pod(2), ready())]), "Scaling") == words


@pytest.mark.parametrize(
    ("record", "pods", "words"),
    [
        pytest.param(
            STARTS, [(pod(0), ready(0)), waits(1, problem="no room")], "1 of 2 replicas is ready: no room", id="few"
        ),
        pytest.param(
            Record(transition=transition(TransitionKind.START, target_size=4)),
            [(pod(0), ready(0))],
            "1 of 4 replicas is ready",
            id="of a goal",
        ),
        pytest.param(
            Record(transition=transition(TransitionKind.START, target_size=1)),
            [(pod(0), ready(0))],
            "1 of 2 replicas is ready",
            id="minimum",
        ),
        pytest.param(STARTS, [(pod(0), ready(0)), (pod(1), ready(0))], "2 replicas are ready", id="enough"),
    ],
)
def test_a_start_is_told_in_figures(record: Record, pods: list[Seen], words: str) -> None:
    assert report(observed(job(record), pods)).conditions[-1].message == words


@pytest.mark.parametrize(
    ("pods", "words"),
    [
        pytest.param([(pod(0), running()), (pod(1), agent(AgentState.STOPPING))], "a test; 2 replicas are being stopped", id="all"),
        pytest.param([(pod(0), running()), (pod(1), ready(1))], "a test; 1 replica is being stopped", id="one"),
        pytest.param([(pod(0), silent(20)), (pod(1), silent(20))], "a test; 2 replicas are being stopped", id="as far as is known"),
        pytest.param([(pod(0, disruption="x"), running()), (pod(1), ready(1))], "a test; 1 replica is being stopped", id="who goes, too"),
        pytest.param([(pod(0, phase="Failed"), running()), (pod(1), ready(1))], "a test; 1 of 2 replicas is ready", id="ended"),
        pytest.param([(pod(0), ready(1)), (pod(1), ready(1)), (pod(2), running())], "a test; 2 replicas are ready", id="nor strangers"),
    ],
)  # fmt: skip
def test_a_change_is_told_in_figures(pods: list[Seen], words: str) -> None:
    assert report(observed(job(trains(transition=transition())), pods)).conditions[-1].message == words


@pytest.mark.parametrize(
    ("changes", "has_next_try"),
    [
        pytest.param({"not_before": NOW + seconds(1)}, True, id="a wait"),
        pytest.param({"not_before": NOW}, False, id="that is over"),
        pytest.param({}, False, id="no wait"),
    ],
)
def test_the_next_try_is_told_while_it_is_waited_for(changes: dict[str, Any], has_next_try: bool) -> None:
    began = transition(TransitionKind.RECOVERY, is_budget_checked=True, **changes)
    message = report(observed(job(replace(BROKEN, transition=began)), RUN)).conditions[-1].message
    assert ("next attempt" in message) is has_next_try
    assert "2 failures in a row" in message


def test_a_recovery_is_looked_at_when_it_becomes_a_fault() -> None:
    assert report(observed(job(RECOVERS), RUN)).wake_at == NOW + seconds(0.1)
    assert report(observed(job(BROKEN), RUN)).wake_at is None
    assert report(observed(job(trains()), RUN)).wake_at is None


@pytest.mark.parametrize(
    ("pods", "changes", "reason"),
    [
        pytest.param([(pod(0), silent(20)), (pod(1), silent(20))], {"pod_creation_error": "quota"}, "OperatorCutOff", id="nobody answers"),
        pytest.param([(pod(0), ready(authentication_failed=True)), (pod(1), silent(20))], {"pod_creation_error": "quota"},
                     "TokenRefused", id="one does not know us"),
        pytest.param([waits(0, problem="x", problem_reason=Reason.IMAGE_PULL_FAILED)], {"pod_creation_error": "quota"}, "PodsRefused",
                     id="a refusal"),
        pytest.param([waits(0, problem="x", problem_reason=Reason.IMAGE_PULL_FAILED)], {}, "ImagePullFailed", id="an image"),
        pytest.param([waits(0, problem="x", problem_reason=Reason.IMAGE_PULL_FAILED, kill_at=NOW), (pod(1), ready())], {}, "AgentsAnswer",
                     id="not of a pod that goes"),
        pytest.param([(pod(0, phase="Failed", problem="x", problem_reason=Reason.CONTAINER_ENDED), None)], {}, "ContainerEnded",
                     id="an end"),
        pytest.param([waits(0, problem="x", problem_reason=Reason.UNSCHEDULABLE), (pod(1), ready())], {}, "AgentsAnswer", id="no room yet"),
        pytest.param([(pod(1, problem="x", problem_reason=Reason.IMAGE_PULL_FAILED), ready()), (pod(0), ready())], {}, "AgentsAnswer",
                     id="nor what is over"),
        pytest.param([(pod(0), ObservedAgent(trying_since=LONG_AGO)), waits(1, problem="x", problem_reason=Reason.IMAGE_PULL_FAILED)], {},
                     "AgentNotAnswering", id="the first pod counts"),
        pytest.param([waits(1, problem="x", problem_reason=Reason.IMAGE_PULL_FAILED), (pod(0), ObservedAgent(trying_since=LONG_AGO))], {},
                     "AgentNotAnswering", id="in whatever order they are seen"),
        pytest.param([waits(0), (pod(1), ObservedAgent(trying_since=NOW))], {}, None, id="nothing yet"),
    ],
)  # fmt: skip
def test_what_keeps_pods_from_training(pods: list[Seen], changes: dict[str, Any], reason: str | None) -> None:
    found = [r for kind, _, r in told(observed(job(STARTS), pods, **changes)) if kind == "PodsReady"]
    assert found == ([reason] if reason else [])


@pytest.mark.parametrize(
    ("record", "changes", "wishes", "reasons"),
    [
        pytest.param(
            trains(stalled_recoveries=3),
            {"pending_edits": ("a",)},
            policy(warnings=("w",)),
            ["NoProgress", "EditsPending", "SpecWarning"],
            id="the most pressing",
        ),
        pytest.param(
            trains(stalled_recoveries=2),
            {"pending_edits": ("a",)},
            policy(warnings=("w",)),
            ["EditsPending", "SpecWarning"],
            id="then edits",
        ),
        pytest.param(trains(), {}, policy(warnings=("v", "w")), ["SpecWarning"], id="then the spec"),
        pytest.param(trains(), {}, policy(sizes=Sizes((2,), 2, ("w",))), ["SpecWarning"], id="or its sizes"),
        pytest.param(trains(), {}, policy(), [], id="nothing"),
    ],
)
def test_what_deserves_attention(record: Record, changes: dict[str, Any], wishes: Any, reasons: list[str]) -> None:
    snapshot = observed(job(record, wishes, **changes), RUN)
    assert [r for kind, _, r in told(snapshot) if kind == "Warning"] == reasons[:1]
    assert [n.reason for n in report(snapshot).events] == reasons, "an Event each"
    written = replace(snapshot, job=replace(snapshot.job, conditions=report(snapshot).conditions))
    assert report(written).events == (), "and only once"


def test_all_warnings_are_told_in_one_sentence() -> None:
    wishes = policy(sizes=Sizes((2, 3), 2, ("first",)), warnings=("second",))
    assert sentence(observed(job(trains(), wishes), RUN), "Warning") == "first; second"


def test_a_job_that_ran_says_that_it_does_not_and_keeps_its_times() -> None:
    before = (
        Condition("Created", True, OpenReason("x"), "x", LONG_AGO),
        Condition("Running", True, Reason.TRAINING, "x", LONG_AGO),
    )
    snapshot = observed(job(BROKEN, FULL, conditions=before), RUN)
    conditions = report(snapshot).conditions
    assert told(snapshot) == [
        ACCEPTED,
        PODS_RUN,
        ("Running", False, "WorkerCrash"),
        ANSWER,
        ("Faulted", True, "WorkerCrash"),
    ]
    assert [c.since for c in conditions] == [LONG_AGO, NOW, NOW, NOW, NOW]
    assert conditions[2].message == conditions[4].message


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        pytest.param(Condition("Running", True, Reason.TRAINING, "x", LONG_AGO),
                     [ACCEPTED, ("Warning", False, "RecordOfNewerOperator"), ("Running", True, "Training")], id="the state is kept"),
        pytest.param(Condition("Created", True, Reason.WAITING_FOR_PODS, "x", LONG_AGO),
                     [("Warning", False, "RecordOfNewerOperator"), ACCEPTED], id="also the first one"),
        pytest.param(Condition("Warning", False, Reason.SPEC_WARNING, "x", LONG_AGO),
                     [("Warning", False, "RecordOfNewerOperator"), ACCEPTED], id="of a warning nothing is"),
    ],
)  # fmt: skip
def test_what_is_told_of_a_job_that_is_left_alone(last: Condition, expected: Told) -> None:
    assert told(observed(job(None, unmanaged="newer", conditions=(last,)))) == expected


def test_an_event_is_given_when_its_reason_is_new() -> None:
    snapshot = observed(job(trains(), policy(warnings=("w",))), RUN)
    assert [(n.reason, n.message, n.warning) for n in report(snapshot).events] == [("SpecWarning", "w", True)]
    for before, events in ((Reason.SPEC_WARNING, []), (Reason.EDITS_PENDING, ["SpecWarning"])):
        known = replace(snapshot.job, conditions=(Condition("Warning", False, before, "x", LONG_AGO),))
        assert [n.reason for n in report(replace(snapshot, job=known)).events] == events


# ---- size and status


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
    assert size_text(snapshot, record, assess(snapshot), granted(snapshot)) == size


def test_the_size_of_a_job_that_cannot_be_used() -> None:
    snapshot = observed(replace(job(trains()), policy=None, spec_error="no"), RUN)
    assert size_text(snapshot, trains(), assess(snapshot), granted(snapshot)) == "2/2/0"


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


# ---- the phase_times


def kept(phase_times: PhaseTimes, *pods: Seen, now: datetime = NOW, **changes: Any) -> PhaseTimes:
    record = trains(phase_times=phase_times, **changes)
    snapshot = observed(job(record, created_at=LONG_AGO + timedelta(microseconds=999)), pods, now=now)
    return account_phases(record, snapshot, assess(snapshot)).phase_times


def test_the_first_phase_begins_with_the_job() -> None:
    assert kept(PhaseTimes(), *RUN) == PhaseTimes("training", NOW, (("scheduling", 3_600_000),))


def test_a_ledger_that_stopped_does_not_go_on() -> None:
    for ended in (
        PhaseTimes("ended", None, (("training", 5),)),
        PhaseTimes("ended", None),
        PhaseTimes("", None, (("training", 5),)),
    ):
        assert kept(ended, *RUN) == ended


def test_phases_add_up_in_the_order_of_their_names() -> None:
    before = PhaseTimes("loading", NOW - seconds(2), (("loading", 1000), ("starting", 7)))
    step = [(pod(n), running(step=1, step_at=NOW)) for n in range(2)]
    assert kept(before, *step) == PhaseTimes("training", NOW, (("loading", 3000), ("starting", 7)))
    instant = PhaseTimes("draining", NOW)
    assert kept(instant, *RUN) == PhaseTimes("training", NOW), "what took no time is not named"


def test_times_are_cut_to_the_millisecond() -> None:
    now = NOW + timedelta(microseconds=1_999)
    assert kept(PhaseTimes("starting", NOW), *RUN, now=now) == PhaseTimes(
        "training", NOW + timedelta(milliseconds=1), (("starting", 1),)
    )
    assert total(PhaseTimes("starting", NOW), now) == {"starting": timedelta(milliseconds=1)}
    assert total(PhaseTimes("ended", None, (("starting", 2),)), now) == {"starting": timedelta(milliseconds=2)}


def test_what_was_booked_since() -> None:
    before = PhaseTimes("training", NOW, (("starting", 5), ("training", 7)))
    after = PhaseTimes("ended", None, (("draining", 1), ("starting", 5), ("training", 9)))
    assert phase_times_since(before, after) == {
        "draining": timedelta(milliseconds=1),
        "training": timedelta(milliseconds=2),
    }


def test_goodput_is_the_share_of_training_in_what_is_not_somebody_elses_time() -> None:
    one = PhaseTimes("training", NOW - seconds(6), (("queued", 99_000), ("starting", 2_000), ("suspended", 99_000)))
    other = PhaseTimes("ended", None, (("recomputing", 1_000), ("training", 3_000)))
    assert goodput([one, other], NOW) == 0.75
    assert goodput([], NOW) is None
    assert goodput([PhaseTimes("queued", NOW - seconds(9))], NOW) is None


@pytest.mark.parametrize(
    ("phase", "since_s", "ago"),
    [
        pytest.param("training", 100, 12, id="training: since the last step"),
        pytest.param("recomputing", 100, 12, id="steps made again: as well"),
        pytest.param("training", 5, 5, id="never before the phase itself"),
        pytest.param("draining", 100, 0, id="a drain: since now"),
    ],
)
def test_since_when_a_fault_is_detected(phase: str, since_s: float, ago: float) -> None:
    began = transition(TransitionKind.RECOVERY)
    pods = [(pod(n), running(step=9, step_at=NOW - seconds(12 + 3 * n))) for n in range(2)]
    after = kept(PhaseTimes(phase, NOW - seconds(since_s)), *pods, transition=began)
    assert (after.phase, after.since) == ("detecting", NOW - seconds(ago))


@pytest.mark.parametrize(
    ("record", "pods", "phase"),
    [
        pytest.param(trains(transition=transition(TransitionKind.RECOVERY)), [], Phase.DETECTING, id="not weighed"),
        pytest.param(
            trains(transition=transition(TransitionKind.RECOVERY, is_budget_checked=True)),
            RUN,
            Phase.WAITING,
            id="weighed",
        ),
        pytest.param(trains(transition=transition(TransitionKind.SUSPEND)), [], Phase.SUSPENDED, id="nobody works"),
        pytest.param(
            trains(transition=transition(TransitionKind.SUSPEND)), [(pod(0), silent(20))], Phase.DRAINING, id="one may"
        ),
        pytest.param(
            trains(transition=transition(TransitionKind.SUSPEND)),
            [(pod(0, phase="Failed"), running())],
            Phase.SUSPENDED,
            id="ended",
        ),
        pytest.param(
            trains(transition=transition()), [(pod(0), ready(1)), (pod(1), ready(1))], Phase.STARTING, id="all stopped"
        ),
        pytest.param(
            trains(transition=transition(target_size=3)),
            [(pod(0), ready(1)), (pod(1), ready(1))],
            Phase.SCHEDULING,
            id="no place",
        ),
        pytest.param(
            trains(transition=transition()),
            [(pod(2), running()), (pod(3), running())],
            Phase.STARTING,
            id="not strangers",
        ),
        pytest.param(
            Record(transition=transition(TransitionKind.START)),
            [(pod(0), running()), (pod(1), running())],
            Phase.STARTING,
            id="a start",
        ),
        pytest.param(
            Record(transition=transition(TransitionKind.START)),
            [(pod(0), running()), waits(1)],
            Phase.SCHEDULING,
            id="without a place",
        ),
        pytest.param(
            Record(transition=transition(TransitionKind.START)),
            [(pod(0), running()), (pod(1, phase="Failed"), None)],
            Phase.SCHEDULING,
            id="who ended has none",
        ),
        pytest.param(
            trains(best_step=9),
            [(pod(n), running(step=9)) for n in range(2)],
            Phase.RECOMPUTING,
            id="a step made before",
        ),
        pytest.param(
            trains(best_step=9), [(pod(n), running(step=9 + n)) for n in range(2)], Phase.TRAINING, id="a new one"
        ),
        pytest.param(
            trains(best_step=9, generation=2),
            [(pod(n), running(1, step=5)) for n in range(2)],
            Phase.TRAINING,
            id="steps of another generation do not count",
        ),
        pytest.param(
            trains(best_step=0, phase_times=PhaseTimes("loading", NOW)),
            RUN,
            Phase.LOADING,
            id="the first step is awaited",
        ),
        pytest.param(
            trains(best_step=-1, phase_times=PhaseTimes("loading", NOW)),
            RUN,
            Phase.TRAINING,
            id="not of who never told one",
        ),
    ],
)
def test_phase(record: Record, pods: list[Seen], phase: Phase) -> None:
    assert phase_of(record, assess(observed(job(record), pods))) is phase


@pytest.mark.parametrize(
    ("phase", "best", "agents", "wait_s"),
    [
        pytest.param("training", 9, [running(step=5)], None, id="nothing is made again"),
        pytest.param("recomputing", 9, [running()], None, id="nobody tells a step"),
        pytest.param("recomputing", 9, [running(step=5, step_pace=seconds(3))], 15, id="the steps that are left"),
        pytest.param(
            "recomputing",
            9,
            [running(step=5, step_pace=seconds(3)), running(step=7, step_pace=seconds(2))],
            6,
            id="the first",
        ),
        pytest.param("recomputing", 3, [running(step=0, step_pace=seconds(2))], 8, id="from the first one on"),
        pytest.param("recomputing", 9, [running(step=5)], 25, id="at five seconds where nobody says"),
        pytest.param("recomputing", 9, [running(step=20, step_pace=seconds(3))], 3, id="one at least"),
        pytest.param("recomputing", 9, [running(step=9, step_pace=seconds(0.1))], 1, id="a second at least"),
    ],
)
def test_when_steps_are_new_again(phase: str, best: int, agents: list[ObservedAgent], wait_s: float | None) -> None:
    record = trains(len(agents), best_step=best, phase_times=PhaseTimes(phase, NOW))
    replicas = assess(observed(job(record), [(pod(n), mine) for n, mine in enumerate(agents)]))
    assert next_phase_change(record, replicas, NOW) == (None if wait_s is None else NOW + seconds(wait_s))


PULLING = {"problem": "image x cannot be pulled", "problem_reason": Reason.IMAGE_PULL_FAILED}
CANNOT_START = {"problem": "no secret y", "problem_reason": Reason.CONTAINER_CANNOT_START}


@pytest.mark.parametrize("problem", [PULLING, CANNOT_START], ids=["an image", "a container"])
@pytest.mark.parametrize(
    ("since_s", "is_told"), [pytest.param(29.9, False, id="it may heal"), pytest.param(30, True, id="it lasts")]
)
def test_trouble_that_may_heal_is_told_when_it_lasts(problem: dict[str, str], since_s: float, is_told: bool) -> None:
    snapshot = observed(job(STARTS), [waits(0, problem_since=NOW - seconds(since_s), **problem), waits(1)])
    found = report(snapshot)
    reasons = [c.reason for c in found.conditions if c.type == "PodsReady"]
    assert reasons == ([problem["problem_reason"]] if is_told else [])
    assert [note.reason for note in found.events] == reasons
    assert found.wake_at == (None if is_told else NOW + seconds(0.1)), "nothing else tells that it lasts"
    assert problem["problem"] in found.conditions[-1].message, "what is waited for is said at once"


def test_trouble_that_was_told_before_is_told_by_a_new_operator_too() -> None:
    before = (Condition("PodsReady", False, Reason.IMAGE_PULL_FAILED, "image x cannot be pulled", LONG_AGO),)
    found = report(observed(job(STARTS, conditions=before), [waits(0, problem_since=NOW, **PULLING)]))
    assert [c.reason for c in found.conditions if c.type == "PodsReady"] == ["ImagePullFailed"]
    assert found.events == ()
    other = report(observed(job(STARTS, conditions=before), [waits(0, problem_since=NOW, **CANNOT_START)]))
    assert [c.reason for c in other.conditions if c.type == "PodsReady"] == []


def test_the_first_of_several_troubles_that_will_have_lasted_is_waited_for() -> None:
    pods = [waits(n, problem_since=NOW - seconds(age), **PULLING) for n, age in enumerate((5, 20, 10))]
    assert report(observed(job(STARTS), pods)).wake_at == NOW + seconds(10)
    ended = (pod(3, phase="Failed", problem="it ended", problem_reason=Reason.CONTAINER_ENDED, problem_since=NOW), None)
    found = report(observed(job(STARTS), [*pods, ended]))
    assert [c.reason for c in found.conditions if c.type == "PodsReady"] == ["ContainerEnded"], "an end does not heal"
    assert found.wake_at == NOW + seconds(10)


KEPT = "the API server refuses to delete pod job-workers-0, and the operator tries again: forbidden"


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        pytest.param({"record": trains()}, ["PodsNotDeleted", "SpecWarning"], id="beside other warnings"),
        pytest.param({"record": replace(trains(), outcome="Failed", outcome_reason=OpenReason("x"))}, ["PodsNotDeleted"], id="at the end"),
        pytest.param({"policy": None, "spec_error": "y"}, ["PodsNotDeleted", "InvalidSpec"], id="of a spec that cannot be used"),
        pytest.param({"policy": None, "spec_error": "y", "record": trains()}, ["PodsNotDeleted", "InvalidSpec"],
                     id="of one that trains on all the same"),
        pytest.param({"record": trains(), "deleting_since": NOW}, ["PodsNotDeleted", "QuotaNotReturned"], id="in a deletion"),
        pytest.param({"record": trains(queue="a")}, ["PodsNotDeleted", "QuotaNotReturned", "SpecWarning"], id="beside quota"),
    ],
)  # fmt: skip
def test_what_cannot_be_deleted_comes_first_and_the_state_last(changes: dict[str, Any], reasons: list[str]) -> None:
    problem = "no quota back" if "QuotaNotReturned" in reasons else ""
    plain = observed(job(**{"wishes": policy(warnings=("w",)), **changes}), RUN, quota_return_error=problem)
    found, without = report(replace(plain, pod_deletion_error=KEPT)), report(plain)
    warning = next(c for c in found.conditions if c.type == "Warning")
    assert (warning.reason, warning.message.split("; ")[0]) == ("PodsNotDeleted", KEPT)
    assert [note.reason for note in found.events] == reasons
    assert found.conditions[-1] == without.conditions[-1]
    again = replace(
        plain, pod_deletion_error=KEPT.replace("0-0", "1-0"), job=replace(plain.job, conditions=found.conditions)
    )
    assert [note.reason for note in report(again).events] == [], "another pod is no news"


def test_agents_that_tell_more_than_is_taken_are_named() -> None:
    agents = [(pod(n), running(refused_answer="its workers leave 70000 bytes" if n else "")) for n in range(4)]
    told = plan(observed(job(trains(4), policy(2, 4)), agents))
    warning = next(c for c in told.conditions if c.type == "Warning")
    assert warning.reason == "AnswerRefused"
    assert warning.message == f"the agent of pod {pod(1).name} (and of 2 more pods): its workers leave 70000 bytes"
    assert [note.reason for note in told.events if note.warning] == ["AnswerRefused"]


def test_a_message_that_repeats_something_endless_is_cut() -> None:
    told = plan(observed(replace(job(STARTS), policy=None, spec_error="x" * 100_000)))
    assert max(len(c.message) for c in told.conditions) < 10_000
