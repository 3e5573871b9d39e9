"""The second act: what is reported of an urgent job's stay in the elastic job's queue, and what makes the demo fail."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from tests.nonempty import every
from tests.unit.demo.runs import (
    BOTH_ACTS,
    BOTH_ACTS_LOGS,
    EVICTED,
    QUOTED,
    WORDS,
    elastic_run,
    entry,
    log,
    urgent_run,
)

from elastipod_local.demo.report import JobPhase, Run, Span
from elastipod_local.demo.urgent_job import (
    UrgentRun,
    queue_report,
    queue_shortcomings,
    urgent_losses,
    urgent_spans,
)

SHRINK, GROWTH = 5, 6  # their places in the records of both acts


def test_the_report_tells_who_came_what_was_given_up_and_what_came_back() -> None:
    report = queue_report(elastic_run(), urgent_run())
    assert report["newcomer"] == {
        "job": "urgent", "state": "Completed", "replicas": 2, "arrived_s": 60.0, "quota_after_s": 3.5, "first_step_s": 64.5,
        "last_step_s": 76.0, "steps": 3, "samples_total": None, "samples_unique": None, "samples_expected": None,
        "audit_exit": 0, "audit": {},
    }  # fmt: skip
    assert report["given_up"] == {
        "generation": 6, "from": 4, "to": 2, "cause": "Preempted", "depth": "memory",
        "gap_s": 1.1, "pause_s": 0.0, "pause_target_s": 0.3, "pause_target_met": True, "steps_repeated": 0, "asked_s": 60.1,
        "last_step_s": 60.4, "kueue_said": WORDS, "quoted": True,
    }  # fmt: skip
    assert report["meanwhile"] == {"steps": 3, "sizes": [2], "longest_pause_s": 5.7, "recoveries": 0}
    assert report["grown_back"] == {
        "generation": 7, "from": 2, "to": 4, "cause": "CapacityAvailable", "depth": "memory",
        "pause_s": 0.0, "pause_target_s": 0.3, "pause_target_met": True, "gap_s": 1.8, "steps_repeated": 0, "after_s": 4.0,
    }  # fmt: skip


def test_a_stay_as_it_should_be_has_no_shortcomings() -> None:
    assert queue_shortcomings(queue_report(elastic_run(), urgent_run())) == []


def without(*places: int) -> Run:
    """The elastic job's run as if these resizes had never been: their steps are made by the generation before."""
    kept = [records for at, records in enumerate(BOTH_ACTS_LOGS) if at - 1 not in places]  # generation 1 has two ranks
    return elastic_run([e for at, e in enumerate(BOTH_ACTS) if at not in places], kept)


def beside(history_entry: dict[str, Any], *logs: list[dict[str, Any]]) -> Run:
    """The elastic job's run with another shrink, and other logs from it on."""
    return elastic_run(
        [*BOTH_ACTS[:SHRINK], history_entry, *BOTH_ACTS[GROWTH:]], [*BOTH_ACTS_LOGS[:6], *logs, BOTH_ACTS_LOGS[-1]]
    )


CRASH = entry(7, 2, 2, "recovery", "WorkerCrash", 70.0)
AFTER_CRASH = [*BOTH_ACTS[:GROWTH], CRASH, entry(8, 2, 4, "resize", "CapacityAvailable", 80.0)]
AFTER_CRASH_LOGS = [
    *BOTH_ACTS_LOGS[:6],
    log(6, 0, 2, resumed_step=13, steps={14: 61.5, 15: 66.0, 16: 69.0}),
    log(7, 0, 2, resumed_step=16, steps={17: 74.0, 18: 80.2}, drained_s=80.4),
    log(8, 0, 4, resumed_step=18, steps={19: 82.0}),
]
TOO_EARLY = [*BOTH_ACTS[:GROWTH], entry(7, 2, 4, "resize", "CapacityAvailable", 70.0)]
TOO_EARLY_LOGS = [
    *BOTH_ACTS_LOGS[:6],
    log(6, 0, 2, resumed_step=13, steps={14: 61.5, 15: 66.0, 16: 70.2}, drained_s=70.4),
    log(7, 0, 4, resumed_step=16, steps={17: 72.0, 18: 90.0}),
]


@pytest.mark.parametrize(
    ("run", "urgent", "problem"),
    [
        pytest.param(without(SHRINK, GROWTH), urgent_run(), "gave up no replicas", id="increments were kept"),
        pytest.param(without(GROWTH), urgent_run(), "did not grow back", id="the room was not taken again"),
        pytest.param(
            beside(entry(6, 4, 2, "resize", "NodeDrained", 60.2), BOTH_ACTS_LOGS[6]), urgent_run(),
            "because of NodeDrained, not Preempted", id="the room came from something else",
        ),
        pytest.param(
            beside(BOTH_ACTS[SHRINK], log(6, 0, 2, resumed_step=13, steps={14: 61.5, 15: 78.0})), urgent_run(),
            "made no step while urgent trained", id="the minimum stood still",
        ),
        pytest.param(
            elastic_run(AFTER_CRASH, AFTER_CRASH_LOGS), urgent_run(), "had to recover 1 time", id="the minimum crashed"
        ),
        pytest.param(
            elastic_run(TOO_EARLY, TOO_EARLY_LOGS), urgent_run(), "trained with [2, 4] replicas beside urgent",
            id="the elastic job grew while the quota was used",
        ),
        pytest.param(
            elastic_run(), urgent_run(logs=[log(1, 0, 2, steps={1: 60.3, 2: 76.0})]), "more than the quota",
            id="the urgent job began before the increments had stopped",
        ),
        pytest.param(elastic_run(), urgent_run(logs=[]), "urgent made no step", id="the urgent job did not train"),
        pytest.param(elastic_run(), urgent_run(state="Failed"), "urgent ended as Failed", id="the urgent job failed"),
        pytest.param(
            elastic_run(), urgent_run(audit_exit=1, audit={"missing": 8}), "exactly once: {'missing': 8}",
            id="the urgent job lost samples",
        ),
        pytest.param(elastic_run(), urgent_run(events=(QUOTED,)), "no Event of Kueue", id="Kueue gave no reason"),
        pytest.param(
            elastic_run(), urgent_run(events=(EVICTED,)), "quotes Kueue's reason", id="the operator kept the reason back"
        ),
    ],
)  # fmt: skip
def test_shortcomings_are_named(run: Run, urgent: UrgentRun, problem: str) -> None:
    [sentence] = queue_shortcomings(queue_report(run, urgent))
    assert problem in sentence


def test_an_urgent_job_that_never_came_is_no_error_of_the_report() -> None:
    report = queue_report(without(SHRINK, GROWTH), urgent_run([], [], state="Suspended"))
    assert report["newcomer"]["quota_after_s"] is None
    assert [sentence.split(" ", 1)[1] for sentence in queue_shortcomings(report)] == [
        "ended as Suspended, not Completed",
        "made no step",
        "elastic job gave up no replicas after urgent had arrived",
    ]


def test_the_urgent_job_is_drawn_on_the_elastic_jobs_clock() -> None:
    run, urgent = elastic_run(), urgent_run()
    assert urgent_spans(run, urgent) == (Span(JobPhase.TRAINING, 64.5, 76.0, 2),)
    [curve] = urgent_losses(run, urgent)
    assert curve[0] == (64.5, 4.0)
    assert every(before[0] < after[0] for before, after in pairwise(curve))
