"""What is written into the status of Workloads: complete, or Kueue stands still over it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from tests.unit.kube.queue_bodies import LATER, admitted, condition, workload_body

from elastipod_operator.core.actions import FinishWorkload, SetPodsReady
from elastipod_operator.kube.workload_status import finished_status, pods_ready_status, release_patch

NOW = datetime(2026, 3, 1, 12, 5, 0, 123, UTC)
NOW_TEXT = "2026-03-01T12:05:00Z"


def evicted_body(reason: str = "Preempted", *more: dict[str, Any], **changes: Any) -> dict[str, Any]:
    conditions = admitted(condition("Evicted", reason=reason, message="room is needed"), condition("Preempted"), *more)
    return workload_body(status={"admission": {"clusterQueue": "q"}, "conditions": conditions, **changes})


def by_type(patch: dict[str, Any]) -> dict[str, dict[str, Any]]:
    conditions = patch["status"]["conditions"]
    found = {c["type"]: c for c in conditions}
    assert len(found) == len(conditions)
    return found


def test_a_release_takes_everything_back_in_one_write_and_keeps_the_rest() -> None:
    body = evicted_body("Preempted", condition("PodsReady"), condition("Requeued"))
    patch = release_patch(body, NOW)
    assert patch["metadata"] == {"uid": body["metadata"]["uid"], "resourceVersion": "30"}
    assert patch["status"]["admission"] is None
    found = by_type(patch)
    assert {kind: (c["status"], c["reason"]) for kind, c in found.items()} == {
        "Evicted": ("True", "Preempted"),
        "Preempted": ("True", "Because"),
        "QuotaReserved": ("False", "Pending"),
        "Admitted": ("False", "NoReservation"),
        "Requeued": ("True", "Preempted"),
        "PodsReady": ("False", "WaitForStart"),
    }
    assert found["Evicted"] == body["status"]["conditions"][2]
    assert found["QuotaReserved"]["message"] == found["Requeued"]["message"] == "room is needed"
    assert {found[kind]["lastTransitionTime"] for kind in ("QuotaReserved", "Admitted", "PodsReady")} == {NOW_TEXT}
    assert found["Requeued"]["lastTransitionTime"] == LATER, "it did not change"
    assert {found[kind]["observedGeneration"] for kind in ("QuotaReserved", "Requeued")} == {1}
    assert "accumulatedPastExecutionTimeSeconds" not in patch["status"]


@pytest.mark.parametrize(
    ("evicted", "status", "reason"),
    [
        ("Preempted", "True", "Preempted"),
        ("NodeFailures", "True", "NodeFailures"),
        ("PodsReadyTimeout", "False", "PodsReadyTimeout"),
        ("AdmissionCheck", "False", "AdmissionCheck"),
        ("ClusterQueueStopped", "False", "ClusterQueueStopped"),
        ("LocalQueueStopped", "False", "LocalQueueStopped"),
        ("Deactivated", "False", "Deactivated"),
        ("DeactivatedDueToRequeuingLimitExceeded", "False", "Deactivated"),
        ("SomethingNew", "True", "SomethingNew"),
        ("", "True", "Evicted"),
    ],
)
def test_who_lets_it_back_into_the_queue(evicted: str, status: str, reason: str) -> None:
    requeued = by_type(release_patch(evicted_body(evicted), NOW))["Requeued"]
    assert (requeued["status"], requeued["reason"]) == (status, reason)


def test_time_that_counts_against_a_limit_is_added_up() -> None:
    body = evicted_body(accumulatedPastExecutionTimeSeconds=100)
    body["spec"]["maximumExecutionTimeSeconds"] = 3600
    assert release_patch(body, NOW)["status"]["accumulatedPastExecutionTimeSeconds"] == 100 + 4 * 60
    del body["status"]["accumulatedPastExecutionTimeSeconds"]
    body["status"]["conditions"][1]["lastTransitionTime"] = "not a time"
    assert release_patch(body, NOW)["status"]["accumulatedPastExecutionTimeSeconds"] == 0


def test_no_message_is_longer_than_kueue_takes() -> None:
    body = evicted_body()
    body["status"]["conditions"][2]["message"] = "x" * 5000
    assert len(by_type(release_patch(body, NOW))["QuotaReserved"]["message"]) == 1024


@pytest.mark.parametrize(("succeeded", "reason"), [(True, "Succeeded"), (False, "Failed")])
def test_finished(succeeded: bool, reason: str) -> None:
    manager, body = finished_status("team", FinishWorkload("w", "u", succeeded, "all done"), NOW)
    assert manager == "elastipod-operator-Finished"
    assert body == {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Workload",
        "metadata": {"name": "w", "namespace": "team", "uid": "u"},
        "status": {
            "conditions": [
                {
                    "type": "Finished",
                    "status": "True",
                    "reason": reason,
                    "message": "all done",
                    "lastTransitionTime": NOW_TEXT,
                }
            ]
        },
    }


@pytest.mark.parametrize(
    ("ready", "was_ready", "status", "reason"),
    [
        (True, False, "True", "Started"),
        (True, True, "True", "Recovered"),
        (False, False, "False", "WaitForStart"),
        (False, True, "False", "WaitForRecovery"),
    ],
)
def test_pods_ready_has_a_manager_of_its_own(ready: bool, was_ready: bool, status: str, reason: str) -> None:
    manager, body = pods_ready_status("team", SetPodsReady("w", "u", ready, was_ready), NOW)
    (found,) = body["status"]["conditions"]
    assert manager == "elastipod-operator-PodsReady"
    assert (found["type"], found["status"], found["reason"]) == ("PodsReady", status, reason)
