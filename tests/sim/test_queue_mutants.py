"""Mistakes planted around quota, each of which a schedule with queues must find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.sim.failures import failure_of
from tests.sim.random_schedules import draw
from tests.sim.scripted_queue_schedules import QUEUE_SCHEDULES

from elastipod_operator.core import plan, quota, quota_requests
from elastipod_operator.core.actions import SetPodsReady
from elastipod_operator.core.context import PlanDraft
from elastipod_operator.core.replica import Replica
from elastipod_operator.core.snapshot import ObservedWorkload
from elastipod_operator.kube import placement, queue_lookups, workload_status, workloads
from elastipod_operator.kube.workload_status import release_patch
from elastipod_operator.kube.workloads import Priority
from elastipod_operator.queueing import quota_release

TRIES = 60

Mutant = Callable[[pytest.MonkeyPatch], None]


def give_quota_back_before_pods_are_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quota_requests, "pods_by_workload", lambda _, workloads, __: {w.name: [] for w in workloads})
    patch.setattr(quota_release, "pods_on", lambda *_: [])


def believe_a_late_watch_about_pods(patch: pytest.MonkeyPatch) -> None:
    """Without the look at the API server, and with pods taken for gone that are being deleted."""
    real = quota_release.pods_on
    patch.setattr(quota_release, "pods_on", lambda *given: [pod for pod in real(*given) if pod.kill_at is None])
    using = quota.pods_by_workload

    def those_that_stay(*given: Any) -> dict[str, list[Replica]]:
        return {name: [r for r in pods if r.pod.kill_at is None] for name, pods in using(*given).items()}

    patch.setattr(quota_requests, "pods_by_workload", those_that_stay)


def ask_for_increments_at_the_priority_of_the_base(patch: pytest.MonkeyPatch) -> None:
    for module in (queue_lookups, workloads):
        patch.setattr(module, "increment_priority", Priority)


def make_pods_before_they_are_admitted(patch: pytest.MonkeyPatch) -> None:
    is_granted = property(lambda self: not (self.eviction_reason or self.finished or self.is_deleting))
    patch.setattr(ObservedWorkload, "is_granted", is_granted)


def leave_the_base_admitted(patch: pytest.MonkeyPatch) -> None:
    """A part of the patch that gives quota back is missing."""

    def release(body: Mapping[str, Any], *rest: Any) -> dict[str, Any]:
        found = release_patch(body, *rest)
        for condition in found["status"]["conditions"]:
            if condition["type"] == "Admitted":
                condition["status"] = "True"
        return found

    patch.setattr(quota_release, "release_patch", release)


def keep_a_base_out_of_its_queue(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(workload_status, "_requeued", lambda reason: (reason, False))


def never_give_an_evicted_increment_back(patch: pytest.MonkeyPatch) -> None:
    real = quota_requests._why_unwanted

    def why(number: int, workload: ObservedWorkload, *rest: Any) -> str:
        return "" if number and workload.eviction_reason else real(number, workload, *rest)

    patch.setattr(quota_requests, "_why_unwanted", why)


def train_on_when_quota_is_taken_back(patch: pytest.MonkeyPatch) -> None:
    real = quota.apply_quota

    def under(seen: Any, record: Any) -> Any:
        kept = tuple(replace(w, eviction_reason="", eviction_message="") for w in seen.workloads)
        return real(replace(seen, workloads=kept), record)

    patch.setattr(plan, "apply_quota", under)


def keep_increments_without_a_base(patch: pytest.MonkeyPatch) -> None:
    real = quota_requests._why_unwanted

    def why(number: int, workload: ObservedWorkload, *rest: Any) -> str:
        found = real(number, workload, *rest)
        return "" if found == "the base of the job has no quota" else found

    patch.setattr(quota_requests, "_why_unwanted", why)


def keep_quota_after_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quota_requests, "_finish", lambda *_: [])


def leave_workloads_to_the_garbage_collector(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan, "with_quota_returns", lambda step, *_: step)


def ask_for_a_job_that_is_being_deleted(patch: pytest.MonkeyPatch) -> None:
    """Everything is given back, but only when the pods are gone."""
    real = quota_requests.with_quota_returns

    def late(step: PlanDraft, seen: Any, *rest: Any) -> PlanDraft:
        return step if seen.pods else real(step, seen, *rest)

    patch.setattr(plan, "with_quota_returns", late)


def ask_for_a_base_while_pods_of_the_last_one_go(patch: pytest.MonkeyPatch) -> None:
    real = quota_requests._creations

    def asks(record: Any, seen: Any, view: Any, *rest: Any) -> Any:
        return real(record, seen, replace(view, by_id={}), *rest)

    patch.setattr(quota_requests, "_creations", asks)


def never_tell_that_pods_are_ready(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quota_requests, "_readiness", lambda *_: [])


def count_ready_pods_where_they_are(patch: pytest.MonkeyPatch) -> None:
    """Kueue takes a base back of which one pod finds no node, while increments hold the nodes."""

    def marks(view: Any, quota: Any, *_: Any) -> list[SetPodsReady]:
        found = []
        for number, workload in quota.granted.items():
            request = quota.requests[number]
            good = [r for s in request.slots if (r := view.newest.get(s)) is not None and quota_requests._is_ready(r)]
            is_ready = len(good) >= sum(request.trains.values())
            if is_ready != bool(workload.pods_ready):
                found.append(SetPodsReady(workload.name, workload.uid, is_ready, workload.pods_ready is not None))
        return found

    patch.setattr(quota_requests, "_readiness", marks)


def ask_again_at_once_for_what_was_taken_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quota_requests, "_back_off", lambda record, *_: (record, None))


def stop_a_job_whose_minimum_is_lowered(patch: pytest.MonkeyPatch) -> None:
    for module in (quota, quota_requests):
        patch.setattr(module, "effective_quota_requests", lambda policy, base: quota.quota_requests_of(policy))
    patch.setattr(quota, "retained_base", lambda *_: 0)


def run_wherever_there_is_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(placement, "node_labels", lambda *_: {})


def take_increments_of_any_flavor(patch: pytest.MonkeyPatch) -> None:
    async def pins(*_: Any) -> dict[str, Any]:
        return {}

    patch.setattr(queue_lookups.KueueLookups, "pins", pins)


MUTANTS: dict[Mutant, str | None] = {
    give_quota_back_before_pods_are_gone: "increments give way to a gang and come back",
    believe_a_late_watch_about_pods: "increments give way to a gang and come back",
    ask_for_increments_at_the_priority_of_the_base: "a stronger job leaves a weaker base alone",
    make_pods_before_they_are_admitted: "increments give way to a gang and come back",
    leave_the_base_admitted: "the base gives way to a higher class",
    keep_a_base_out_of_its_queue: "the base gives way to a higher class",
    never_give_an_evicted_increment_back: "increments give way to a gang and come back",
    train_on_when_quota_is_taken_back: "increments give way to a gang and come back",
    keep_increments_without_a_base: "somebody deactivates the base",
    keep_quota_after_the_end: "increments give way to a gang and come back",
    leave_workloads_to_the_garbage_collector: "the job is deleted in an eviction",
    ask_for_a_job_that_is_being_deleted: "the job is deleted while increments wait and workers save",
    ask_for_a_base_while_pods_of_the_last_one_go: "somebody deletes the base, and another flavor has room",
    never_tell_that_pods_are_ready: "increments give way to a gang and come back",
    count_ready_pods_where_they_are: "a node of the base is lost, and pods must be ready in time",
    ask_again_at_once_for_what_was_taken_back: "a node of an increment is lost for good",
    stop_a_job_whose_minimum_is_lowered: "the minimum is lowered while the job trains",
    run_wherever_there_is_room: "increments give way to a gang and come back",
    take_increments_of_any_flavor: "increments give way to a gang and come back",
}
"""By mistake, the scripted schedule that finds it; None where a random one does."""


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_mistake_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    name = MUTANTS[mutant]
    schedules = (draw(seed, queued=True) for seed in range(TRIES)) if name is None else [QUEUE_SCHEDULES[name]]
    assert any(failure_of(schedule) is not None for schedule in schedules), f"not found by {name or 'random schedules'}"
