"""What labels and annotations of Kueue's tell of jobs and pods."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.builders import NOW
from tests.unit.kube.bodies import job_body, pod_body

from elastipod_operator.core.actions import Plan, SetFinalizer, SetQueueLabel
from elastipod_operator.core.reasons import OpenReason
from elastipod_operator.core.record import Record
from elastipod_operator.core.snapshot import Condition
from elastipod_operator.kube.changes import metadata_changes
from elastipod_operator.kube.observed_job import observe_job
from elastipod_operator.kube.observed_pod import observe_pod
from elastipod_operator.kube.store import Job

LABEL = "kueue.x-k8s.io/queue-name"


def specs(*labels: Any) -> dict[str, Any]:
    pod = {"containers": [{"name": "train", "image": "train:1"}]}
    templates = [{"metadata": {"labels": one}, "spec": pod} for one in labels]
    return {"replicaSpecs": [{"name": f"s{at}", "replicas": 1, "template": t} for at, t in enumerate(templates)]}


@pytest.mark.parametrize(
    ("labels", "spec", "queue", "in_template"),
    [
        (None, None, "", ""),
        ({LABEL: "a"}, specs({LABEL: "b"}), "a", "b"),
        ({"other": "a"}, specs({"x": "y"}, {LABEL: "b"}), "", "b"),
        ({LABEL: ""}, specs(None, {LABEL: ""}), "", ""),
    ],
)
def test_the_queue_of_a_job(labels: Any, spec: Any, queue: str, in_template: str) -> None:
    fact = observe_job(job_body(spec, labels=labels))
    assert fact.policy is not None
    assert (fact.queue, fact.queue_in_template) == (queue, in_template)


@pytest.mark.parametrize(
    "spec", [None, 7, [], {}, {"replicaSpecs": 7}, {"replicaSpecs": [None, {"template": 7}]}], ids=str
)
def test_no_queue_is_read_from_what_cannot_be_read(spec: Any) -> None:
    body = {**job_body(), "spec": spec}
    assert observe_job(body).queue_in_template == ""


def test_the_workload_of_a_pod() -> None:
    for notes, name in ((None, ""), ({"kueue.x-k8s.io/workload": "job-base-1"}, "job-base-1")):
        fact = observe_pod(pod_body(annotations=notes), "train")
        assert fact is not None
        assert fact.workload == name


@pytest.mark.parametrize(
    ("present", "finalizers", "actions", "labels"),
    [
        (None, [], (SetQueueLabel("a"),), {LABEL: "a"}),
        ({LABEL: "b"}, [], (SetQueueLabel("a"),), {LABEL: "a"}),
        ({LABEL: "a"}, [], (SetQueueLabel("a"),), None),
        (None, ["elastipod.io/finalizer"], (SetQueueLabel("a"), SetFinalizer(False)), None),
        (None, [], (), None),
    ],
)
def test_a_named_queue_is_written_once(present: Any, finalizers: list[str], actions: Any, labels: Any) -> None:
    body = job_body(labels=present, finalizers=finalizers)
    todo = Plan(record=Record(), actions=actions, conditions=(Condition("Created", True, OpenReason("x"), "x", NOW),))
    assert metadata_changes(Job(body, observe_job(body), 10), todo).get("labels") == labels
