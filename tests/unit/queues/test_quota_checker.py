"""Each rule of the checker of quota: a history that keeps it, and one in which it is broken."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api.quota_checker import (
    EXTRA_BEFORE_BASE,
    GIVEN_BACK_EARLY,
    HELD_TOO_LONG,
    LEFT_OVER,
    MARGIN_S,
    OVER_QUOTA,
    POD,
    WORKLOAD,
    check,
)
from tests.unit.queues.stories import GRACE_S, QUOTAS, Story, by, ended, preempted


def test_a_partial_preemption_as_it_should_be() -> None:
    story = preempted().job("old", drains=True).wait(2).pod("old-2", "old-more-1", leaves=True)
    verdict = ended(story.gone(POD, "old-2").gone(WORKLOAD, "old-more-1")).verdict()
    assert verdict.violations == []
    (eviction,) = verdict.evictions
    assert (eviction.workload, eviction.is_base, eviction.reason) == ("old-more-1", False, "Preempted")
    # A second each from the eviction to the record, from there on (with the two) to the end of the pod, and to the release.
    assert (eviction.drain_s, eviction.beyond_drain_s) == (4.0, 2.0)
    assert verdict.counts["preemptions"] == 1
    assert verdict.counts["most CPUs in use"] == 4


def test_a_pod_that_ended_does_not_live_on_quota() -> None:
    story = preempted().pod("old-2", "old-more-1", phase="Succeeded").gone(WORKLOAD, "old-more-1")
    assert ended(story).verdict().violations == []


def test_a_pod_that_comes_after_the_eviction_belongs_to_the_drain() -> None:
    story = Story().workload("old-more-1", 1).workload("old-more-1", 1, Evicted=by("old-more-1"))
    story.pod("old-2", "old-more-1").pod("old-2", "old-more-1", leaves=True).wait(2).gone(POD, "old-2")
    (eviction,) = story.gone(WORKLOAD, "old-more-1").verdict().evictions
    assert (eviction.drain_s, eviction.beyond_drain_s) == (3.0, 3.0)


def test_an_eviction_that_is_called_off_is_counted_and_no_release() -> None:
    story = Story().workload("job-base", 1).workload("job-base", 1, Evicted=by("job-base")).workload("job-base", 1)
    verdict = story.workload("job-base", 1, Finished="True").verdict()
    assert verdict.evictions == []
    assert verdict.violations == []
    assert verdict.counts["evictions that Kueue called off"] == 1


# -- each rule broken


def pod_before_its_quota() -> Story:
    return Story().workload("job-base").pod("job-0").workload("job-base", 1)


def pod_on_reserved_quota_with_checks_pending() -> Story:
    return Story().workload("job-base", 1, Admitted="False").pod("job-0")


def pod_on_no_workload() -> Story:
    return Story().workload("job-base", 2).pod("job-0").pod("job-1", "job-more-1")


def more_pods_than_granted() -> Story:
    return Story().workload("job-base", 1).pod("job-0").pod("job-1")


def pod_larger_than_asked() -> Story:
    return Story().workload("job-base", 1).pod("job-0", cpu="1500m")


def another_queues_quota() -> Story:
    """Each Workload has its pods, but what lives of the job is in a queue that granted less."""
    story = Story().workload("job-base", 1, queue="queue-b").pod("job-0").workload("job-base", 1, queue="queue-a")
    return story.workload("job-more-1", 1, queue="queue-c").pod("job-1", "job-more-1")


def more_than_the_cohort_has() -> Story:
    return Story().workload("one-base", 5, queue="queue-a").workload("two-base", 4, queue="queue-b")


@pytest.mark.parametrize(
    "story",
    [
        pod_before_its_quota,
        pod_on_reserved_quota_with_checks_pending,
        pod_on_no_workload,
        more_pods_than_granted,
        pod_larger_than_asked,
        another_queues_quota,
        more_than_the_cohort_has,
    ],
    ids=lambda story: story.__name__,
)
def test_over_quota(story: Any) -> None:
    assert OVER_QUOTA in story().verdict().rules_broken()


def deleted_while_a_pod_runs() -> Story:
    return preempted().gone(WORKLOAD, "old-more-1")


def deleted_while_a_pod_still_ends() -> Story:
    return preempted().pod("old-2", "old-more-1", leaves=True).gone(WORKLOAD, "old-more-1")


def released_while_one_pod_of_two_runs() -> Story:
    story = Story().workload("job-base", 2).pod("job-0").pod("job-1").workload("job-base", 2, Evicted=by("job-base"))
    return story.gone(POD, "job-0").workload("job-base")


def finished_while_a_pod_runs() -> Story:
    return Story().workload("job-base", 1).pod("job-0").workload("job-base", 1, Finished="True")


def deactivated_while_a_pod_runs() -> Story:
    return Story().workload("job-base", 1).pod("job-0").workload("job-base", 1, active=False)


@pytest.mark.parametrize(
    "story",
    [
        deleted_while_a_pod_runs,
        deleted_while_a_pod_still_ends,
        released_while_one_pod_of_two_runs,
        finished_while_a_pod_runs,
        deactivated_while_a_pod_runs,
    ],
    ids=lambda story: story.__name__,
)
def test_given_back_early(story: Any) -> None:
    assert GIVEN_BACK_EARLY in story().verdict().rules_broken()


@pytest.mark.parametrize(("waits_s", "is_broken"), [(GRACE_S + MARGIN_S - 1, False), (GRACE_S + MARGIN_S + 1, True)])
def test_held_too_long(waits_s: float, is_broken: bool) -> None:
    with_pods = preempted().wait(100).gone(POD, "old-2").wait(waits_s - 1).gone(WORKLOAD, "old-more-1")
    without = Story().workload("job-base", 1).workload("job-base", 1, Evicted=by("job-base")).wait(waits_s - 1)
    never = preempted().gone(POD, "old-2").wait(waits_s - 1).job("old", drains=False)
    for story in (with_pods, without.workload("job-base"), never):
        assert (HELD_TOO_LONG in story.verdict().rules_broken()) == is_broken


def test_an_increment_never_preempts_a_base() -> None:
    story = Story().workload("weak-base", 2).workload("other-base", 1).workload("other-more-1")
    story.workload("weak-base", 2, Evicted=by("other-more-1"))
    assert EXTRA_BEFORE_BASE in story.verdict().rules_broken()
    base_for_base = Story().workload("weak-base", 2).workload("other-base")
    assert (
        EXTRA_BEFORE_BASE
        not in base_for_base.workload("weak-base", 2, Evicted=by("other-base")).verdict().rules_broken()
    )
    extra_for_extra = Story().workload("weak-more-1", 2).workload("other-more-1")
    extra_for_extra.workload("weak-more-1", 2, Evicted=by("other-more-1"))
    assert EXTRA_BEFORE_BASE not in extra_for_extra.verdict().rules_broken()


def test_who_preempts_may_be_gone_and_must_be_known() -> None:
    story = Story().workload("weak-base", 2).workload("other-more-1").gone(WORKLOAD, "other-more-1")
    assert EXTRA_BEFORE_BASE in story.workload("weak-base", 2, Evicted=by("other-more-1")).verdict().rules_broken()
    reworded = Story().workload("weak-base", 2).workload("weak-base", 2, Evicted="Preempted for somebody")
    assert EXTRA_BEFORE_BASE in reworded.verdict().rules_broken()


def test_left_over() -> None:
    assert LEFT_OVER in Story().workload("job-base", 1).verdict().rules_broken()
    living = Story().workload("job-base", 1).pod("job-0").gone(WORKLOAD, "job-base")
    assert LEFT_OVER in living.verdict().rules_broken()
    assert LEFT_OVER not in Story().workload("job-base", 1, Finished="True").verdict().rules_broken()


def test_a_rule_that_stays_broken_is_told_once() -> None:
    story = more_than_the_cohort_has()
    for _ in range(3):
        story.workload("one-base", 5)
    told = [one for one in story.verdict().violations if one.rule == OVER_QUOTA]
    assert [(one.version, one.what) for one in told] == [(2, "all Workloads: 9000m of 8000m")]


def test_a_history_out_of_order_is_none() -> None:
    story = preempted()
    with pytest.raises(AssertionError, match="in order"):
        check([*story.changes, story.changes[0]], QUOTAS, GRACE_S)
