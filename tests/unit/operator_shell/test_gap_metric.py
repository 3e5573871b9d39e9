"""The histogram of gaps: one observation for each change, by its kind and depth."""

from __future__ import annotations

from datetime import timedelta

import pytest
from tests.unit.core.builders import LONG_AGO, job, observed, pod, ready, running, trains, transition

from elastipod_operator import metrics
from elastipod_operator.core.actions import Plan
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Depth, Record
from elastipod_operator.core.snapshot import ObservedAgent
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
