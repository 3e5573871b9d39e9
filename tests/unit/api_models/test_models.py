"""Reading jobs as the API server gives them, and what a user is told when one is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from elastipod_operator.api import (
    CleanPodPolicy,
    HyperPodPyTorchJob,
    Switch,
    explain,
)

POD = {"spec": {"containers": [{"name": "trainer", "image": "train:1"}]}}


def read(**spec: Any) -> HyperPodPyTorchJob:
    spec.setdefault("replicaSpecs", [{"name": "pods", "replicas": 2, "template": POD}])
    return HyperPodPyTorchJob.model_validate({"metadata": {"name": "llm", "namespace": "team"}, "spec": spec})


def refusal(**spec: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        read(**spec)
    return explain(caught.value)


def with_spec(**fields: Any) -> list[dict[str, Any]]:
    return [{"name": "pods", "replicas": 2, "template": POD, **fields}]


def with_rule(**fields: Any) -> dict[str, Any]:
    return {"logMonitoringConfiguration": [{"name": "rule", "logPattern": "loss", **fields}]}


def test_defaults() -> None:
    job = read(elasticPolicy={}, runPolicy={"restartPolicy": {}})
    policy, run = job.spec.elastic_policy, job.spec.run_policy
    assert (job.spec.nproc_per_node, job.spec.replicas, job.spec.replica_specs[0].spares) == ("auto", 0, 0)
    assert policy is not None
    assert (policy.min_replicas, policy.max_replicas, policy.replica_increment_step) == (None, None, None)
    assert policy.replica_discrete_values == ()
    assert policy.scaling_timeout_in_seconds == 60
    assert policy.graceful_shutdown_timeout_in_seconds == 600
    assert policy.faulty_scale_down_timeout_in_seconds == 30
    assert (run.clean_pod_policy, run.suspend, run.job_max_retry_count) == (CleanPodPolicy.ALL, False, None)
    assert run.restart_policy.eval_period_seconds == 3600
    assert run.restart_policy.max_num_repeat_offenders_to_avoid == 0
    assert (job.spec.elastipod.payback, job.spec.elastipod.backoff.max_seconds) == (Switch.AUTO, 600)


def test_null_is_absent() -> None:
    job = read(
        nprocPerNode=None,
        elasticPolicy={"minReplicas": None, "replicaDiscreteValues": None, "scalingTimeoutInSeconds": None},
        runPolicy={"cleanPodPolicy": None, "restartPolicy": None, "logMonitoringConfiguration": None},
        elastipod=None,
        replicaSpecs=with_spec(maxReplicas=None, spares=None),
    )
    assert job == read(elasticPolicy={}, runPolicy={})


def test_unknown_fields_are_ignored() -> None:
    assert read(elasticPolicy={"minReplicas": 2, "later": 1}, later={}) == read(elasticPolicy={"minReplicas": 2})


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(
            {"elasticPolicy": {"minReplicas": 1, "replicaIncrementStep": 1, "replicaDiscreteValues": [2, 4]}},
            id="step and values together",
        ),
        pytest.param(
            {"elasticPolicy": {"minReplicas": 2, "maxReplicas": 4, "replicaDiscreteValues": [1, 4, 8]}},
            id="values on both sides of the range",
        ),
        pytest.param({"elasticPolicy": {"minReplicas": 9}}, id="a minimum above the replicas"),
        pytest.param({"replicaSpecs": with_spec(name="16-nodes")}, id="a name that begins with a digit"),
        pytest.param({"replicaSpecs": with_spec(replicas=0)}, id="no replicas"),
        pytest.param({"runPolicy": {"ttlSecondsAfterFinished": -1}}, id="a negative time to live"),
    ],
)
def test_what_documents_print_is_read(spec: dict[str, Any]) -> None:
    read(**spec)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            {"elasticPolicy": {"minReplicas": 6, "maxReplicas": 4}},
            "spec.elasticPolicy.minReplicas is 6 but maxReplicas is 4; raise maxReplicas or lower minReplicas",
        ),
        (
            {"elasticPolicy": {"maxReplicas": 4, "replicaDiscreteValues": [8]}},
            "spec.elasticPolicy.replicaDiscreteValues holds no size between minReplicas and maxReplicas; "
            "add one, or change minReplicas or maxReplicas",
        ),
        (
            {"elasticPolicy": {"replicaIncrementStep": 0}},
            "spec.elasticPolicy.replicaIncrementStep is 0; it must be at least 1",
        ),
        (
            {"nprocPerNode": "tpu"},
            'spec.nprocPerNode is "tpu"; it must be auto, cpu, gpu or a positive number up to 9999',
        ),
        ({"nprocPerNode": 8}, "spec.nprocPerNode is 8; it must be a string; put it in quotes"),
        ({"replicaSpecs": []}, "spec.replicaSpecs is []; it must have at least 1 entry"),
        ({"replicaSpecs": None}, "spec.replicaSpecs is missing; add it"),
        ({"replicaSpecs": with_spec(replicas=-1)}, "spec.replicaSpecs[0].replicas is -1; it must be at least 0"),
        ({"replicaSpecs": with_spec(template=None)}, "spec.replicaSpecs[0].template is missing; add it"),
        (
            {"replicaSpecs": with_spec(name="A_b")},
            "spec.replicaSpecs[0].name is \"A_b\"; it must be lower-case letters, digits and '-', "
            "and begin and end with a letter or digit",
        ),
        (
            {"replicaSpecs": with_spec() + with_spec()},
            "spec.replicaSpecs has two specs named pods; give each its own name",
        ),
        (
            {"runPolicy": {"cleanPodPolicy": "Some"}},
            "spec.runPolicy.cleanPodPolicy is \"Some\"; it must be 'All', 'Running', 'OnlyComplete' or 'None'",
        ),
        ({"elasticPolicy": []}, "spec.elasticPolicy is []; it must be a mapping"),
        (
            {"elasticPolicy": {"minReplicas": "two"}, "nprocPerNode": "tpu"},
            'spec.nprocPerNode is "tpu"; it must be auto, cpu, gpu or a positive number up to 9999 (and 1 more)',
        ),
    ],
)
def test_explain_names_field_value_and_demand(spec: dict[str, Any], sentence: str) -> None:
    assert refusal(**spec) == sentence


def test_the_documents_own_rule_with_two_groups_is_taken() -> None:
    assert read(runPolicy=with_rule(logPattern=r"'training_loss_step': (\d+(\.\d+)?)"))


def test_a_broken_regex_is_told_with_its_error() -> None:
    assert "it must be a regular expression (" in refusal(runPolicy=with_rule(logPattern="(loss"))
    slow = refusal(runPolicy=with_rule(logPattern="(?i)" + "[Ā-\uffff]" * 800))
    assert "it has 800 sets with ranges of characters" in slow
