"""Each rule of the checker of quota: a history that keeps it, and one in which it is broken."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from tests.api.etcd_history import Change, HistoryGapError, Recorder
from tests.api.quota_checker import (
    EXTRA_BEFORE_BASE,
    GIVEN_BACK_EARLY,
    HELD_TOO_LONG,
    JOB,
    LEFT_BEHIND,
    LEFT_OVER,
    MARGIN_S,
    OVER_QUOTA,
    POD,
    WORKLOAD,
    Verdict,
    check,
)

from elastipod_operator.core.reasons import OpenReason
from elastipod_operator.core.record import Record, Transition, TransitionKind
from elastipod_operator.core.record_codec import encode

GRACE_S = 3.0
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
QUOTAS = {"queue-a": 4000, "queue-b": 4000}


class Story:
    """A history, told one change after the other; a second passes with each."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._seconds = 0.0
        self._there: set[tuple[str, str]] = set()

    def wait(self, seconds: float) -> Story:
        self._seconds += seconds
        return self

    def pod(
        self,
        name: str,
        workload: str = "",
        *,
        phase: str = "Running",
        cpu: str = "1",
        leaves: bool = False,
        **labels: str,
    ) -> Story:
        """A pod `<job>-<n>` as it is from now on. workload: by default the base of its job."""
        job = name.rpartition("-")[0]
        meta: dict[str, Any] = {
            "name": name, "labels": {"HPJob": job, **labels},
            "annotations": {"kueue.x-k8s.io/workload": workload or f"{job}-base"},
        }  # fmt: skip
        if leaves:
            meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        container = {"name": "trainer", "resources": {"requests": {"cpu": cpu}}}
        return self._put(POD, {"metadata": meta, "spec": {"containers": [container]}, "status": {"phase": phase}})

    def workload(
        self, name: str, cpus: int = 0, *, queue: str = "queue-a", active: bool = True, **conditions: str
    ) -> Story:
        """A Workload `<job>-base` or `<job>-more-<n>`, admitted with so many CPUs, from now on; 0: it waits.

        conditions: status or, for Evicted, the message of what preempted it.
        """
        job, _, share = name.replace("-base", "-more-0").rpartition("-more-")
        meta = {"name": name, "labels": {"HPJob": job, "elastipod.io/share": share}}
        told = {"QuotaReserved": "True" if cpus else "False", "Admitted": "True" if cpus else "False", **conditions}
        status: dict[str, Any] = {"conditions": [_condition(kind, text) for kind, text in told.items()]}
        if cpus:
            assigned = {"name": "pods", "count": cpus, "resourceUsage": {"cpu": str(cpus)}}
            status["admission"] = {"clusterQueue": queue, "podSetAssignments": [assigned]}
        return self._put(WORKLOAD, {"metadata": meta, "spec": {"active": active}, "status": status})

    def job(self, name: str, *, drains: bool) -> Story:
        drain = Transition(
            kind=TransitionKind.RESIZE, cause=OpenReason("Preempted"), message="", from_size=2, target_size=1,
            began_at=NOON, detected_at=NOON, deadline=NOON,
        )  # fmt: skip
        state = {"elastipod.io/state": encode(Record(transition=drain if drains else None))}
        return self._put(JOB, {"metadata": {"name": name, "annotations": state}})

    def gone(self, kind: str, name: str) -> Story:
        last = next(c for c in reversed(self.changes) if (c.kind, c.body["metadata"]["name"]) == (kind, name))
        self._there.discard((kind, name))
        return self._add(kind, "DELETED", last.body)

    def verdict(self) -> Verdict:
        return check(self.changes, QUOTAS, GRACE_S)

    def _put(self, kind: str, body: dict[str, Any]) -> Story:
        name = body["metadata"]["name"]
        is_known = (kind, name) in self._there
        self._there.add((kind, name))
        body["metadata"]["uid"] = f"uid of {name}"
        return self._add(kind, "MODIFIED" if is_known else "ADDED", body)

    def _add(self, kind: str, type: str, body: dict[str, Any]) -> Story:
        self._seconds += 1
        version = len(self.changes) + 1
        meta = {**body["metadata"], "resourceVersion": str(version)}
        self.changes.append(Change(version, self._seconds, kind, type, {**body, "metadata": meta}))
        return self


def _condition(kind: str, text: str) -> dict[str, str]:
    if text in ("True", "False"):
        return {"type": kind, "status": text, "reason": kind, "message": ""}
    return {"type": kind, "status": "True", "reason": "Preempted", "message": text}


def by(name: str) -> str:
    """Give Kueue's sentence about a Workload that had to make room."""
    return (
        f"Preempted to accommodate a workload (UID: uid of {name}, JobUID: any) due to prioritization in the ClusterQueue; "
        "preemptor path: /queue-a; preemptee path: /queue-a"
    )


def preempted() -> Story:
    """A job on three CPUs of four, and a newcomer with two, for which the increment has to go."""
    story = (
        Story().workload("old-base", 2).workload("old-more-1", 1).pod("old-0").pod("old-1").pod("old-2", "old-more-1")
    )
    return story.workload("new-base").workload("old-more-1", 1, Evicted=by("new-base"))


def ended(story: Story) -> Story:
    """Let the old job and the new one come to their end."""
    story.workload("new-base", 2).pod("new-0").pod("new-1")
    for name in ("old-0", "old-1", "new-0", "new-1"):
        story.pod(name, phase="Succeeded")
    return story.workload("old-base", 2, Finished="True").workload("new-base", 2, Finished="True")


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


# -- the recorder


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
