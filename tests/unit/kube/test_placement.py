"""From the admission of a Workload to its pods."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.kube.bodies import job_body
from tests.unit.kube.queue_bodies import flavor_body, workload_body

from elastipod_operator.core.names import PodId
from elastipod_operator.kube.observed_job import observe_job
from elastipod_operator.kube.placement import (
    Placement,
    PlacementError,
    assignment_of,
    flavors_of,
    node_labels,
    placement,
)
from elastipod_operator.kube.pods import pod_manifest

Body = dict[str, Any]

SPOT = {"key": "spot", "operator": "Exists"}
GPU = {"key": "gpu", "operator": "Exists"}
FLAVORS = {
    "gpus": flavor_body("gpus", {"type": "p5"}, [SPOT]),
    "cpus": flavor_body("cpus", {"zone": "a"}, [GPU, SPOT]),
    "other": flavor_body("other", {"type": "p4"}),
}


def admission(flavors: dict[str, str], checks: list[Body] | None = None, **assigned: Any) -> Body:
    status = {"admission": {"podSetAssignments": [{"name": "workers", "flavors": flavors, **assigned}]}}
    return workload_body(status={**status, "admissionChecks": checks or []})


def check(name: str = "prov", **update: Any) -> Body:
    return {
        "name": name,
        "state": "Ready",
        "podSetUpdates": [{"name": "workers", **update}, {"name": "others", "labels": {"x": "y"}}],
    }


def placed(workload: Body, template: Body | None = None) -> Placement:
    return placement(workload, "workers", template or {}, FLAVORS)


def test_flavors_give_labels_and_tolerations_once() -> None:
    workload = admission({"cpu": "cpus", "nvidia.com/gpu": "gpus", "memory": "gpus"})
    assert flavors_of(workload) == ["cpus", "gpus"]
    found = placed(workload, {"spec": {"tolerations": [GPU], "nodeSelector": {"type": "p5"}}})
    assert found.node_selector == {"type": "p5", "zone": "a"}
    assert found.tolerations == (SPOT,)
    assert found.labels == {"kueue.x-k8s.io/podset": "workers"}
    assert found.annotations == {"kueue.x-k8s.io/workload": workload["metadata"]["name"]}
    assert found.gates == ()


def test_admission_checks_add_theirs() -> None:
    updates = check(labels={"l": "1"}, annotations={"a": "1"}, nodeSelector={"n": "1"}, tolerations=[GPU])
    found = placed(admission({"cpu": "gpus"}, [updates, {"name": "empty", "state": "Ready"}]))
    assert found.labels == {"l": "1", "kueue.x-k8s.io/podset": "workers"}
    assert found.annotations["a"] == "1"
    assert found.node_selector == {"type": "p5", "n": "1"}
    assert found.tolerations == (SPOT, GPU)


CLASHES = [
    (admission({"cpu": "gpus", "memory": "other"}), {}, "ResourceFlavor other sets node label type=p4"),
    (admission({"cpu": "gpus"}), {"spec": {"nodeSelector": {"type": "p4"}}}, "the template sets type=p4"),
    (admission({"cpu": "gpus"}, [check(nodeSelector={"type": "x"})]), {}, "admission check prov sets nodeSelector type=x"),
    (admission({"cpu": "gpus"}, [check(labels={"a": "1"}), check("two", labels={"a": "2"})]), {}, "check two sets label a=2"),
    (admission({"cpu": "gpus"}, [check(labels={"a": "1"})]), {"metadata": {"labels": {"a": "2"}}}, "sets a=2"),
    (admission({"cpu": "gpus"}, [check(annotations={"a": "1"})]), {"metadata": {"annotations": {"a": "2"}}}, "annotation a=1"),
    (admission({"cpu": "gone"}), {}, "ResourceFlavor gone, on which Workload"),
]  # fmt: skip


@pytest.mark.parametrize(("workload", "template", "said"), CLASHES, ids=[said for *_, said in CLASHES])
def test_a_clash_is_a_sentence(workload: Body, template: Body, said: str) -> None:
    with pytest.raises(PlacementError, match=said) as caught:
        placed(workload, template)
    assert "\n" not in str(caught.value)


def test_the_same_wish_twice_is_no_clash() -> None:
    found = placed(
        admission({"cpu": "gpus"}, [check(labels={"a": "1"}, nodeSelector={"type": "p5"})]),
        {"metadata": {"labels": {"a": "1"}}, "spec": {"nodeSelector": {"type": "p5"}}},
    )
    assert found.node_selector == {"type": "p5"}


@pytest.mark.parametrize("status", [None, {}, {"admission": None}, {"admission": {"podSetAssignments": None}}])
def test_without_an_admission_nothing_is_added(status: Any) -> None:
    workload = {**workload_body(), "status": status}
    assert (flavors_of(workload), assignment_of(workload, "workers")) == ([], {})
    assert node_labels(workload, "workers", {}) == {}


@pytest.mark.parametrize(
    ("annotations", "kept"),
    [
        ({}, {"kueue.x-k8s.io/podset-unconstrained-topology": "true"}),
        ({"kueue.x-k8s.io/podset-required-topology": "rack"}, {"kueue.x-k8s.io/podset-required-topology": "rack"}),
    ],
)
@pytest.mark.parametrize(
    "assigned", [{"topologyAssignment": {"levels": ["rack"]}}, {"delayedTopologyRequest": "Pending"}]
)
def test_pods_that_kueue_places_are_gated_and_marked(annotations: Body, kept: Body, assigned: Body) -> None:
    workload = admission({"cpu": "gpus"}, **assigned)
    found = placed(workload, {"metadata": {"annotations": annotations}})
    assert found.gates == ("kueue.x-k8s.io/topology",)
    assert found.annotations == {**kept, "kueue.x-k8s.io/workload": workload["metadata"]["name"]}


# -- the pod


def pod(template: Body, what: Placement | None) -> Body:
    body = job_body({"replicaSpecs": [{"name": "workers", "replicas": 1, "template": template}]})
    fact = observe_job(body)
    assert fact.policy is not None
    return pod_manifest(fact, body["spec"], fact.policy, PodId("workers", 0, 0), 1, placed=what)


KUEUES: dict[str, Any] = {
    "metadata": {
        "labels": {"kueue.x-k8s.io/queue-name": "q", "kueue.x-k8s.io/priority-class": "p", "kueue.x-k8s.io/managed": "true", "a": "1"},
        "annotations": {"kueue.x-k8s.io/pod-group-total-count": "2", "kueue.x-k8s.io/podset-required-topology": "rack", "b": "2"},
    },
    "spec": {"containers": [{"name": "train", "image": "train:1"}], "tolerations": [GPU], "schedulingGates": [{"name": "mine"}]},
}  # fmt: skip


def test_what_would_make_a_pod_a_job_of_kueues_is_taken_off() -> None:
    meta = pod(KUEUES, None)["metadata"]
    assert [key for part in ("labels", "annotations") for key in meta[part] if key.startswith("kueue.x-k8s.io/")] == []
    assert (meta["labels"]["a"], meta["annotations"]["b"]) == ("1", "2")
    assert "kueue.x-k8s.io/queue-name" in KUEUES["metadata"]["labels"], "the template itself is left as it is"


def test_a_placement_is_put_into_the_pod() -> None:
    what = Placement(
        {"type": "p5"}, (SPOT,), {"kueue.x-k8s.io/podset": "workers"}, {"kueue.x-k8s.io/workload": "w"}, ("gate",)
    )
    made = pod(KUEUES, what)
    assert made["spec"]["nodeSelector"] == {"type": "p5"}
    assert made["spec"]["tolerations"] == [GPU, SPOT]
    assert made["spec"]["schedulingGates"] == [{"name": "mine"}, {"name": "gate"}]
    assert made["metadata"]["labels"]["kueue.x-k8s.io/podset"] == "workers"
    assert made["metadata"]["annotations"]["kueue.x-k8s.io/workload"] == "w"
