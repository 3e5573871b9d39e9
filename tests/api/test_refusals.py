"""Bad input is refused at apply, in one sentence that names the field."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from tests.api.jobs import TEMPLATE, apply, job, refusal

from elastipod_local.cluster import Cluster
from elastipod_operator.core.model_groups import ModelGroups
from elastipod_operator.core.sizes import SizeError, SizeRequest, resolve

AGREEMENT_CASES = 250


def template(**container: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "trainer", "image": "train:1", **container}]}}


@pytest.mark.parametrize(
    ("spec", "field", "sentence"),
    [
        pytest.param(
            {"elasticPolicy": {"minReplicas": 6, "maxReplicas": 4}},
            "spec.elasticPolicy.minReplicas",
            "minReplicas is 6 but maxReplicas is 4; raise maxReplicas or lower minReplicas",
            id="minimum above maximum",
        ),
        pytest.param(
            {
                "elasticPolicy": {"minReplicas": 4, "maxReplicas": 8},
                "replica_specs": [{"name": "pods", "replicas": 2, "maxReplicas": 3}],
            },
            "spec.elasticPolicy",
            "the minimum size is 4 but the maximum is 3",
            id="minimum above what the specs allow",
        ),
        pytest.param(
            {"elasticPolicy": {"minReplicas": 3, "maxReplicas": 5, "replicaDiscreteValues": [2, 8]}},
            "spec.elasticPolicy.replicaDiscreteValues",
            "replicaDiscreteValues holds no size from 3 to 5; add one, or change minReplicas or maxReplicas",
            id="no value in the range",
        ),
        pytest.param(
            {
                "replica_specs": [{"name": "pods", "replicas": 2, "maxReplicas": 16000, "spares": 1000}],
                "elasticPolicy": {},
            },
            "spec.replicaSpecs",
            "replicas and spares of the job add up to 17000; a job has at most 16384 pods",
            id="more pods than a job may have",
        ),
        pytest.param(
            {"elasticPolicy": {"replicaIncrementStep": 0}},
            "spec.elasticPolicy.replicaIncrementStep",
            "should be greater than or equal to 1",
            id="a step of nothing",
        ),
        pytest.param(
            {"elasticPolicy": {"minReplicas": 2, "maxReplicas": 8}, "replicas": 1},
            "spec.replicas",
            "replicas is 1 but the smallest allowed size is 2; set at least that, or 0 for no ceiling",
            id="ceiling below the minimum",
        ),
        pytest.param(
            {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 8, "replicaDiscreteValues": [4, 8]}, "replicas": 3},
            "spec.replicas",
            "replicas is 3 but the smallest allowed size is 4",
            id="ceiling below the smallest value",
        ),
        pytest.param(
            {"replicas": 1},
            "spec.replicas",
            "replicas is 1 but the smallest allowed size is 2",
            id="ceiling below a fixed size",
        ),
        pytest.param(
            {"nprocPerNode": "tpu"},
            "spec.nprocPerNode",
            "nprocPerNode must be auto, cpu, gpu or a positive number up to 9999",
            id="unknown nprocPerNode",
        ),
        pytest.param(
            {"nprocPerNode": 8}, "spec.nprocPerNode", "must be of type string", id="nprocPerNode without quotes"
        ),
        pytest.param(
            {"replica_specs": [{"name": "a"}, {"name": "a"}]},
            "spec.replicaSpecs[1]",
            'Duplicate value: {"name":"a"}',
            id="two specs of one name",
        ),
        pytest.param(
            {"replica_specs": [{"name": name} for name in "abc"]},
            "spec.replicaSpecs",
            "must have at most 2 items",
            id="three specs",
        ),
        pytest.param(
            {"replica_specs": [{"name": "A_b"}]},
            "spec.replicaSpecs[0].name",
            "name must be lower-case letters, digits and '-', and begin and end with a letter or digit",
            id="a name that no pod can have",
        ),
        pytest.param(
            {"runPolicy": {"cleanPodPolicy": "Some"}},
            "spec.runPolicy.cleanPodPolicy",
            'supported values: "All", "Running", "OnlyComplete", "None"',
            id="unknown cleanPodPolicy",
        ),
        pytest.param(
            {"replica_specs": [{"name": "pods", "template": template(imagge="x")}]},
            "spec.replicaSpecs[0].template.spec.containers[0].imagge",
            "unknown field",
            id="a misspelt field of a container",
        ),
        pytest.param(
            {"replica_specs": [{"name": "pods", "template": template(imagePullPolicy="Sometimes")}]},
            "spec.replicaSpecs[0].template.spec.containers[0].imagePullPolicy",
            "Always|IfNotPresent|Never",
            id="a value that no pod takes",
        ),
        pytest.param(
            {"replica_specs": [{"name": "pods", "template": template(resources={"limits": {"cpu": "8 cores"}})}]},
            "spec.replicaSpecs[0].template.spec.containers[0].resources.limits.cpu",
            "should match",
            id="a quantity that is none",
        ),
        pytest.param(
            {"replica_specs": [{"name": "pods", "template": {"spec": {"containers": []}}}]},
            "spec.replicaSpecs[0].template.spec.containers",
            "at least 1 items",
            id="no container",
        ),
        pytest.param(
            {"elasticPolicy": {"minReplica": 1}},
            "spec.elasticPolicy.minReplica",
            "unknown field",
            id="a misspelt field of ours",
        ),
        pytest.param(
            {
                "nprocPerNode": "2",
                "replica_specs": [{"name": "pods", "replicas": 3}],
                "elastipod": {"parallelism": 4},
            },
            "spec.elastipod",
            "whole model groups of 4 ranks (parallelism) with nprocPerNode 2; sizes that fit are multiples of 2",
            id="a fixed size that splits a model group",
        ),
        pytest.param(
            {
                "nprocPerNode": "8",
                "elasticPolicy": {"minReplicas": 1, "maxReplicas": 5, "replicaDiscreteValues": [1, 3, 5]},
                "replica_specs": [{"name": "pods", "replicas": 1}],
                "elastipod": {"parallelism": 16},
            },
            "spec.elastipod",
            "whole model groups of 16 ranks (parallelism) with nprocPerNode 8; sizes that fit are multiples of 2",
            id="values that all split a model group",
        ),
        pytest.param(
            {
                "nprocPerNode": "8",
                "elasticPolicy": {"minReplicas": 5, "maxReplicas": 7},
                "replica_specs": [{"name": "pods", "replicas": 5}],
                "elastipod": {"parallelism": 32},
            },
            "spec.elastipod",
            "whole model groups of 32 ranks (parallelism) with nprocPerNode 8; sizes that fit are multiples of 4",
            id="bounds between two sizes of whole model groups",
        ),
    ],
)
def test_apply_refuses(api_server: Cluster, spec: dict[str, Any], field: str, sentence: str) -> None:
    said = refusal(api_server, "default", job(**spec))
    assert field in said
    assert sentence in said


def test_a_name_too_long_for_a_label(api_server: Cluster, namespace: str) -> None:
    assert "metadata.name is longer than 63 characters" in refusal(api_server, namespace, job("x" * 64))


@pytest.mark.parametrize(
    "specs",
    [
        pytest.param([{"name": "other", "replicas": 2}], id="renamed"),
        pytest.param([{"name": "pods", "replicas": 2}, {"name": "more"}], id="one more"),
    ],
)
def test_specs_cannot_be_renamed_or_added(api_server: Cluster, namespace: str, specs: list[dict[str, Any]]) -> None:
    apply(api_server, namespace, job())
    assert "the number and the names of replicaSpecs cannot change" in refusal(
        api_server, namespace, job(replica_specs=specs)
    )


def test_bounds_can_be_changed(api_server: Cluster, namespace: str) -> None:
    apply(api_server, namespace, job(elasticPolicy={"minReplicas": 1, "maxReplicas": 4}))
    apply(api_server, namespace, job(elasticPolicy={"minReplicas": 2, "maxReplicas": 8}))


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"nprocPerNode": "8", "elastipod": {"parallelism": 16}}, id="two pods hold a group"),
        pytest.param({"nprocPerNode": "8", "elastipod": {"parallelism": 4}}, id="a pod holds two groups"),
        pytest.param(
            {
                "nprocPerNode": "8",
                "elasticPolicy": {"minReplicas": 1, "maxReplicas": 4},
                "elastipod": {"parallelism": 32},
            },
            id="only the maximum is whole",
        ),
        pytest.param(
            {"nprocPerNode": "100", "elastipod": {"parallelism": 300}}, id="more workers than a rule can divide"
        ),
        pytest.param({"elastipod": {"parallelism": 4}}, id="a number of workers that only the operator knows"),
        pytest.param({"nprocPerNode": "8", "elastipod": None}, id="no settings of ours"),
    ],
)
def test_apply_takes_sizes_of_whole_model_groups(api_server: Cluster, namespace: str, spec: dict[str, Any]) -> None:
    assert "created" in apply(api_server, namespace, job(**spec))


def random_spec(rng: random.Random) -> dict[str, Any]:
    """Give a spec with small bounds, each present half of the time, so that about half of the specs are impossible."""

    def maybe(key: str, value: Any) -> dict[str, Any]:
        return {key: value} if rng.random() < 0.5 else {}

    def small() -> int:
        return rng.randint(0, 6)

    specs = [
        {"name": name, "template": TEMPLATE, "replicas": small(), **maybe("maxReplicas", small())}
        for name in rng.choice([["a"], ["a", "b"]])
    ]
    policy = {
        **maybe("minReplicas", small()),
        **maybe("maxReplicas", small()),
        **maybe("replicaIncrementStep", rng.randint(1, 3)),
        **maybe("replicaDiscreteValues", [rng.randint(1, 8) for _ in range(rng.randint(0, 3))]),
    }
    spec = {"replicaSpecs": specs, "replicas": rng.choice([0, 0, 1, 3, 6]), **maybe("elasticPolicy", policy)}
    # A rule cannot count through larger steps, nor find the smallest whole size below a ceiling.
    if rng.random() < 0.5 and policy.get("replicaIncrementStep", 1) == 1:
        groups = {"nprocPerNode": rng.choice("1248"), "elastipod": {"parallelism": rng.choice([2, 3, 4, 8, 12, 16])}}
        return {**spec, **groups, "replicas": 0}
    return spec


def is_possible(spec: dict[str, Any]) -> bool:
    """Tell what the core says about the sizes of a spec."""
    policy = spec.get("elasticPolicy", {})
    try:
        resolve(
            SizeRequest(
                spec_replicas=tuple(one["replicas"] for one in spec["replicaSpecs"]),
                spec_max_replicas=tuple(one.get("maxReplicas") for one in spec["replicaSpecs"]),
                elastic="elasticPolicy" in spec,
                min_replicas=policy.get("minReplicas"),
                max_replicas=policy.get("maxReplicas"),
                step=policy.get("replicaIncrementStep"),
                values=tuple(policy.get("replicaDiscreteValues", ())),
                ceiling=spec["replicas"],
                groups=ModelGroups(spec.get("elastipod", {}).get("parallelism", 1), int(spec.get("nprocPerNode", "1"))),
            )
        )
    except SizeError:
        return False
    return True


def test_rules_and_core_agree_on_what_is_possible(api_server: Cluster, namespace: str, seed: int) -> None:
    rng = random.Random(seed)
    specs = {f"case-{number}": random_spec(rng) for number in range(AGREEMENT_CASES)}
    bodies = [{**job(name), "spec": spec} for name, spec in specs.items()]
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": bodies})
    said = api_server.kubectl("-n", namespace, "create", "--dry-run=server", "-f", "-", input=text, check=False)
    accepted = set(re.findall(r"/(case-\d+) created", said))
    possible = {name for name, spec in specs.items() if is_possible(spec)}
    differing = {name: specs[name] for name in accepted ^ possible}
    assert differing == {}
    assert 0.2 < len(accepted) / len(specs) < 0.8
