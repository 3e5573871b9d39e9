"""An edit that cannot be used: the last good spec stays in force, also for the next operator."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.unit.kube.bodies import JOB_UID, job_body

from elastipod_operator.core.names import ANNOTATION_STATE, PodId
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Record
from elastipod_operator.core.record_codec import encode
from elastipod_operator.core.snapshot import Snapshot
from elastipod_operator.kube.applied import applied_of
from elastipod_operator.kube.changes import metadata_changes
from elastipod_operator.kube.limits import MAX_ANNOTATION_BYTES
from elastipod_operator.kube.store import Job, Store

Body = dict[str, Any]
BOUNDS = {"minReplicas": 1, "maxReplicas": 3}
RULE = {"name": "r", "logPattern": "a{99999999999}"}


def template(**pod: Any) -> Body:
    return {"spec": {"containers": [{"name": "train", "image": "train:1"}], **pod}}


def specs(name: str = "workers", **changes: Any) -> list[Body]:
    return [{"name": name, "replicas": 2, "maxReplicas": 4, "template": template(), **changes}]


NONSENSE = [
    pytest.param({"elasticPolicy": {"minReplicas": 9, "maxReplicas": 2}}, "minReplicas", id="bounds"),
    pytest.param({"runPolicy": {"logMonitoringConfiguration": [RULE]}}, "logPattern", id="a log rule"),
    pytest.param({"replicaSpecs": specs("others")}, "spec.replicaSpecs were workers", id="other names of specs"),
    pytest.param({"replicaSpecs": []}, "spec.replicaSpecs", id="no specs"),
    pytest.param(
        {"replicaSpecs": specs(template={**template(), "metadata": 7})},
        "spec.replicaSpecs[workers].template",
        id="a template",
    ),
    pytest.param({"nprocPerNode": "many"}, "spec.nprocPerNode", id="a worker count"),
]


def written(store: Store, body: Body) -> Body:
    """Have a job decided about; gives it as it is written."""
    store.put_job(body)
    job = store.jobs[JOB_UID]
    made = metadata_changes(job, decided(job))
    body = copy.deepcopy(body)
    body["metadata"] |= {
        **made, "annotations": {**body["metadata"].get("annotations", {}), **made.get("annotations", {})},
        "resourceVersion": str(int(body["metadata"]["resourceVersion"]) + 1),
    }  # fmt: skip
    return body


def decided(job: Job) -> Any:
    return plan(Snapshot(now=job.fact.created_at, job=job.fact))


def trained(spec: Body | None = None) -> Body:
    """Give a job that trains, as an operator has written it."""
    first = written(Store(), job_body({"elasticPolicy": BOUNDS, **(spec or {})}))
    record = Record(generation=1, members=(PodId("workers", 0, 0),), owner=JOB_UID)
    first["metadata"]["annotations"][ANNOTATION_STATE] = encode(record)
    return first


def edited(body: Body, edit: Body) -> Job:
    """Give the job after an edit, as an operator sees it that begins with it."""
    store = Store()
    store.put_job({**body, "spec": {**body["spec"], **edit}})
    return store.jobs[JOB_UID]


@pytest.mark.parametrize(("edit", "field"), NONSENSE)
def test_the_last_good_spec_stays_in_force_and_the_field_is_named(edit: Body, field: str) -> None:
    job = edited(trained(), edit)
    assert job.fact.policy is not None
    assert (job.fact.policy.sizes.minimum, job.fact.policy.sizes.maximum) == (1, 3)
    assert job.body["spec"]["replicaSpecs"] == specs()
    warning = next(c for c in decided(job).conditions if c.type == "Warning")
    assert warning.reason == "InvalidSpec"
    assert field in warning.message
    assert "the last valid spec stays in force" in warning.message
    assert [note.reason for note in decided(job).events].count("InvalidSpec") == 1


def test_what_was_good_last_follows_every_good_edit() -> None:
    body = trained()
    body["spec"]["elasticPolicy"] = {"minReplicas": 2, "maxReplicas": 4}
    body = written(Store(), body)
    job = edited(body, {"elasticPolicy": {"minReplicas": 9, "maxReplicas": 2}})
    assert job.fact.policy is not None
    assert (job.fact.policy.sizes.minimum, job.fact.policy.sizes.maximum) == (2, 4)
    assert "elastipod.io/applied" not in metadata_changes(job, decided(job)).get("annotations", {}), (
        "nothing new was good"
    )


def test_a_good_edit_ends_it() -> None:
    body = trained()
    assert edited(body, {"nprocPerNode": "many"}).fact.edit_error
    assert not edited(body, {"elasticPolicy": {"minReplicas": 2}}).fact.edit_error


def test_a_job_that_was_never_good_says_so() -> None:
    job = edited(written(Store(), job_body({"nprocPerNode": "many"})), {})
    assert job.fact.policy is None
    assert (decided(job).conditions[-1].type, decided(job).conditions[-1].reason) == ("Suspended", "InvalidSpec")


def test_a_wish_to_suspend_acts_and_one_to_resume_waits_for_a_good_spec() -> None:
    bad = {"nprocPerNode": "many"}
    suspended = edited(trained(), {**bad, "runPolicy": {"suspend": True}})
    assert suspended.fact.policy is not None
    assert suspended.fact.policy.suspend
    body = written(Store(), trained({"runPolicy": {"suspend": True}}))
    resumed = edited(body, {**bad, "runPolicy": {"suspend": False}})
    assert resumed.fact.policy is not None
    assert resumed.fact.policy.suspend


def test_a_job_with_a_bad_edit_is_deleted_like_any_other() -> None:
    body = trained()
    body["metadata"] |= {"deletionTimestamp": "2026-03-01T12:00:01Z"}
    job = edited(body, {"nprocPerNode": "many"})
    metadata = metadata_changes(job, decided(job))
    assert metadata["finalizers"] == []


def test_where_the_annotations_are_full_only_the_templates_are_kept() -> None:
    body = trained()
    del body["metadata"]["annotations"]["elastipod.io/applied"]
    body["metadata"]["annotations"]["note"] = "x" * (MAX_ANNOTATION_BYTES - 48 * 1024 - 100)
    after = written(Store(), body)
    kept = applied_of(after)
    assert kept is not None
    assert "rest" not in kept
    assert edited(after, {"elasticPolicy": {"minReplicas": 9, "maxReplicas": 2}}).fact.policy is None
