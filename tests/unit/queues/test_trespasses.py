"""What must not be written by the wrong side, each planted into objects that nobody trespassed on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.api.etcd_history import Change
from tests.api.neighbours import BATCH_JOB, trespasses
from tests.api.quota_checker import JOB, POD, WORKLOAD

Body = dict[str, Any]
OWNER = {"ownerReferences": [{"kind": JOB, "name": "llm", "uid": "1", "controller": True}]}


def body(name: str, *managers: tuple[str, str], **meta: Any) -> Body:
    fields = [{"manager": manager, **({"subresource": part} if part else {})} for manager, part in managers]
    return {"metadata": {"name": name, "uid": f"uid of {name}", "managedFields": fields, **meta}, "spec": {}}


OUR_POD = (POD, body("llm-0", ("elastipod-operator", ""), ("kube-scheduler", ""), **OWNER))
OUR_WORKLOAD = (WORKLOAD, body("llm-base", ("elastipod-operator", ""), ("kueue-admission", "status"), **OWNER))
OUR_JOB = (JOB, body("llm", ("elastipod-operator", ""), finalizers=["elastipod.io/finalizer"]))
THEIR_POD = (POD, body("batch-0", ("kube-controller-manager", ""), ("kueue", "")))
THEIR_WORKLOAD = (WORKLOAD, body("job-batch", ("kueue", ""), finalizers=["kueue.x-k8s.io/resource-in-use"]))
THEIR_JOB = (BATCH_JOB, body("batch", ("kubectl-client-side-apply", ""), ("kueue", "")))
ALL = (OUR_POD, OUR_WORKLOAD, OUR_JOB, THEIR_POD, THEIR_WORKLOAD, THEIR_JOB)


def changes(*objects: tuple[str, Body], type: str = "MODIFIED") -> list[Change]:
    return [Change(number, 0.0, kind, type, one) for number, (kind, one) in enumerate(objects)]


def with_writer(thing: tuple[str, Body], manager: str, part: str = "") -> tuple[str, Body]:
    return with_meta(thing, managedFields=[{"manager": manager, "subresource": part}])


def with_meta(thing: tuple[str, Body], **meta: Any) -> tuple[str, Body]:
    kind, one = copy.deepcopy(thing)
    one["metadata"].update(meta)
    return kind, one


def gated(thing: tuple[str, Body]) -> tuple[str, Body]:
    kind, one = copy.deepcopy(thing)
    one["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    return kind, one


def test_side_by_side() -> None:
    assert trespasses(changes(*ALL), set()) == set()


@pytest.mark.parametrize(
    ("planted", "told"),
    [
        (with_writer(OUR_POD, "kueue"), "Pod llm-0: kueue wrote to it"),
        (with_writer(OUR_POD, "somebody"), "Pod llm-0: somebody wrote to it"),
        (gated(OUR_POD), "Pod llm-0: Kueue holds it by kueue.x-k8s.io/admission"),
        (
            with_meta(OUR_POD, finalizers=["kueue.x-k8s.io/managed"]),
            "Pod llm-0: Kueue holds it by kueue.x-k8s.io/managed",
        ),
        (with_meta(OUR_POD, deletionTimestamp="now"), "Pod llm-0: it was deleted, and not by the operator"),
        (with_writer(OUR_WORKLOAD, "kueue"), "Workload llm-base: kueue wrote to its body"),
        (
            with_meta(OUR_WORKLOAD, finalizers=["kueue.x-k8s.io/resource-in-use"]),
            "Workload llm-base: Kueue holds it by kueue.x-k8s.io/resource-in-use",
        ),
        (with_writer(OUR_JOB, "kueue", "status"), "HyperPodPyTorchJob llm: kueue wrote to its status"),
        (with_writer(THEIR_POD, "elastipod-operator"), "Pod batch-0: elastipod-operator wrote to it"),
        (
            with_writer(THEIR_WORKLOAD, "elastipod-operator-PodsReady", "status"),
            "Workload job-batch: elastipod-operator-PodsReady wrote to it",
        ),
        (with_meta(THEIR_JOB, annotations={"elastipod.io/state": ""}), "Job batch: it bears elastipod.io/state"),
        (with_meta(THEIR_JOB, finalizers=["elastipod.io/finalizer"]), "Job batch: it bears elastipod.io/finalizer"),
    ],
)
def test_planted(planted: tuple[str, Body], told: str) -> None:
    assert trespasses(changes(*ALL, planted), set()) == {told}


def test_who_deleted_what() -> None:
    gone = changes(OUR_POD, OUR_WORKLOAD, THEIR_POD, type="DELETED")
    assert trespasses(gone, {"uid of llm-0", "uid of llm-base"}) == set()
    assert trespasses(gone, {"uid of llm-0", "uid of batch-0"}) == {
        "Workload llm-base: it was deleted, and not by the operator",
        "Pod batch-0: the operator deleted it",
    }
