"""Objects that no CRD of today lets through: each is told of in one sentence, and none ends anything."""

from __future__ import annotations

import base64
import copy
import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.kube.bodies import JOB_UID, job_body, node_body, pod_body

from elastipod_operator.core.names import ANNOTATION_APPLIED, ANNOTATION_STATE
from elastipod_operator.core.plan import plan
from elastipod_operator.core.snapshot import Snapshot
from elastipod_operator.kube.api import as_yaml
from elastipod_operator.kube.applied import applied_of
from elastipod_operator.kube.changes import metadata_changes, status_change
from elastipod_operator.kube.observed_job import observe_job
from elastipod_operator.kube.store import Store

GOOD = job_body()["spec"]


def template(**container: Any) -> dict[str, Any]:
    return {
        "replicaSpecs": [{"name": "workers", "template": {"spec": {"containers": [{"name": "train", **container}]}}}]
    }


BROKEN = [
    pytest.param("text", "spec is", id="a text"),
    pytest.param(None, "spec is missing", id="nothing"),
    pytest.param([], "spec is []", id="a list"),
    pytest.param({"replicaSpecs": 7}, "spec.replicaSpecs is 7", id="a number of specs"),
    pytest.param({"replicaSpecs": [7]}, "spec.replicaSpecs[0] is 7", id="a number as a spec"),
    pytest.param({"replicaSpecs": [{"name": "w", "template": {"spec": 7}}]}, "cannot be read", id="a number as a pod"),
    pytest.param({"replicaSpecs": [{"name": "w", "template": {"spec": {"containers": "x"}}}]}, "cannot be read", id="no containers"),
    pytest.param(template(env=7), "cannot be read", id="a number as the environment"),
    pytest.param(template(env=[7]), "cannot be read", id="a number as a variable"),
    pytest.param({"replicaSpecs": [{"name": "w", "template": {"metadata": 7, "spec": {"containers": [{"name": "t"}]}}}]},
                 "replicaSpecs[w].template is not a valid pod template", id="a number as metadata"),
    pytest.param({**GOOD, "runPolicy": {"restartPolicy": []}}, "spec.runPolicy.restartPolicy is []", id="a list as a policy"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "words"), BROKEN)
def test_a_spec_that_cannot_be_read_is_told_of(spec: Any, words: str) -> None:
    fact = observe_job({**job_body(), "spec": spec})
    assert fact.policy is None
    assert words in fact.spec_error
    todo = plan(Snapshot(now=fact.created_at, job=fact))
    assert (todo.conditions[-1].type, todo.conditions[-1].reason) == ("Suspended", "InvalidSpec")
    assert todo.conditions[-1].message == fact.spec_error


@pytest.mark.parametrize(
    "status",
    ["x", [], 7, {"conditions": "x"}, {"conditions": [7]}, {"conditions": [{"type": 1, "lastTransitionTime": "x"}]},
     {"elasticScalingStatus": 7}, {"masterPort": 7}],
)  # fmt: skip
def test_a_status_that_cannot_be_read_is_written_anew(status: Any) -> None:
    fact = observe_job({**job_body(), "status": status})
    assert fact.policy is not None
    assert plan(Snapshot(now=fact.created_at, job=fact)).conditions[-1].type == "Created"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def mangled(draw: st.DrawFn) -> Any:
    """A good job in which something is replaced by anything."""
    body = copy.deepcopy(
        job_body(template(command=["x"], env=[{"name": "A", "value": "b"}], ports=[{"containerPort": 1}]))
    )
    place: Any = body
    path: list[Any] = ["spec"] if draw(st.booleans()) else ["status"]
    for _ in range(draw(st.integers(0, 7))):
        inner = place.get(path[-1]) if isinstance(place, dict) else place[path[-1]]
        if not inner or not isinstance(inner, dict | list):
            break
        place = inner
        path.append(draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner)))))
    place[path[-1]] = draw(JSON)
    return body


@given(mangled())
def test_whatever_an_object_holds_it_can_be_decided_on(body: Any) -> None:
    fact = observe_job(body)
    assert (fact.policy is None) is bool(fact.spec_error)
    plan(Snapshot(now=fact.created_at, job=fact))


@pytest.mark.parametrize(("spec", "words"), BROKEN)
def test_the_nodes_of_a_job_that_cannot_be_read_any_more_are_judged_too(spec: Any, words: str) -> None:
    store = Store()
    store.put_job(job_body())
    store.put_pod(pod_body())
    store.put_node(node_body(taints=[{"key": "maintenance", "effect": "NoExecute"}]))
    store.put_job({**job_body(version=11), "spec": spec})
    assert store.nodes_of(store.jobs[JOB_UID])["node-1"].disruption


def within(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"x": [value]}
    return value


def deep_specs(**more: Any) -> list[dict[str, Any]]:
    return [{**GOOD["replicaSpecs"][0], **more}]


@pytest.mark.parametrize("levels", [60, 450, 5000])
@pytest.mark.parametrize(
    ("change", "field"),
    [
        pytest.param(lambda deep: {"unknown": deep}, "spec.unknown", id="an unknown field"),
        pytest.param(
            lambda deep: {"elasticPolicy": {"minReplicas": 1, "unknown": deep}}, "spec.elasticPolicy", id="a policy"
        ),
        pytest.param(lambda deep: {"runPolicy": {"unknown": deep}}, "spec.runPolicy", id="the run policy"),
        pytest.param(lambda deep: {"elastipod": {"unknown": deep}}, "spec.elastipod", id="our part"),
        pytest.param(
            lambda deep: {"replicaSpecs": deep_specs(unknown=deep)},
            "spec.replicaSpecs[workers].unknown",
            id="a replica spec",
        ),
        pytest.param(
            lambda deep: {
                "replicaSpecs": deep_specs(
                    template={"spec": {"containers": [{"name": "train", "image": "i", "unknown": deep}]}}
                )
            },
            "spec.replicaSpecs[workers].template",
            id="a template",
        ),
    ],
)
def test_a_spec_that_is_nested_too_deep_is_refused_and_the_field_named(levels: int, change: Any, field: str) -> None:
    store = Store()
    store.put_job(job_body(change(within(levels))))
    job = store.jobs[JOB_UID]
    assert job.fact.spec_error == f"{field} is nested more than 100 levels deep"
    json.dumps(metadata_changes(job, plan(Snapshot(now=job.fact.created_at, job=job.fact))))


@pytest.mark.parametrize("levels", [60, 450, 5000])
@pytest.mark.parametrize("field", ["elasticScalingStatus", "conditions", "unknown", "replicaStatuses", "managerPods"])
@pytest.mark.parametrize("record", ["", '{"v": 99999}'])
def test_a_status_that_is_nested_too_deep_can_be_written(levels: int, field: str, record: str) -> None:
    store = Store()
    deep = {"conditions": [{"type": within(levels)}], "elasticScalingStatus": {"x": within(levels)}}
    annotations = {ANNOTATION_STATE: record} if record else {}
    store.put_job({**job_body(annotations=annotations), "status": {field: deep.get(field, within(levels))}})
    job = store.jobs[JOB_UID]
    status = status_change(job, plan(Snapshot(now=job.fact.created_at, job=job.fact)))
    as_yaml({"status": status})


@pytest.mark.parametrize("levels", [60, 300, 450])
def test_what_was_kept_of_a_spec_does_not_count_where_it_is_nested_too_deep(levels: int) -> None:
    kept = {"nprocPerNode": None, "templates": {"workers": within(levels)}, "uid": JOB_UID}
    packed = base64.b85encode(zlib.compress(json.dumps(kept).encode())).decode()
    body = job_body(annotations={ANNOTATION_APPLIED: packed})
    assert applied_of(body) is None
    assert observe_job(body).policy is not None
