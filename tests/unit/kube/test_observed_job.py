"""A job as the operator reads it from the API server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.unit.core.builders import seconds
from tests.unit.kube.bodies import CREATED, job_body

from elastipod_operator.core.names import FINALIZER, PodId
from elastipod_operator.core.record import Record
from elastipod_operator.core.record_codec import encode
from elastipod_operator.kube.observed_job import observe_job


def test_a_job_is_read_with_all_that_the_core_needs() -> None:
    record = Record(generation=3, members=(PodId("workers", 0, 0),))
    body = job_body(
        annotations={"elastipod.io/state": encode(record), "elastipod.io/drain-on-delete": "true"}, finalizers=[FINALIZER],
        deletionTimestamp="2026-03-01T12:10:00Z",
    )  # fmt: skip
    body["status"] = {"conditions": [
        {"type": "Running", "status": "True", "reason": "Training", "message": "m", "lastTransitionTime": CREATED}
    ], "elasticScalingStatus": {"podsScaled": True}}  # fmt: skip
    fact = observe_job(body)
    assert fact.scaling == {"podsScaled": True}
    assert (fact.namespace, fact.name, fact.record, fact.spec_error) == ("team", "job", record, "")
    assert (fact.has_finalizer, fact.drain_on_delete) == (True, True)
    assert fact.deleting_since == datetime(2026, 3, 1, 12, 10, tzinfo=UTC)
    assert [(c.type, c.status, c.reason, c.message) for c in fact.conditions] == [("Running", True, "Training", "m")]


@pytest.mark.parametrize("text", ["", "{", '{"v":0}', "7", "z:nonsense"])
def test_a_damaged_record_counts_as_lost(text: str) -> None:
    fact = observe_job(job_body(annotations={"elastipod.io/state": text}))
    assert (fact.record, fact.unmanaged) == (None, "")


def test_a_record_of_a_later_version_is_none_of_ours() -> None:
    fact = observe_job(job_body(annotations={"elastipod.io/state": '{"v":99}'}))
    assert fact.record is None
    assert "version 99" in fact.unmanaged


def test_the_history_tells_of_the_newest_generation() -> None:
    entry = (
        '{"generation":%d,"from":0,"to":2,"kind":"start","cause":"C","at":"2026-03-01T12:00:00Z",'
        '"detected_at":"2026-03-01T12:00:00Z","running_at":null}'
    )
    text = f"[{entry % 3},{entry % 12}]"
    assert observe_job(job_body(annotations={"elastipod.io/history": text})).history_generation == 12
    assert observe_job(job_body(annotations={"elastipod.io/history": "nonsense"})).history_generation == 0


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        pytest.param({"elasticPolicy": {"minReplicas": 6, "maxReplicas": 4}}, "minReplicas", id="bounds that cross"),
        pytest.param({"replicas": 1, "elasticPolicy": {"minReplicas": 2}}, "spec.replicas is 1", id="a ceiling below the minimum"),
        pytest.param({"elasticPolicy": {"minReplicas": 0, "maxReplicas": 0}, "replicaSpecs": [
            {"name": "workers", "maxReplicas": 0, "template": {}}]}, "maximum is 0", id="a maximum of nothing"),
        pytest.param({"nprocPerNode": "many"}, "nprocPerNode", id="workers that cannot be counted"),
        pytest.param({"replicaSpecs": []}, "replicaSpecs", id="no pods at all"),
    ],
)  # fmt: skip
def test_a_job_that_cannot_be_used_says_why_and_never_raises(spec: dict[str, Any], words: str) -> None:
    fact = observe_job(job_body(spec))
    assert fact.policy is None
    assert words in fact.spec_error


def test_the_defaults_are_filled_in() -> None:
    policy = observe_job(job_body()).policy
    assert policy is not None
    assert (policy.scaling_timeout, policy.graceful_timeout, policy.faulty_timeout) == (
        seconds(60),
        seconds(600),
        seconds(30),
    )
    assert (policy.max_retries, policy.ttl, policy.active_deadline, policy.suspend) == (None, None, None, False)
    assert (policy.agent_port, policy.container, policy.min_stable) == (8080, "train", seconds(30))


@pytest.mark.parametrize("ttl", [None, 0, -1])
def test_no_time_to_live_means_never(ttl: int | None) -> None:
    policy = observe_job(job_body({"runPolicy": {"ttlSecondsAfterFinished": ttl}})).policy
    assert policy is not None
    assert policy.ttl is None


@pytest.mark.parametrize(
    ("specs", "elastic", "limits"),
    [
        pytest.param([{"name": "a", "replicas": 2, "maxReplicas": 4}], {}, [4], id="one spec with its own maximum"),
        pytest.param([{"name": "a", "replicas": 2}], {"maxReplicas": 6}, [6], id="one spec under the policy's maximum"),
        pytest.param([{"name": "a", "replicas": 2}, {"name": "b", "maxReplicas": 3}], {}, [2, 3], id="base and extra"),
        pytest.param([{"name": "a", "replicas": 2}, {"name": "b"}], {"maxReplicas": 6}, [2, 4], id="what is left goes to the last"),
        pytest.param([{"name": "a"}], {}, [1], id="at least one"),
    ],
)  # fmt: skip
def test_how_many_pods_each_spec_may_hold(
    specs: list[dict[str, Any]], elastic: dict[str, Any], limits: list[int]
) -> None:
    spec = {"replicaSpecs": [{**s, "template": {}} for s in specs], "elasticPolicy": elastic}
    policy = observe_job(job_body(spec)).policy
    assert policy is not None
    assert [shape.limit for shape in policy.specs] == limits


@pytest.mark.parametrize(
    ("containers", "ours", "port"),
    [
        pytest.param([{"name": "x"}], {}, 8080, id="8080 when nothing is said"),
        pytest.param([{"name": "x"}], {"agentPort": 9000}, 9000, id="the job's own setting"),
        pytest.param([{"name": "x", "ports": [{"name": "agent", "containerPort": 7000}]}], {"agentPort": 9000}, 7000,
                     id="a port named agent wins"),
        pytest.param([{"name": "x", "ports": [{"containerPort": 7000}]}], {}, 8080, id="a nameless port says nothing"),
        pytest.param([{"name": "x"}, {"name": "otel", "ports": [{"name": "agent", "containerPort": 4317}]}], {}, 8080,
                     id="a sidecar's port says nothing"),
        pytest.param([{"name": "otel", "ports": [{"name": "agent", "containerPort": 4317}]},
                      {"name": "x", "ports": [{"name": "agent", "containerPort": 7000}]}], {"container": "x"}, 7000,
                     id="the container that the job names"),
        *(pytest.param([{"name": "x", "ports": [{"name": "agent", "containerPort": n}]}], {}, port, id=f"number {n}")
          for n, port in [(0, 8080), (1, 1), (65535, 65535), (65536, 8080)]),
    ],
)  # fmt: skip
def test_the_port_of_the_agent(containers: list[dict[str, Any]], ours: dict[str, Any], port: int) -> None:
    spec = {
        "replicaSpecs": [{"name": "w", "replicas": 1, "template": {"spec": {"containers": containers}}}],
        "elastipod": ours,
    }
    policy = observe_job(job_body(spec)).policy
    assert policy is not None
    assert policy.agent_port == port


@pytest.mark.parametrize(("port", "is_warned"), [(None, False), (7000, False), (9000, True)])
def test_a_port_named_agent_that_only_a_later_template_has_is_told(port: int | None, is_warned: bool) -> None:
    ports = [[{"name": "agent", "containerPort": number}] if number else [] for number in (7000, port)]
    templates = [{"spec": {"containers": [{"name": "train", "ports": listed}]}} for listed in ports]
    named = [{"name": f"s{n}", "replicas": 1, "template": template} for n, template in enumerate(templates)]
    policy = observe_job(job_body({"replicaSpecs": named})).policy
    assert policy is not None
    assert policy.warnings == (
        (
            "spec.replicaSpecs[s1].template has the container port agent 9000, which has no effect: agents of all templates use "
            "port 7000, which the first template or spec.elastipod.agentPort sets",
        )
        if is_warned
        else ()
    )


@pytest.mark.parametrize(
    ("elastic", "ours", "seconds"),
    [
        pytest.param(None, {}, 600, id="ten minutes where nothing is said"),
        pytest.param(None, {"gracefulShutdownTimeoutInSeconds": 40}, 40, id="a job of one size"),
        pytest.param({"gracefulShutdownTimeoutInSeconds": 50}, {}, 50, id="the elastic policy's own"),
        pytest.param({"gracefulShutdownTimeoutInSeconds": 50}, {"gracefulShutdownTimeoutInSeconds": 40}, 40, id="ours counts before it"),
        pytest.param({"gracefulShutdownTimeoutInSeconds": 50}, {"gracefulShutdownTimeoutInSeconds": None}, 50, id="null is absent"),
        pytest.param(None, {"gracefulShutdownTimeoutInSeconds": 0}, 0, id="none at all"),
    ],
)  # fmt: skip
def test_the_time_of_a_drain(elastic: dict[str, Any] | None, ours: dict[str, Any], seconds: int) -> None:
    policy = observe_job(job_body({"elasticPolicy": elastic, "elastipod": ours})).policy
    assert policy is not None
    assert policy.graceful_timeout == timedelta(seconds=seconds)
