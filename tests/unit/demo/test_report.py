"""The report of the demo: every figure follows from lines that somebody wrote down."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from tests.nonempty import every
from tests.unit.demo.runs import (
    CREATED,
    CREATED_AT,
    GROW_SHRINK_CRASH,
    GROW_SHRINK_CRASH_LOGS,
    elastic_run,
    entry,
    log,
)

from elastipod_local.demo.report import (
    KILL_MARK,
    Change,
    JobPhase,
    Mark,
    Run,
    build_report,
    changes,
    parse_history,
    resize_json,
    shortcomings,
    sizes,
    spans,
    unix_seconds,
)
from elastipod_local.demo.run_log import generations

AUDIT = {"samples_total": 96, "samples_unique": 64, "samples_expected": 64, "duplicates": 0, "missing": 0}

CRASH = {"from": 2, "to": 2, "cause": "WorkerCrash", "depth": "memory", "steps_repeated": 0}


def run_of(history: list[dict[str, Any]], logs: list[list[dict[str, Any]]], *marks: Mark) -> Run:
    return Run(CREATED_AT, parse_history(history), generations(logs), marks)


@pytest.fixture
def story() -> Run:
    return run_of(GROW_SHRINK_CRASH, GROW_SHRINK_CRASH_LOGS, Mark(KILL_MARK, CREATED_AT + 30.01))


def test_the_operators_moments_are_utc() -> None:
    assert unix_seconds(CREATED) == CREATED_AT


def test_gaps_run_from_the_last_old_step_to_the_first_new_step_of_the_slowest_rank(story: Run) -> None:
    assert [change.gap_s for change in changes(story)] == [1.8, 1.25, 1.0]


def test_the_pause_is_the_gap_without_the_time_of_a_step() -> None:
    history = [entry(1, 0, 2, "start", "GangReady", 3.0), entry(2, 2, 4, "resize", "CapacityAvailable", 10.0)]
    old = log(1, 0, 2, steps={1: 9.0, 2: 9.4})
    [change] = changes(run_of(history, [old, log(2, 0, 4, resumed_step=2, steps={3: 10.4, 4: 10.7, 5: 11.0, 6: 12.0})]))
    assert (change.gap_s, change.pause_s) == (1.0, 0.7)
    [change] = changes(run_of(history, [old, log(2, 0, 4, resumed_step=2, steps={3: 10.4})]))
    assert change.pause_s == 0.6, "as long as the new world has made no two steps, by those of the old one"


@pytest.mark.parametrize(
    ("killed_s", "lost_s", "pause_s"),
    [(9.65, 0.25, 0.45), (9.35, 0.0, 0.7), (None, None, 0.7)],
    ids=["in a step", "in one that the others completed", "by nobody"],
)
def test_the_pause_after_a_crash_begins_with_the_kill_and_what_was_lost_is_told_beside_it(
    killed_s: float | None, lost_s: float | None, pause_s: float
) -> None:
    history = [entry(1, 0, 2, "start", "GangReady", 3.0), entry(2, 2, 2, "recovery", "WorkerCrash", 10.0)]
    logs = [log(1, 0, 2, steps={1: 9.0, 2: 9.4}), log(2, 0, 2, resumed_step=2, steps={3: 10.4, 4: 10.7})]
    marks = [] if killed_s is None else [Mark(KILL_MARK, CREATED_AT + killed_s)]
    [change] = changes(run_of(history, logs, *marks))
    assert (change.gap_s, change.lost_s, change.pause_s) == (1.0, lost_s, pause_s)


def test_a_step_that_was_interrupted_is_repeated_but_was_never_made() -> None:
    """As `elastipod.State` logs: a step when it begins, and again when it is done."""

    def logged(generation: int, resumed: int, begun: dict[int, float], done: dict[int, float]) -> list[dict[str, Any]]:
        lines = log(generation, 0, 2, resumed_step=resumed, steps=begun, loss=None)
        return lines + [
            {"kind": "done", "step": step, "t": CREATED_AT + at_s, "loss": 2.0} for step, at_s in done.items()
        ]

    history = [entry(1, 0, 2, "start", "GangReady", 3.0), entry(2, 2, 2, "recovery", "WorkerCrash", 10.0)]
    run = run_of(
        history,
        [logged(1, 0, {1: 8.0, 2: 8.3, 3: 8.6}, {1: 8.2, 2: 8.5}), logged(2, 2, {3: 9.0, 4: 9.3}, {3: 9.2, 4: 9.5})],
    )
    assert [[step.number for step in generation.steps] for generation in run.generations] == [[1, 2], [3, 4]]
    assert run.generations[0].steps[0].loss == 2.0
    [change] = changes(run)
    assert (change.gap_s, change.pause_s, change.steps_repeated) == (0.7, 0.4, 1)


def test_repeated_steps_are_those_after_the_resumed_checkpoint(story: Run) -> None:
    assert [change.steps_repeated for change in changes(story)] == [0, 0, 1]


def test_detection_counts_from_the_kill_and_only_for_recoveries(story: Run) -> None:
    assert [change.detection_s for change in changes(story)] == [None, None, 0.01]


def test_without_a_kill_there_is_no_detection_time() -> None:
    story = run_of(GROW_SHRINK_CRASH, GROW_SHRINK_CRASH_LOGS)
    assert changes(story)[-1].detection_s is None


def test_a_kill_is_detected_by_the_first_recovery_after_it_and_by_no_other() -> None:
    history = [
        entry(1, 0, 2, "start", "GangReady", 3.0),
        entry(2, 2, 2, "recovery", "WorkerCrash", 10.0),
        entry(3, 2, 2, "recovery", "WorkerCrash", 20.0, detected_s=19.5),
        entry(4, 2, 2, "recovery", "WorkerCrash", 30.0),
    ]
    logs = [log(number, 0, 2, steps={number: 10.0 * number - 1}) for number in (1, 2, 3, 4)]
    run = run_of(history, logs, Mark(KILL_MARK, CREATED_AT + 19.0))
    assert [change.detection_s for change in changes(run)] == [None, 0.5, None]


def test_a_recovery_at_the_same_size_is_no_new_size(story: Run) -> None:
    assert sizes(story) == (2, 4, 2)


def test_phases_follow_each_other_without_holes() -> None:
    grown, shrunk, crashed = (
        entry(2, 2, 4, "resize", "CapacityAvailable", 10.0, depth="process"),
        GROW_SHRINK_CRASH[2],
        {**GROW_SHRINK_CRASH[3], "depth": "pod"},
    )
    found = spans(run_of([GROW_SHRINK_CRASH[0], grown, shrunk, crashed], GROW_SHRINK_CRASH_LOGS))
    assert [span.phase for span in found] == [
        JobPhase.STARTING, JobPhase.TRAINING, JobPhase.DRAINING, JobPhase.RESTARTING, JobPhase.TRAINING, JobPhase.DRAINING,
        JobPhase.IN_MEMORY, JobPhase.TRAINING, JobPhase.RECOVERING, JobPhase.TRAINING,
    ]  # fmt: skip
    assert found[0].start_s == 0
    assert every(before.end_s == after.start_s for before, after in pairwise(found))
    assert found[-1].end_s == 40.0


def test_draining_begins_with_the_decision_and_ends_when_the_last_rank_has_stopped(story: Run) -> None:
    drain = next(span for span in spans(story) if span.phase is JobPhase.DRAINING)
    assert (drain.start_s, drain.end_s, drain.size) == (10.0, 10.5, 2)


def test_a_generation_that_made_no_step_gives_its_gap_to_the_next() -> None:
    history = [
        entry(1, 0, 2, "start", "GangReady", 3.0),
        entry(2, 2, 2, "recovery", "WorkerCrash", 10.0),
        entry(3, 2, 2, "recovery", "PortTaken", 12.0),
    ]
    logs = [log(1, 0, 2, steps={1: 5.0, 2: 9.5}), log(3, 0, 2, resumed_step=2, steps={3: 14.0})]
    found = changes(run_of(history, logs))
    assert [(change.gap_s, change.steps_repeated) for change in found] == [(None, 0), (4.5, 0)]


def test_the_report_holds_what_is_promised(story: Run) -> None:
    report = build_report(story, AUDIT)
    assert report["resizes"] == [
        {
            **{"generation": 2, "from": 2, "to": 4, "cause": "CapacityAvailable", "depth": "memory"},
            **{"gap_s": 1.8, "pause_s": 0.0, "pause_target_s": 0.3, "pause_target_met": True, "steps_repeated": 0},
        },
        {
            **{"generation": 3, "from": 4, "to": 2, "cause": "NodeDrained", "depth": "memory"},
            **{"gap_s": 1.25, "pause_s": 0.0, "pause_target_s": 0.3, "pause_target_met": True, "steps_repeated": 0},
        },
    ]
    [recovery] = report["recoveries"]
    assert (recovery["cause"], recovery["detection_s"], recovery["gap_s"]) == ("WorkerCrash", 0.01, 1.0)
    assert (report["samples_total"], report["samples_unique"], report["samples_expected"]) == (96, 64, 64)
    assert (report["final_loss"], report["final_step"]) == (0.5, 10)
    assert [moment["size"] for moment in report["size_history"]] == [0, 2, 0, 4, 0, 2, 0, 2, 0]
    assert sum(report["phase_seconds"].values()) == pytest.approx(40.0)


def test_the_loss_of_a_step_is_the_mean_over_its_ranks(story: Run) -> None:
    assert story.generations[0].steps[0].loss == 4.0


@pytest.mark.parametrize(
    ("depth", "pause_s", "met"),
    [("memory", 0.3, True), ("memory", 0.31, False), ("process", 0.1, None), ("memory", None, None)],
)
def test_a_change_in_memory_has_a_target(depth: str, pause_s: float | None, met: bool | None) -> None:
    [told] = parse_history([entry(2, 2, 4, "resize", "CapacityAvailable", 10.0, depth=depth)])
    found = resize_json(Change(told, gap_s=1.0, steps_repeated=0, pause_s=pause_s))
    assert (found.get("pause_target_s"), found.get("pause_target_met")) == (None if met is None else 0.3, met)


def test_a_pause_that_missed_its_target_is_no_shortcoming() -> None:
    late = {**build_report(elastic_run(), AUDIT)}
    late["resizes"] = [{**one, "pause_s": 9.0, "pause_target_met": False} for one in late["resizes"]]
    assert shortcomings(late, state="Completed", audit_exit=0) == []


def test_a_run_that_showed_everything_has_no_shortcomings() -> None:
    assert shortcomings(build_report(elastic_run(), AUDIT), state="Completed", audit_exit=0) == []


@pytest.mark.parametrize(
    ("change", "state", "audit_exit", "problem"),
    [
        pytest.param({}, "Failed", 0, "ended as Failed", id="a job that did not complete"),
        pytest.param({}, "Completed", 1, "exactly once", id="an audit that is not clean"),
        pytest.param({"sizes": [2, 4]}, "Completed", 0, "2 -> 4, not 2 -> 4 -> 2 -> 4 -> 2 -> 4 -> 2", id="a size that was never reached"),
        pytest.param({"recoveries": []}, "Completed", 0, "no recovery", id="a crash that nobody saw"),
        pytest.param(
            {"recoveries": [CRASH, {**CRASH, "cause": "WorkerHang"}]}, "Completed", 0,
            "recovered 2 times although one worker was killed: causes WorkerCrash, WorkerHang", id="a crash of a worker that nobody killed",
        ),
        pytest.param(
            {"resizes": [{"from": 2, "to": 4, "cause": "NodeDrained", "depth": "memory", "steps_repeated": 3}]},
            "Completed", 0, "repeated 3 steps",
            id="a resize that repeats steps",
        ),
        pytest.param(
            {"recoveries": [{**CRASH, "steps_repeated": 20}]},
            "Completed", 0, "the recovery repeated 20 steps", id="a crash that goes back to a durable checkpoint",
        ),
        pytest.param(
            {"recoveries": [{**CRASH, "depth": "process", "depth_reason": "of that"}]}, "Completed", 0,
            "2 -> 2 (WorkerCrash) went as deep as process because of that, not memory", id="a crash that restarts processes",
        ),
        pytest.param(
            {"resizes": [{**CRASH, "cause": "ScaledByUser"}]}, "Completed", 0,
            "2 -> 2 (ScaledByUser) went as deep as memory, not process", id="a forced restart that was none",
        ),
    ],
)  # fmt: skip
def test_shortcomings_are_named(change: dict[str, Any], state: str, audit_exit: int, problem: str) -> None:
    [sentence] = shortcomings({**build_report(elastic_run(), AUDIT), **change}, state=state, audit_exit=audit_exit)
    assert problem in sentence


def test_a_port_that_was_taken_is_a_second_attempt_at_the_same_recovery() -> None:
    again = {**CRASH, "cause": "MasterPortTaken"}
    report = {**build_report(elastic_run(), AUDIT), "recoveries": [CRASH, again]}
    assert shortcomings(report, state="Completed", audit_exit=0) == []


def test_a_job_that_never_trained_still_gives_a_report() -> None:
    report = build_report(run_of([entry(1, 0, 2, "start", "GangReady", 3.0)], []), {})
    assert (report["sizes"], report["final_loss"], report["size_history"]) == ([], None, [])
    assert shortcomings(report, state="Failed", audit_exit=2)[1].startswith("the sizes that trained were none")


def test_the_report_says_how_deep_each_change_went_and_why() -> None:
    told = [
        entry(1, 0, 2, "start", "JobCreated", 0.0),
        entry(2, 2, 4, "resize", "CapacityAvailable", 10.0, depth="memory"),
        entry(
            3, 4, 4, "recovery", "WorkerCrash", 20.0, depth="process", depth_reason="why", depth_code="ProcessRequested"
        ),
        entry(4, 4, 2, "resize", "NodeDrained", 30.0, depth=None),
    ]
    history = parse_history(told)
    assert [(one.depth, one.depth_reason) for one in history] == [
        (None, ""),
        ("memory", ""),
        ("process", "why"),
        (None, ""),
    ]
    grown, shrunk = (Change(history[at], gap_s=1.0, steps_repeated=0) for at in (1, 3))
    assert resize_json(grown)["depth"] == "memory"
    assert "depth" not in resize_json(shrunk)
    crashed = resize_json(Change(history[2], gap_s=1.0, steps_repeated=0))
    assert (crashed["depth_reason"], crashed["depth_code"]) == ("why", "ProcessRequested")
