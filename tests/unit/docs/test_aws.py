"""The manifests of Karpenter on the EKS page have the fields of its schemas: no API server here serves their kinds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.nonempty import some
from tests.unit.docs.blocks import manifests
from tests.unit.docs.pages import page

from elastipod_operator.kube.observed_node import DISRUPTION_TAINTS

# The fields that the page uses, as in the CRDs of Karpenter 1.15; a set ends a path, whose values it holds.
TERMS: dict[str, Any] = {"tags": str}
SCHEMAS: dict[str, dict[str, Any]] = {
    "karpenter.sh/v1 NodePool": {
        "template": {
            "metadata": {"labels": str},
            "spec": {
                "nodeClassRef": {"group": {"karpenter.k8s.aws"}, "kind": {"EC2NodeClass"}, "name": {"training"}},
                "requirements": {"key": str, "operator": {"In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"}, "values": str},
                "taints": {"key": str, "effect": {"NoSchedule", "PreferNoSchedule", "NoExecute"}},
            },
        },
        "disruption": {"consolidationPolicy": {"WhenEmpty", "WhenEmptyOrUnderutilized"}, "consolidateAfter": str},
        "limits": str,
    },
    "karpenter.k8s.aws/v1 EC2NodeClass": {
        "role": str,
        "amiSelectorTerms": {"alias": str},
        "subnetSelectorTerms": TERMS,
        "securityGroupSelectorTerms": TERMS,
    },
}  # fmt: skip
REQUIRED = {
    "NodePool": {"template"},
    "EC2NodeClass": {"amiSelectorTerms", "subnetSelectorTerms", "securityGroupSelectorTerms"},
}
PAGE = page("docs/aws.md")
KARPENTER = [body for body in manifests(PAGE) if "karpenter" in body["apiVersion"]]


def wrong(value: Any, schema: Any, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for one in value:
            yield from wrong(one, schema, path)
    elif isinstance(value, dict):
        for name, below in value.items():
            if isinstance(schema, dict) and name not in schema:
                yield f"{path}.{name}"
            elif schema is not str:
                yield from wrong(below, schema[name], f"{path}.{name}")
    elif isinstance(schema, set) and value not in schema:
        yield f"{path}: {value}"


@pytest.mark.parametrize("body", some(KARPENTER), ids=lambda body: str(body["metadata"]["name"]))
def test_the_fields_are_karpenters(body: dict[str, Any]) -> None:
    assert list(wrong(body["spec"], SCHEMAS[f"{body['apiVersion']} {body['kind']}"], "spec")) == []
    assert REQUIRED[body["kind"]] <= body["spec"].keys()


def test_a_wrong_field_is_found() -> None:
    schema = SCHEMAS["karpenter.sh/v1 NodePool"]
    body = {"disruption": {"consolidationPolicy": "Never", "after": "1m"}}
    assert list(wrong(body, schema, "spec")) == ["spec.disruption.consolidationPolicy: Never", "spec.disruption.after"]


def test_pods_of_the_job_find_nodes_of_the_pools() -> None:
    pools = {body["spec"]["template"]["metadata"]["labels"]["pool"] for body in KARPENTER if body["kind"] == "NodePool"}
    (job,) = [body for body in manifests(PAGE) if body["kind"] == "HyperPodPyTorchJob"]
    wanted = {spec["template"]["spec"]["nodeSelector"]["pool"] for spec in job["spec"]["replicaSpecs"]}
    assert wanted == pools == {"on-demand", "spot"}


def test_the_taint_of_a_notice_is_one_that_the_operator_knows() -> None:
    assert "`karpenter.sh/disrupted`" in PAGE.text
    assert "karpenter.sh/disrupted" in DISRUPTION_TAINTS
