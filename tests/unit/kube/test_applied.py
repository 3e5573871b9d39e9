"""Templates as they were taken up, and what they say about the workers in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.kube.bodies import job_body

from elastipod_operator.kube import applied
from elastipod_operator.kube.applied import (
    applied_annotation,
    applied_of,
    effective_spec,
    encode_applied,
    last_good_spec,
    pending_edits,
)
from elastipod_operator.kube.observed_job import observe_job

Body = dict[str, Any]
APPLIED = "elastipod.io/applied"


def template(image: str = "train:1", **container: Any) -> Body:
    return {"spec": {"containers": [{"name": "train", "image": image, **container}]}}


def specs(*groups: tuple[str, Body]) -> list[Body]:
    return [{"name": name, "replicas": 1, "maxReplicas": 2, "template": one} for name, one in groups]


def edited(before: Body, after: Body) -> Body:
    """Give a job whose spec was `before` when it was taken up and is `after` now."""
    return job_body(after, annotations={APPLIED: encode_applied(job_body(before)["spec"])})


OLD = {"replicaSpecs": specs(("workers", template())), "nprocPerNode": "1"}


@pytest.mark.parametrize(
    ("after", "pending"),
    [
        pytest.param(OLD, (), id="nothing"),
        pytest.param(
            {**OLD, "replicaSpecs": specs(("workers", template("train:2")))},
            ("spec.replicaSpecs[workers].template",),
            id="an image",
        ),
        pytest.param({**OLD, "nprocPerNode": "2"}, ("spec.nprocPerNode",), id="the number of workers"),
        pytest.param(
            {**OLD, "elasticPolicy": {"minReplicas": 2}, "runPolicy": {"suspend": True}},
            (),
            id="bounds and policies act at once",
        ),
    ],
)
def test_what_waits_for_the_next_start(after: Body, pending: tuple[str, ...]) -> None:
    body = edited(OLD, after)
    assert pending_edits(body) == pending
    assert observe_job(body).pending_edits == pending


def two(*names: str) -> list[Body]:
    return specs(("workers", {"spec": {"containers": [{"name": name} for name in names]}}))


TRAIN = {"replicaSpecs": two("side", "train"), "elastipod": {"container": "train", "parallelism": 1}}


def without(name: str, body: Body) -> Body:
    """Give a job as an operator of the previous version wrote it."""
    kept = applied_of(body)
    assert kept is not None
    packed = applied._packed({key: value for key, value in kept.items() if key != name})
    return job_body(body["spec"], annotations={APPLIED: packed})


@pytest.mark.parametrize(
    "before", [lambda body: body, lambda body: without("container", body)], ids=["new", "previous"]
)
@pytest.mark.parametrize(
    ("after", "pending"),
    [
        pytest.param({**TRAIN, "elastipod": {"container": "side"}}, ("spec.elastipod.container",), id="another one"),
        pytest.param({**TRAIN, "elastipod": {}}, ("spec.elastipod.container",), id="the first one"),
        pytest.param({**TRAIN, "elastipod": None}, ("spec.elastipod.container",), id="no settings"),
        pytest.param(
            {"replicaSpecs": two("side", "trainer"), "elastipod": {"container": "trainer"}},
            ("spec.elastipod.container", "spec.replicaSpecs[workers].template"),
            id="with its name",
        ),
        pytest.param({**TRAIN, "elastipod": {"container": "train", "agentPort": 9000}}, (), id="another field"),
    ],
)
def test_the_agents_container_changes_with_the_templates(
    before: Callable[[Body], Body], after: Body, pending: tuple[str, ...]
) -> None:
    """It is one of a template, and new pods are made from the former one until the job is resumed."""
    body = before(edited(TRAIN, after))
    fact, taken = observe_job(body), effective_spec(body)
    assert fact.policy is not None
    assert (fact.policy.container, fact.pending_edits) == ("train", pending)
    assert taken["elastipod"]["container"] == "train"
    assert taken["elastipod"].get("agentPort") == (after["elastipod"] or {}).get("agentPort"), "that acts at once"
    good = last_good_spec(body)
    assert good is not None
    assert good["elastipod"]["container"] == "train"
    text = applied_annotation(body, adopts_spec=False, room=10_000)
    assert text is not None
    noted = job_body(body["spec"], annotations={APPLIED: text})
    later, good = observe_job(noted), last_good_spec(noted)
    assert (later.policy and later.policy.container, later.pending_edits) == ("train", pending), "and once it is noted"
    assert good is not None
    assert good["elastipod"]["container"] == "train", "also while a later edit is invalid"
    text = applied_annotation(body, adopts_spec=True, room=10_000)
    assert text is not None
    taken_up = observe_job(job_body(body["spec"], annotations={APPLIED: text}))
    assert taken_up.policy is not None
    assert taken_up.policy.container == ((after["elastipod"] or {}).get("container") or "side")
    assert taken_up.pending_edits == ()


def test_pods_are_made_as_the_job_was_taken_up() -> None:
    after = {"replicaSpecs": specs(("workers", template("train:2"))), "nprocPerNode": "2", "replicas": 1}
    made = effective_spec(edited(OLD, after))
    assert made["replicaSpecs"][0]["template"] == template()
    assert (made["nprocPerNode"], made["replicas"]) == ("1", 1), "what acts at once is as it is now"
    assert effective_spec(job_body(after))["replicaSpecs"][0]["template"] == template("train:2")


def test_a_mistake_in_an_edit_that_does_not_act_yet_does_no_harm() -> None:
    two = {"replicaSpecs": specs(("base", template()), ("extra", template()))}
    gpus: dict[str, Any] = {"resources": {"limits": {"nvidia.com/gpu": 8}}}
    after = {"replicaSpecs": specs(("base", template()), ("extra", template(**gpus)))}
    assert observe_job(edited(two, after)).policy is not None
    assert observe_job(job_body(after)).policy is None


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(specs(("others", template())), id="another name"),
        pytest.param(specs(("workers", template()), ("more", template())), id="one more"),
    ],
)
def test_other_groups_of_pods_are_refused(after: list[Body]) -> None:
    fact = observe_job(edited(OLD, {"replicaSpecs": after}))
    assert fact.policy is None
    assert "spec.replicaSpecs were workers when the job began" in fact.spec_error


@pytest.mark.parametrize(
    "text", ["", "nonsense", "{}", encode_applied({})[:-4], encode_applied({"replicaSpecs": [{"name": "a"}]})[2:]]
)
def test_a_damaged_annotation_counts_as_none(text: str) -> None:
    body = job_body(annotations={APPLIED: text})
    assert applied_of(body) is None
    assert effective_spec(body) == body["spec"]


def test_it_is_small_and_always_the_same() -> None:
    large = {"replicaSpecs": specs(("workers", template(env=[{"name": f"N{n}", "value": "v"} for n in range(500)])))}
    assert encode_applied(large) == encode_applied(dict(reversed(large.items())))
    assert len(encode_applied(large)) < 4096


GPU = {"resources": {"limits": {"nvidia.com/gpu": 8}}}


@pytest.mark.parametrize(
    ("first", "second", "nproc", "is_refused"),
    [
        pytest.param(GPU, GPU, "auto", False, id="the same devices"),
        pytest.param(GPU, {"resources": {"limits": {"nvidia.com/gpu": "4"}}}, "auto", True, id="fewer devices"),
        pytest.param(GPU, {"resources": {"limits": {"nvidia.com/gpu": "4"}}}, "4", False, id="a number was given"),
        pytest.param(GPU, {}, "gpu", True, id="no devices"),
        pytest.param({}, {"resources": {"limits": {"nvidia.com/gpu": "0"}}}, "auto", False, id="none, written out"),
        pytest.param({}, {"env": [{"name": "NPROC_PER_NODE", "value": "2"}]}, "1", True, id="a variable of the user"),
        pytest.param({"args": ["hyperpodrun", "--nproc_per_node=2"]}, {}, "4", True, id="a flag"),
        pytest.param(
            {"args": ["hyperpodrun --nproc-per-node 2 x.py"]},
            {"command": ["hyperpodrun", "--nproc-per-node", "2"]},
            "4",
            False,
            id="the same flag",
        ),
        pytest.param({"args": ["--nproc-per-node=$NPROC_PER_NODE"]}, {}, "4", False, id="a flag that says the same"),
    ],
)
def test_two_templates_start_as_many_workers(first: Body, second: Body, nproc: str, is_refused: bool) -> None:
    body = job_body(
        {"replicaSpecs": specs(("base", template(**first)), ("extra", template(**second))), "nprocPerNode": nproc}
    )
    fact = observe_job(body)
    assert (fact.policy is None) is is_refused
    if is_refused:
        assert "different numbers of workers (base: " in fact.spec_error


@pytest.mark.parametrize(("wish", "warned"), [("Never", False), (None, False), ("OnFailure", True), ("Always", True)])
def test_another_restart_policy_is_warned_of(wish: str | None, warned: bool) -> None:
    one = template()
    one["spec"]["restartPolicy"] = wish
    fact = observe_job(job_body({"replicaSpecs": specs(("workers", one))}))
    assert fact.policy is not None
    assert bool(fact.policy.warnings) is warned
    if warned:
        assert f"sets restartPolicy {wish}; pods run with Never" in fact.policy.warnings[0]
