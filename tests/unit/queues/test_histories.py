"""What the recorder of histories takes for a gap, and what is left of deleted jobs."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api.etcd_history import HistoryGapError, Recorder
from tests.api.quota_checker import (
    GIVEN_BACK_EARLY,
    HELD_TOO_LONG,
    JOB,
    LEFT_BEHIND,
    MARGIN_S,
    OVER_QUOTA,
    POD,
    WORKLOAD,
)
from tests.unit.queues.stories import GRACE_S, Story, by, preempted


def recorder() -> Recorder:
    return Recorder(None, {POD: "/pods"})  # type: ignore[arg-type]  # takes changes, makes no calls


def test_a_change_of_what_was_never_added_is_a_gap() -> None:
    change = preempted().pod("old-0").changes[-1]
    assert change.type == "MODIFIED"
    with pytest.raises(HistoryGapError):
        recorder().take(POD, change.type, change.body)
    with pytest.raises(HistoryGapError):
        recorder().take(POD, "DELETED", change.body)


def test_a_second_object_of_a_name_without_the_end_of_the_first_is_a_gap() -> None:
    body = Story().pod("job-0").changes[0].body
    another = {**body, "metadata": {**body["metadata"], "uid": "another"}}
    taken = recorder()
    taken.take(POD, "ADDED", body)
    for type in ("ADDED", "MODIFIED"):
        with pytest.raises(HistoryGapError):
            taken.take(POD, type, another)
    taken.take(POD, "DELETED", body)
    taken.take(POD, "ADDED", another)
    assert taken.now(POD)["job-0"]["metadata"]["uid"] == "another"


def test_what_is_being_evicted_counts_toward_no_quota_but_its_pods_to_its_job() -> None:
    story = Story().workload("old-base", 4).workload("new-base").workload("old-base", 4, Evicted=by("new-base"))
    assert OVER_QUOTA not in story.workload("new-base", 8, queue="queue-b").verdict().rules_broken()
    assert OVER_QUOTA in story.workload("third-base", 1).verdict().rules_broken()


def deleted_job() -> Story:
    """A job with a pod on its base and an increment that waits, which a user deletes."""
    story = Story().job("job", drains=False).workload("job-base", 1).pod("job-0").workload("job-more-1")
    return story.gone(WORKLOAD, "job-more-1").pod("job-0", leaves=True)


def test_a_deleted_job_gives_its_quota_back_and_goes_last() -> None:
    told = deleted_job().gone(POD, "job-0").gone(WORKLOAD, "job-base").gone(JOB, "job").verdict()
    assert told.violations == []
    assert told.counts["deleted jobs that are gone"] == 1
    ended = Story().job("job", drains=False).workload("job-base", 1).workload("job-base", 1, Finished="True")
    assert ended.gone(JOB, "job").verdict().violations == [], "what is finished holds nothing"


def left_to_the_garbage_collector() -> Story:
    return deleted_job().gone(POD, "job-0").gone(JOB, "job").gone(WORKLOAD, "job-base")


def left_to_kueue() -> Story:
    """It may grant what still waits."""
    story = Story().job("job", drains=False).workload("job-base", 1).workload("job-more-1")
    return story.gone(WORKLOAD, "job-base").gone(JOB, "job").gone(WORKLOAD, "job-more-1")


@pytest.mark.parametrize("story", [left_to_the_garbage_collector, left_to_kueue], ids=lambda story: story.__name__)
def test_left_behind(story: Any) -> None:
    assert story().verdict().rules_broken() == {LEFT_BEHIND}


def test_the_other_rules_hold_for_a_deleted_job_too() -> None:
    early = deleted_job().gone(WORKLOAD, "job-base").gone(POD, "job-0").gone(JOB, "job")
    assert GIVEN_BACK_EARLY in early.verdict().rules_broken()
    late = Story().job("job", drains=False).workload("job-base", 1).workload("job-base", 1, Evicted=by("job-base"))
    late.gone(JOB, "job").wait(GRACE_S + MARGIN_S + 5).gone(WORKLOAD, "job-base")
    assert HELD_TOO_LONG in late.verdict().rules_broken()
