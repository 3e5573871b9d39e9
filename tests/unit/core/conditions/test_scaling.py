"""Condition Scaling: why a job has its size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.nonempty import every
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    Seen,
    agent,
    job,
    observed,
    pod,
    policy,
    ready,
    running,
    seconds,
    trains,
)
from tests.unit.core.conditions.reports import (
    FULL,
    RUN,
    UNSCHEDULABLE,
    condition,
    scaling,
    sentence,
    told,
    unschedulable,
    waits,
)

from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import (
    PartialGang,
    Record,
    ResizeStatistics,
)
from elastipod_operator.core.snapshot import AgentState, ObservedAgent, Policy


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
        pytest.param(
            0, "more replicas are ready; the job grows at about 12:01:00 UTC (scalingTimeoutInSeconds=60)", id="when"
        ),
        pytest.param(
            2,
            "more replicas are ready; the job grows at about 12:01:00 UTC (scalingTimeoutInSeconds=60; growths that failed in a row: 2)",
            id="and how often in vain",
        ),
    ],
)
def test_a_growth_is_told_in_figures(failures: int, words: str) -> None:
    record = trains(window_since=NOW, resize_failures=failures, resize_failed_at=LONG_AGO)
    assert sentence(observed(job(record), [*RUN, (pod(2), ready())]), "Scaling") == words


@pytest.mark.parametrize(
    ("pods", "reason", "words"),
    [
        pytest.param([*RUN, unschedulable(2), unschedulable(3)], "WaitingForCapacity", ("2 more replicas are wanted", UNSCHEDULABLE),
                     id="no room"),
        pytest.param([*RUN, (pod(2), ready()), (pod(3), ready())], "Growing", ("grows at about 12:01:00 UTC",), id="about to grow"),
    ],
)  # fmt: skip
def test_scaling_says_why_the_job_has_its_size(
    pods: list[tuple[object, ObservedAgent | None]], reason: str, words: tuple[str, ...]
) -> None:
    told = condition(plan(observed(job(trains()), pods)), "Scaling")  # type: ignore[arg-type]
    assert told.reason == reason
    assert every(word in told.message for word in words), told.message


def scaling_of(record: Record, pods: list[Any], wanted: Policy) -> str:
    found = plan(observed(job(record, wanted), pods)).conditions
    return next(condition.message for condition in found if condition.type == "Scaling")


@pytest.mark.parametrize(
    ("bound", "told"),
    [
        ("spec.replicas=2 (kubectl scale)", "the maximum: limited by spec.replicas=2 (kubectl scale)"),
        ("spec.elasticPolicy.maxReplicas=2", "the maximum: limited by spec.elasticPolicy.maxReplicas=2"),
        ("", "which is the maximum"),
    ],
)
def test_the_bound_that_limits_the_size_is_named(bound: str, told: str) -> None:
    bounded = replace(FULL, sizes=replace(FULL.sizes, allowed=(2,), bound=bound))
    assert scaling_of(trains(), RUN, bounded).endswith(told)


@pytest.mark.parametrize(
    ("changes", "timer"),
    [
        pytest.param({}, "scalingTimeoutInSeconds=60", id="the window"),
        pytest.param({"recovered_at": NOW}, "scaleUpSnoozeTimeInSeconds=300", id="the snooze"),
        pytest.param({"resized_at": NOW}, "minStableSeconds=200", id="the stable period"),
        pytest.param({"resize_failures": 9, "resize_failed_at": NOW}, "spec.elastipod.backoff", id="the back-off"),
    ],
)
def test_the_timer_that_a_growth_waits_for_is_named(changes: dict[str, Any], timer: str) -> None:
    timed = replace(
        policy(2, 4), scaling_timeout=seconds(60), snooze=seconds(300), min_stable=seconds(200),
        backoff_base=seconds(250), backoff_max=seconds(300),
    )  # fmt: skip
    message = scaling_of(trains(window_since=NOW, **changes), [*RUN, (pod(2), ready())], timed)
    assert message.startswith("more replicas are ready; the job grows at about")
    assert f" ({timer}" in message
