"""Workloads: what is asked for, and how Kueue's answer is read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.kube.bodies import job_body
from tests.unit.kube.queue_bodies import admitted, condition, workload_body
from tests.unit.kube.workload_bodies import POD, Body, ask, two_specs

from elastipod_operator.core.actions import CreateWorkload
from elastipod_operator.kube.observed_job import observe_job
from elastipod_operator.kube.workloads import (
    Priority,
    digest_of,
    required_level,
    templates_digest,
    workload_fact,
    workload_manifest,
)


def manifest(spec: Body, order: CreateWorkload, priority: Priority | None = None, **more: Any) -> Body:
    return workload_manifest(observe_job(job_body(name="llm")), spec, order, priority or Priority(7), **more)


def test_a_workload_carries_what_kueue_counts_and_no_more() -> None:
    made = manifest(two_specs(), ask(base=2, elastic=0))
    (pod_set,) = made["spec"]["podSets"]
    assert (pod_set["name"], pod_set["count"]) == ("base", 2)
    assert pod_set["template"] == {
        "spec": {
            "containers": [
                {"name": "train", "resources": {"limits": {"nvidia.com/gpu": "8"}, "requests": {"cpu": "4"}}},
                {"name": "container-1"},
            ],
            "initContainers": [{"name": "side", "restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}}],
            **{name: POD[name] for name in ("nodeSelector", "affinity", "tolerations", "runtimeClassName", "overhead")},
        }
    }
    assert "topologyRequest" not in pod_set


def test_whose_it_is_and_where() -> None:
    made = manifest(two_specs(), ask(3, elastic=1))
    meta = made["metadata"]
    assert (made["apiVersion"], made["kind"]) == ("kueue.x-k8s.io/v1beta2", "Workload")
    assert meta["name"].startswith("llm-more-3-")
    assert meta["labels"] == {"kueue.x-k8s.io/job-uid": "job-uid", "HPJob": "llm", "elastipod.io/share": "3"}
    (owner,) = meta["ownerReferences"]
    assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == ("job-uid", True, True)
    assert "finalizers" not in meta
    assert made["spec"]["queueName"] == "gpus"
    assert (made["spec"]["priority"], "priorityClassRef" in made["spec"]) == (7, False)


@pytest.mark.parametrize(
    ("kind", "group"), [("WorkloadPriorityClass", "kueue.x-k8s.io"), ("PriorityClass", "scheduling.k8s.io")]
)
def test_a_class_is_named_with_its_value(kind: str, group: str) -> None:
    made = manifest(two_specs(), ask(base=2), Priority(5, kind, "high"))
    assert made["spec"]["priority"] == 5
    assert made["spec"]["priorityClassRef"] == {"group": group, "kind": kind, "name": "high"}


def test_pins_do_not_overrule_the_user() -> None:
    made = manifest(two_specs(), ask(1, elastic=1), pins={"elastic": {"pool": "b", "type": "p5"}, "base": {"x": "y"}})
    assert made["spec"]["podSets"][0]["template"]["spec"]["nodeSelector"] == {"pool": "a", "type": "p5"}
    assert POD["nodeSelector"] == {"pool": "a"}


@pytest.mark.parametrize(
    ("annotations", "count", "request_"),
    [
        ({"required": "rack"}, 2, {"required": "rack"}),
        ({"preferred": "rack"}, 2, {"preferred": "rack"}),
        ({"unconstrained": "true"}, 2, {"unconstrained": True}),
        ({"unconstrained": "false"}, 2, None),
        ({"required": ""}, 2, None),
        ({"required": "rack", "slice-required": "host", "slice-size": "2"}, 4,
         {"required": "rack", "podSetSliceRequiredTopology": "host", "podSetSliceSize": 2}),
        ({"required": "rack", "slice-required": "host", "slice-size": "2"}, 3, {"required": "rack"}),
        ({"slice-required": "host", "slice-size": "none"}, 3, None),
    ],
)  # fmt: skip
def test_topology_annotations_become_the_request(annotations: Body, count: int, request_: Body | None) -> None:
    named = {f"kueue.x-k8s.io/podset-{key}{'' if 'size' in key else '-topology'}": v for key, v in annotations.items()}
    spec = two_specs(base={"metadata": {"annotations": named}, "spec": POD})
    (pod_set,) = manifest(spec, ask(base=count))["spec"]["podSets"]
    assert pod_set.get("topologyRequest") == request_
    assert required_level(spec, "base") == (annotations.get("required") or "")


def test_the_digest_tells_of_what_matters_only() -> None:
    spec = two_specs()
    before = templates_digest(spec, ["base"])
    assert digest_of(manifest(spec, ask(base=1, elastic=0))) == before
    edited = json.loads(json.dumps(spec))
    edited["replicaSpecs"][0]["template"]["spec"]["containers"][0] |= {"image": "train:2", "env": []}
    edited["replicaSpecs"][1]["template"]["spec"]["nodeSelector"] = {"pool": "b"}
    assert templates_digest(edited, ["base"]) == before
    assert templates_digest(edited, ["elastic"]) != templates_digest(spec, ["elastic"])
    assert templates_digest(edited, ["base", "elastic"]) != before


# -- what the answer says


def test_an_admitted_workload() -> None:
    fact = workload_fact(workload_body(2, pods=3))
    assert fact is not None
    assert (fact.number, fact.counts, fact.queue) == (2, (("workers", 3),), "gpus")
    assert (fact.reserved, fact.admitted, fact.eviction_reason, fact.pending_message) == (True, True, "", "")
    assert (fact.finished, fact.is_active, fact.is_deleting, fact.pods_ready) == (False, True, False, None)


def test_evicted_means_evicted_while_quota_is_held() -> None:
    evicted = condition("Evicted", reason="Preempted", message="Preempted to accommodate a workload")
    fact = workload_fact(workload_body(status={"conditions": admitted(evicted)}))
    assert fact is not None
    assert (fact.eviction_reason, fact.eviction_message, fact.admitted) == (
        "Preempted",
        "Preempted to accommodate a workload",
        True,
    )
    assert fact.evicted_at is not None
    pending = [condition("QuotaReserved", False, message="insufficient quota"), condition("Admitted", False), evicted]
    fact = workload_fact(workload_body(status={"conditions": pending}))
    assert fact is not None
    assert (fact.eviction_reason, fact.evicted_at, fact.pending_message) == ("", None, "insufficient quota")


def test_what_admission_checks_wait_for() -> None:
    checks = [
        {"name": "prov", "state": "Pending", "message": "two nodes to come"},
        {"name": "fine", "state": "Ready", "message": "x"},
        {"name": "mute", "state": "Retry"},
    ]
    conditions = [condition("QuotaReserved"), condition("Admitted", False, message="not all checks ready")]
    fact = workload_fact(workload_body(status={"conditions": conditions, "admissionChecks": checks}))
    assert fact is not None
    assert (fact.reserved, fact.admitted) == (True, False)
    said = "not all checks ready; admission check prov is Pending: two nodes to come; admission check mute is Retry"
    assert fact.pending_message == said


def test_other_marks() -> None:
    conditions = admitted(condition("PodsReady", False), condition("Finished"))
    body = workload_body(
        status={"conditions": conditions}, spec={"active": False}, deletionTimestamp="2026-03-01T12:00:00Z"
    )
    fact = workload_fact(body)
    assert fact is not None
    assert (fact.pods_ready, fact.finished, fact.is_active, fact.is_deleting) == (False, True, False, True)


@pytest.mark.parametrize("share", ["", "-1", "x", "1.5", "9999999", None])
def test_a_workload_of_no_share_is_none_of_ours(share: Any) -> None:
    assert workload_fact(workload_body(labels={"elastipod.io/share": share})) is None
    assert workload_fact(workload_body(labels=None)) is None


GARBAGE = [None, 7, "text", [], [None], ["x"], {"a": 1}, [{"type": 1}], [{"status": "True"}]]


@pytest.mark.parametrize("found", GARBAGE, ids=json.dumps)
def test_garbage_is_nothing(found: Any) -> None:
    status = {"conditions": found, "admissionChecks": found, "admission": found}
    for body in (workload_body(status=status), {**workload_body(), "status": found}):
        fact = workload_fact(body)
        assert fact is not None
        assert (fact.reserved, fact.admitted, fact.eviction_reason, fact.finished) == (False, False, "", False)
    fact = workload_fact({**workload_body(), "spec": found})
    assert fact is not None
    assert fact.counts == ()
    fact = workload_fact(workload_body(spec={"podSets": [{"name": "a", "count": found}], "queueName": None}))
    assert fact is not None
    assert fact.counts == (("a", 7 if found == 7 else 1),)
    late = condition("Evicted") | {"lastTransitionTime": found}
    assert workload_fact(workload_body(status={"conditions": admitted(late)})) is not None
