"""What a job brings along is bounded: it is refused in a sentence, and not kept."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from tests.nonempty import every
from tests.unit.core.test_bounds import MIB, kept_bytes
from tests.unit.kube.bodies import JOB_UID, job_body

from elastipod_operator.core.names import ANNOTATION_STATE
from elastipod_operator.core.record import Record
from elastipod_operator.core.record_codec import encode
from elastipod_operator.kube import applied
from elastipod_operator.kube.applied import applied_of, encode_applied
from elastipod_operator.kube.limits import (
    MAX_ANNOTATION_BYTES,
    MAX_LOG_RULE_BYTES,
    MAX_TEMPLATE_BYTES,
    limit_violation,
    without_unused_parts,
)
from elastipod_operator.kube.observed_job import observe_job
from elastipod_operator.kube.store import Store


def noise(length: int, seed: int = 0) -> str:
    """Text that does not pack well."""
    return Random(seed).randbytes(length // 2).hex()


def with_script(text: str, **meta: Any) -> dict[str, Any]:
    """Give a job whose containers have a script in their command."""
    template = {"spec": {"containers": [{"name": "train", "image": "train", "command": ["sh", "-c", text]}]}}
    return job_body({"replicaSpecs": [{"name": "workers", "replicas": 2, "template": template}]}, **meta)


@pytest.mark.parametrize(
    ("body", "field", "figure"),
    [
        pytest.param(
            with_script("x" * MAX_TEMPLATE_BYTES), "spec.replicaSpecs[].template", MAX_TEMPLATE_BYTES, id="templates"
        ),
        pytest.param(
            job_body(
                {"runPolicy": {"logMonitoringConfiguration": [
                    {"name": f"rule-{n}", "logPattern": "x" * 4000} for n in range(20)
                ]}}
            ),
            "spec.runPolicy.logMonitoringConfiguration", MAX_LOG_RULE_BYTES, id="log rules",
        ),
        pytest.param(
            with_script(noise(100_000), annotations={"kubectl.kubernetes.io/last-applied-configuration": noise(160_000)}),
            "metadata.annotations", MAX_ANNOTATION_BYTES, id="annotations with what is kept of the templates",
        ),
        pytest.param(
            job_body(annotations={"notes": noise(220_000)}), "metadata.annotations", MAX_ANNOTATION_BYTES, id="annotations alone"
        ),
    ],
)  # fmt: skip
def test_what_is_too_large_is_refused_and_named(body: dict[str, Any], field: str, figure: int) -> None:
    fact = observe_job(body)
    assert fact.policy is None
    assert field in fact.spec_error
    assert str(figure) in fact.spec_error


def test_a_large_manifest_that_fits_is_accepted() -> None:
    script = "\n".join(f"export SETTING_{n}={n * 7919 % 1000003:x}" for n in range(2500))
    body = with_script(script)
    body["metadata"]["annotations"] = {"kubectl.kubernetes.io/last-applied-configuration": json.dumps(body["spec"])}
    assert len(script) > 50_000
    assert observe_job(body).spec_error == ""
    assert applied_of({"metadata": {"annotations": {"elastipod.io/applied": encode_applied(body["spec"])}}}) is not None


def test_annotations_that_grow_under_a_running_job_do_not_end_its_care() -> None:
    body = job_body(annotations={"notes": noise(200_000), ANNOTATION_STATE: encode(Record(generation=3))})
    assert limit_violation(body) == ""


def test_of_a_job_that_is_refused_for_its_size_the_templates_are_not_kept() -> None:
    store = Store()

    def take() -> object:
        bodies = (with_script(noise(1_000_000, n), uid=f"uid-{n}", name=f"job-{n}") for n in range(20))
        return [store.put_job(body) for body in bodies]

    assert kept_bytes(take) < MIB
    assert every("at most" in job.fact.spec_error for job in store.jobs.values())


def test_who_wrote_which_field_is_not_kept_and_what_is_needed_is() -> None:
    store = Store()
    body = job_body(managedFields=[{"manager": "kubectl"}])
    store.put_job(body)
    kept = store.jobs[JOB_UID].body
    assert "managedFields" not in kept["metadata"]
    assert kept["spec"] == body["spec"]
    assert "managedFields" in body["metadata"], "the watch's own object is left alone"


@pytest.mark.parametrize("spec", [None, 7, {}, {"replicaSpecs": 7}, {"replicaSpecs": [7, None, {"template": "x"}]}])
def test_an_odd_object_is_made_slim_too(spec: object) -> None:
    assert without_unused_parts({"metadata": {"uid": "u"}, "spec": spec}) == {"metadata": {"uid": "u"}, "spec": spec}


def test_templates_that_were_read_are_kept_up_to_a_size() -> None:
    texts = [encode_applied(with_script(f"echo {n}\n" * 12_000)["spec"]) for n in range(100, 160)]

    def read() -> None:
        for text in texts:
            assert applied_of({"metadata": {"annotations": {"elastipod.io/applied": text}}})

    assert kept_bytes(read) < 3 * applied.APPLIED_KEPT
