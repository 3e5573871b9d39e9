"""The histogram of gaps: one observation for each change, by its kind and depth."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from prometheus_client.registry import Collector
from tests.unit.core.builders import LONG_AGO, job, observed, pod, ready, running, trains, transition

from elastipod_operator import metrics
from elastipod_operator.core.actions import Plan
from elastipod_operator.core.depth_reasons import DepthReason
from elastipod_operator.core.phase_accounting import phase_times_since
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Depth, PhaseTimes, Record
from elastipod_operator.core.snapshot import ObservedAgent
from elastipod_operator.job_collector import OTHER_REASON, JobFigures
from elastipod_operator.job_metrics import JobMetrics

GAP = timedelta(seconds=0.25)


def observed_gaps(depth: Depth) -> tuple[float, float]:
    """Give the number of observations of resizes, and their sum."""
    found = {
        one.name.rsplit("_", 1)[1]: one.value
        for family in metrics.GAP_SECONDS.collect()
        for one in family.samples
        if one.labels.get("depth") == depth and one.labels.get("kind") == "resize" and not one.name.endswith("bucket")
    }
    return found.get("count", 0.0), found.get("sum", 0.0)


def resize() -> tuple[Record, Plan]:
    before = trains(2, transition=transition(depth=Depth.MEMORY, graceful=False, began_s=1.0))
    kept = ready(1, memory_state="replicated", num_kept=1)
    return before, plan(observed(job(before), [(pod(0), kept), (pod(1), kept)]))


def test_a_gap_is_observed_once_from_the_first_agent_that_knows_it() -> None:
    jobs = JobMetrics()
    before, todo = resize()
    assert [one.depth for one in todo.history] == [Depth.MEMORY]
    count, total = observed_gaps(Depth.MEMORY)

    def update(*agents: ObservedAgent) -> tuple[float, float]:
        jobs.update(job(todo.record), todo, agents)
        now = observed_gaps(Depth.MEMORY)
        return now[0] - count, round(now[1] - total, 6)

    assert update(running(2, gap=GAP)) == (0, 0), "an operator that did not decide the change does not know its kind"
    jobs.record_written("job-uid", before, todo)
    assert update(running(2), running(1, gap=GAP)) == (0, 0), "that of an earlier generation"
    assert update(running(2), running(2, gap=GAP)) == (1, 0.25)
    assert update(running(2, gap=2 * GAP)) == (1, 0.25)


def test_the_steps_that_changes_repeat_add_up() -> None:
    jobs = JobMetrics()
    before, todo = resize()

    def repeated(*agents: ObservedAgent) -> float:
        jobs.update(job(todo.record), todo, agents)
        return sampled(metrics.EACH_JOB, "elastipod_job_steps_repeated_total", job=job(todo.record).name)

    jobs.record_written("job-uid", before, todo)
    assert repeated(running(1, gap=GAP, steps_repeated=5)) == 0, "of an earlier generation"
    assert repeated(running(2), running(2, gap=GAP, steps_repeated=3), running(2, gap=GAP, steps_repeated=2)) == 3
    assert repeated(running(2, gap=GAP, steps_repeated=3)) == 3, "once for each change"
    jobs.record_written("job-uid", before, todo)
    assert repeated(running(2, gap=GAP)) == 3
    jobs.record_written("job-uid", before, todo)
    assert repeated(running(2, gap=GAP, steps_repeated=4)) == 7


def test_a_deleted_job_is_exported_no_more() -> None:
    jobs = JobMetrics()
    _, todo = resize()

    def exported() -> set[str]:
        return {one.labels["job"] for family in metrics.EACH_JOB.collect() for one in family.samples}

    jobs.update(job(todo.record), todo)
    assert exported() == {job(todo.record).name}
    jobs.forget("job-uid")
    assert exported() == set()


@pytest.mark.parametrize("is_deleted", [True, False])
def test_the_gap_of_a_deleted_job_is_not_awaited(is_deleted: bool) -> None:
    jobs = JobMetrics()
    before, todo = resize()
    jobs.record_written("job-uid", before, todo)
    if is_deleted:
        jobs.forget("job-uid")
    count, _ = observed_gaps(Depth.MEMORY)
    jobs.update(job(todo.record), todo, [running(2, gap=GAP, answering_since=LONG_AGO)])
    assert observed_gaps(Depth.MEMORY)[0] - count == (0 if is_deleted else 1)


def sampled(family: Collector, name: str, **labels: str) -> float:
    found = [
        one.value
        for each in family.collect()
        for one in each.samples
        if one.name == name and labels.items() <= one.labels.items()
    ]
    return sum(found)


def test_what_is_known_of_a_job_is_what_its_last_pass_found() -> None:
    jobs = JobMetrics()
    _, todo = resize()
    state = todo.conditions[-1]
    reason_of_kueue: Any = "EvictedByKueue"
    evicted = replace(state, type="Suspended", reason=reason_of_kueue)
    other = replace(todo, conditions=(*todo.conditions[:-1], evicted))
    for one, reason in ((todo, str(state.reason)), (other, OTHER_REASON)):
        one = replace(one, record=replace(one.record, restarts=7))
        jobs.update(job(one.record, namespace="team", name="llm"), one)
        record, last = one.record, one.conditions[-1]
        figures = JobFigures("team", "llm", one.size, 7, record.phase_times, last.type, reason)
        assert jobs._figures == {"job-uid": figures}


def test_jobs_are_counted_by_state_and_phase_once_each() -> None:
    def counted(state: str) -> float:
        return sampled(metrics.JOBS, "elastipod_jobs", state=state)

    def in_phase(phase: str) -> float:
        return sampled(metrics.JOBS_IN_PHASE, "elastipod_jobs_in_phase", phase=phase)

    jobs = JobMetrics()
    _, todo = resize()
    state, phase = todo.conditions[-1].type, str(todo.record.phase_times.phase)
    before = counted(state), in_phase(phase), counted("Completed"), in_phase("training")
    for _ in range(2):
        jobs.update(job(todo.record), todo)
        assert (counted(state), in_phase(phase)) == (before[0] + 1, before[1] + 1)
    done = replace(
        todo,
        conditions=(replace(todo.conditions[-1], type="Completed"),),
        record=replace(todo.record, phase_times=PhaseTimes()),
    )
    jobs.update(job(done.record), done)
    assert (counted(state), in_phase(phase), counted("Completed")) == (before[0], before[1], before[2] + 1)
    jobs.forget("job-uid")
    jobs.forget("job-uid")
    assert (counted("Completed"), in_phase("training")) == before[2:]


def test_the_beginning_and_the_end_of_a_job_are_counted_once() -> None:
    def counted() -> dict[str, float]:
        events = ("created", "completed", "failed", "deleted")
        return {name: sampled(metrics.LIFECYCLE, "elastipod_job_lifecycle_total", event=name) for name in events}

    def increase(before: dict[str, float]) -> dict[str, float]:
        return {name: number - before[name] for name, number in counted().items() if number != before[name]}

    jobs, first = JobMetrics(), counted()
    new = plan(observed(job()))
    jobs.record_written("job-uid", Record(), new)
    jobs.record_written("job-uid", new.record, new)
    assert increase(first) == {"created": 1}
    _, trained = resize()
    completed = replace(trained, record=replace(trained.record, outcome="Completed"))
    failed = replace(trained, record=replace(trained.record, outcome="Failed"))
    jobs.record_written("job-uid", Record(), trained)
    jobs.record_written("job-uid", Record(), completed)
    assert increase(first) == {"created": 1}, "their records were lost, or another operator had them"
    for ended in (completed, failed):
        jobs.record_written("job-uid", trained.record, ended)
        jobs.record_written("job-uid", ended.record, ended)
    assert increase(first) == {"created": 1, "completed": 1, "failed": 1}
    jobs.update(job(trained.record), trained)
    for _ in range(2):
        jobs.forget("job-uid")
    assert increase(first) == {"created": 1, "completed": 1, "failed": 1, "deleted": 1}


def test_a_change_is_counted_by_its_kind_depth_and_reason_and_its_phases_by_their_time() -> None:
    jobs = JobMetrics()
    before, todo = resize()
    entry = todo.history[-1]
    assert entry.depth is not None
    kinds = {"kind": entry.kind.value}

    def counts(reason: DepthReason = DepthReason.WORKERS_KEPT) -> tuple[float, float]:
        made = sampled(metrics.GENERATIONS, "elastipod_generations_total", **kinds)
        labels = {**kinds, "depth": entry.depth or "", "reason": reason.value}
        return made, sampled(metrics.CHANGES, "elastipod_changes_total", **labels)

    def observed_phases() -> float:
        return sampled(metrics.PHASE_SECONDS, "elastipod_phase_seconds_count")

    first, phases = counts(), observed_phases()
    jobs.record_written("job-uid", before, todo)
    assert counts() == (first[0] + 1, first[1] + 1)
    ended = phase_times_since(before.phase_times, todo.record.phase_times)
    assert observed_phases() == phases + len(ended)
    assert jobs._awaited_gaps == {"job-uid": entry}
    jobs.record_written("job-uid", todo.record, replace(todo, history=(replace(entry, depth=None),)))
    assert counts() == (first[0] + 2, first[1] + 1)
    unknown = counts(DepthReason.UNKNOWN)
    former = replace(entry, depth_code=DepthReason.UNKNOWN)
    jobs.record_written("job-uid", todo.record, replace(todo, history=(former,)))
    assert counts(DepthReason.UNKNOWN)[1] == unknown[1] + 1
