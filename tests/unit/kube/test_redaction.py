"""Values of variables are not kept in annotations, and pods are created with the right ones all the same."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import pytest
from tests.unit.kube.bodies import job_body

from elastipod_operator.core.names import ANNOTATION_APPLIED, LABEL_SPEC
from elastipod_operator.kube.applied import effective_spec, encode_applied, last_good_spec, needs_pods, pending_edits
from elastipod_operator.kube.redaction import redacted, restored, values_of

Body = dict[str, Any]
SECRET = "hunter2"
REFERENCE = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}


def template(**env: str) -> Body:
    entries = [{"name": name, "value": value} for name, value in env.items()]
    first = {"name": "fetch", "env": [{"name": "URL", "value": f"https://u:{SECRET}@host"}]}
    return {"spec": {"initContainers": [first], "containers": [{"name": "train", "env": [*entries, REFERENCE]}]}}


def specs(one: Body) -> Body:
    return {"replicaSpecs": [{"name": "workers", "replicas": 1, "template": one}]}


def job(taken_up: Body, now: Body) -> Body:
    annotations = {ANNOTATION_APPLIED: encode_applied(job_body(specs(taken_up))["spec"])}
    return job_body(specs(now), annotations=annotations)


def env_of(spec: Body) -> dict[str, str | None]:
    return {e["name"]: e.get("value") for e in spec["replicaSpecs"][0]["template"]["spec"]["containers"][0]["env"]}


def pod(one: Body, spec: str = "workers") -> Body:
    return {"metadata": {"labels": {LABEL_SPEC: spec}}, "spec": one["spec"]}


def test_no_value_is_in_the_annotation() -> None:
    packed = encode_applied(job_body(specs(template(PASSWORD=SECRET, EMPTY="")))["spec"])
    kept = zlib.decompress(base64.b85decode(packed)).decode()
    assert SECRET not in kept
    assert json.dumps(REFERENCE, separators=(",", ":"), sort_keys=True) in kept, "references say nothing"


def test_values_that_were_not_edited_come_from_the_spec() -> None:
    body = job(template(PASSWORD=SECRET, LR="1"), template(PASSWORD=SECRET, LR="1"))
    assert effective_spec(body)["replicaSpecs"][0]["template"] == template(PASSWORD=SECRET, LR="1")
    assert not needs_pods(body)
    assert pending_edits(body) == ()


def test_an_edited_value_comes_from_a_pod_that_still_has_it() -> None:
    body = job(template(PASSWORD="old", LR="1"), template(PASSWORD="new", LR="1"))
    assert pending_edits(body) == ("spec.replicaSpecs[workers].template",)
    assert needs_pods(body)
    others = [
        pod(template(PASSWORD="of another spec"), "others"),
        pod(template(PASSWORD="newer")),
        pod(template(PASSWORD="old")),
    ]
    assert env_of(effective_spec(body, others)) == {"PASSWORD": "old", "LR": "1", "TOKEN": None}


def test_without_such_a_pod_variables_are_as_they_are_now() -> None:
    body = job(template(PASSWORD="old", GONE="x"), template(PASSWORD="new"))
    assert env_of(effective_spec(body)) == {"PASSWORD": "new", "TOKEN": None}
    assert env_of(effective_spec(body, [pod(template(PASSWORD="newer"))]))["PASSWORD"] == "new"


def test_an_edit_that_cannot_be_used_leaves_the_values() -> None:
    taken_up = specs(template(PASSWORD=SECRET))
    annotations = {ANNOTATION_APPLIED: encode_applied(job_body(taken_up)["spec"])}
    body = job_body({**taken_up, "elasticPolicy": {"minReplicas": 9, "maxReplicas": 2}}, annotations=annotations)
    good = last_good_spec(body)
    assert good is not None
    assert env_of(good)["PASSWORD"] == SECRET


def test_an_annotation_from_before_values_were_left_out_is_read_as_it_is() -> None:
    spec = job_body(specs(template(PASSWORD="old")))["spec"]
    former = {"nprocPerNode": spec.get("nprocPerNode"), "templates": {"workers": template(PASSWORD="old")}}
    packed = base64.b85encode(zlib.compress(json.dumps(former).encode())).decode()
    body = job_body(specs(template(PASSWORD="old")), annotations={ANNOTATION_APPLIED: packed})
    assert pending_edits(body) == ()
    edited = job_body(specs(template(PASSWORD="new")), annotations={ANNOTATION_APPLIED: packed})
    assert env_of(effective_spec(edited))["PASSWORD"] == "old"
    assert not needs_pods(edited)


@pytest.mark.parametrize(
    "odd",
    [
        None, 7, [], {}, {"spec": None}, {"spec": {"containers": 7}}, {"spec": {"containers": [None, {"env": 7}]}},
        {"spec": {"containers": [{"name": 3, "env": [None, {"name": None, "value": 5}, {"name": [], "value": "x"}]}]}},
        {"spec": {"containers": [{"env": [{"name": "A", "value": "\ud800"}]}]}},
    ],
)  # fmt: skip
def test_a_template_of_any_shape_comes_back(odd: Any) -> None:
    assert restored(redacted(odd), values_of([odd])) == odd
