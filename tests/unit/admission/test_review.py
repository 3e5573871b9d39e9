"""What the webhook says about a job: the operator's own sentences, and hints that are given at no other time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.kube.bodies import CREATED, Body, job_body

from elastipod_operator.admission.review import WARNING_LENGTH, answer, queue_named_in
from elastipod_operator.core.conditions.warning import FOREIGN_RECORD
from elastipod_operator.core.ending import KEPT_TEXT
from elastipod_operator.core.queue_facts import QueueFact
from elastipod_operator.kube.applied import encode_applied
from elastipod_operator.kube.observed_job import observe_job
from elastipod_operator.queueing.workload_control import KUEUE_MISSING

OF_ANOTHER = {
    **{"generation": 1, "from": 0, "to": 2, "kind": "start", "cause": "Started", "uid": "another"},
    **{"at": CREATED, "detected_at": CREATED, "running_at": CREATED},
}
STORAGE = {"volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": "c"}}]}
AGENT = {
    "name": "train",
    "image": "train:1",
    "command": ["hyperpodrun", "--nproc_per_node=8", "train.py"],
    "volumeMounts": [{"name": "shared", "mountPath": "/mnt"}],
}


def template(container: Body | None = None, **pod: Any) -> Body:
    return {"spec": {**STORAGE, "containers": [{**AGENT, **(container or {})}], **pod}}


def good(spec: Body | None = None, **meta: Any) -> Body:
    """Give a job about which there is nothing to say, with changes."""
    specs = [{"name": "workers", "replicas": 2, "maxReplicas": 4, "template": template()}]
    return job_body({"replicaSpecs": specs, **(spec or {})}, **meta)


def of_template(pod_template: Body) -> Body:
    return good({"replicaSpecs": [{"name": "workers", "replicas": 2, "maxReplicas": 4, "template": pod_template}]})


def said(body: Body, *, before: Body | None = None, queue: QueueFact | str | None = None, **request: Any) -> list[str]:
    """Give the warnings about a job that is created, or updated if there is one before."""
    asked = {"uid": "u", "namespace": "team", "operation": "UPDATE" if before else "CREATE", "object": body}
    given = answer(asked | {"oldObject": before} | request, queue)
    assert given["response"]["uid"] == "u"
    assert given["response"]["allowed"] is True
    warnings: list[str] = given["response"]["warnings"]
    return warnings


def test_there_is_nothing_to_say_about_a_good_job() -> None:
    assert said(good()) == []


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        pytest.param(
            good({"elasticPolicy": {"minReplicas": 1, "maxReplicas": 4, "replicaIncrementStep": 2}}),
            "maxReplicas 4 cannot be reached from 1 in steps of 2; the largest size is 3",
            id="a maximum that cannot be reached",
        ),
        pytest.param(good({"runPolicy": {"ttlSecondsAfterFinished": 0}}), KEPT_TEXT, id="ttl 0"),
        pytest.param(good({"replicas": 9}), "above the largest size 4, and has no effect", id="a scale without effect"),
        pytest.param(
            of_template(template({"command": ["python", "train.py"]})),
            "spec.replicaSpecs[workers].template does not start hyperpodrun in container train",
            id="a container without hyperpodrun",
        ),
        pytest.param(
            of_template(template(volumes=[{"name": "shared", "emptyDir": {}}])),
            "spec.replicaSpecs[workers].template mounts nothing in container train that outlives the pod",
            id="no shared storage",
        ),
        pytest.param(
            of_template(template({"volumeMounts": []})),
            "mounts nothing in container train that outlives the pod",
            id="shared storage that the container does not mount",
        ),
        pytest.param(
            good({"elasticPolicy": {"minReplicas": 8, "maxReplicas": 4}}),
            "the job cannot run: spec.elasticPolicy.minReplicas is 8 but maxReplicas is 4",
            id="a spec that an older CRD let through",
        ),
        pytest.param({"spec": "text"}, "the job cannot run: spec is ", id="an object of any shape"),
        pytest.param(
            good(annotations={"elastipod.io/history": json.dumps([OF_ANOTHER])}),
            FOREIGN_RECORD,
            id="a copied manifest",
        ),
    ],
)
def test_warning(body: Body, sentence: str) -> None:
    assert len([one for one in said(body) if sentence in one]) == 1


@pytest.mark.parametrize(
    "container",
    [
        pytest.param({"command": ["bash", "/opt/train.sh"]}, id="a script that may start the agent"),
        pytest.param({"command": ["sh", "-c", "exec hyperpodrun train.py"]}, id="a shell"),
        pytest.param({"command": None, "args": None}, id="the entry point of the image"),
        pytest.param({"volumeMounts": [], "env": [{"name": "CHECKPOINTS", "value": "s3://bucket/llm"}]}, id="a bucket"),
    ],
)
def test_what_may_be_right_is_not_warned_of(container: Body) -> None:
    assert said(of_template(template(container))) == []


def test_each_template_is_judged_by_its_own_container() -> None:
    """Without spec.elastipod.container it is the first one, whatever its name."""
    names = {"base": "train", "extra": "worker"}
    specs = [
        {"name": each, "replicas": 1, "template": template({"name": container})} for each, container in names.items()
    ]
    assert said(good({"replicaSpecs": specs})) == []


def test_a_template_is_judged_by_the_container_in_which_its_pods_run_the_agent() -> None:
    """Without spec.elastipod.container it is that with the name of the first one of the first template."""
    agent = {**AGENT, "name": "train"}
    specs = [
        {"name": "base", "replicas": 1, "template": template(containers=[agent])},
        {"name": "extra", "replicas": 1, "template": template(containers=[{**AGENT, "name": "side", "command": ["ls"]}, agent])},
    ]  # fmt: skip
    body = good({"replicaSpecs": specs})
    policy = observe_job(body).policy
    assert policy is not None
    assert policy.container == "train"
    assert said(body) == []


def test_an_edited_template_is_judged_by_the_container_that_is_edited_with_it() -> None:
    before = good({"elastipod": {"container": "train"}})
    side = {**AGENT, "name": "side", "command": ["ls"]}
    edit = of_template(template(containers=[side, {**AGENT, "name": "other"}]))["spec"]
    edit |= {"elastipod": {"container": "other"}}
    after = good(edit, annotations={"elastipod.io/applied": encode_applied(before["spec"])})
    (sentence,) = said(after, before=before)
    assert "spec.elastipod.container, spec.replicaSpecs[workers].template take effect when" in sentence


def test_the_sentences_are_those_of_the_conditions() -> None:
    body = good({"replicas": 9, "elasticPolicy": {"minReplicas": 1, "maxReplicas": 3, "replicaIncrementStep": 3}})
    job = observe_job(body)
    assert job.policy is not None
    told = said(body)
    assert len(told) == len(job.policy.sizes.warnings) > 0
    assert set(told) == set(job.policy.sizes.warnings)


def test_a_queue_that_does_not_exist() -> None:
    body = good(labels={"kueue.x-k8s.io/queue-name": "fast"})
    (sentence,) = said(body, queue=QueueFact(name="fast", exists=False))
    assert sentence == "LocalQueue fast does not exist in namespace team; create it, or name another in the job's label"
    assert said(body, queue=QueueFact(name="fast")) == []
    assert said(body, queue=KUEUE_MISSING) == [KUEUE_MISSING]


def test_the_queue_is_that_of_the_job_or_of_a_template() -> None:
    labels = {"kueue.x-k8s.io/queue-name": "fast"}
    inside = of_template({**template(), "metadata": {"labels": labels}})
    for body in (good(labels=labels), inside):
        assert queue_named_in({"namespace": "team", "object": body}) == ("team", "fast")
    assert queue_named_in({"namespace": "team", "object": good()}) == ("", "")
    assert queue_named_in({"object": 7}) == ("", "")


@pytest.mark.parametrize("path", ["../../secrets/mine", "a/b", "a?watch=1", "a%2fb", "..", "a\n", "A", "x" * 254])
def test_nobody_makes_the_operator_read_anything_else(path: str) -> None:
    for namespace, name in ((path, "fast"), ("team", path)):
        labels = {"kueue.x-k8s.io/queue-name": name}
        assert queue_named_in({"namespace": namespace, "object": good(labels=labels)}) == ("", "")


def test_a_ceiling_that_is_removed_is_not_a_stop() -> None:
    (sentence,) = said(good({"replicas": 0}), before=good({"replicas": 2}))
    assert "spec.replicas was set from 2 to 0, which means no ceiling: the job may grow to 4 replicas" in sentence
    scale = {"spec": {"replicas": 2}}
    (sentence,) = said({"spec": {"replicas": 0}}, before=scale, subResource="scale")
    assert "to stop it, set spec.runPolicy.suspend to true" in sentence
    assert said({"spec": {"replicas": 3}}, before=scale, subResource="scale") == []
    assert said(good(), before=good()) == []


def test_long_sentences_are_cut() -> None:
    (sentence,) = said({"spec": {"replicaSpecs": "x" * 100_000}})
    assert len(sentence) <= WARNING_LENGTH
