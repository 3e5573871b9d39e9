"""Whose record it is: a copied manifest begins anew, an upgraded operator goes on with its own."""

from __future__ import annotations

import copy
import dataclasses
import json
from datetime import timedelta
from random import Random
from typing import Any

import pytest
from tests.unit.kube.bodies import CREATED, JOB_UID, job_body
from tests.unit.kube.random_clusters import NOW
from tests.unit.kube.random_clusters import record as any_record

from elastipod_operator.core.actions import CreatePod, Plan, SetQueueLabel
from elastipod_operator.core.history import HistoryEntry, decode_history, encode_history
from elastipod_operator.core.names import ANNOTATION_APPLIED, ANNOTATION_HISTORY, ANNOTATION_STATE, FINALIZER, PodId
from elastipod_operator.core.plan import plan
from elastipod_operator.core.reasons import OpenReason
from elastipod_operator.core.record import Record, TransitionKind
from elastipod_operator.core.record_codec import decode, encode
from elastipod_operator.core.snapshot import Snapshot
from elastipod_operator.kube.applied import applied_annotation, applied_of, effective_spec
from elastipod_operator.kube.changes import metadata_changes
from elastipod_operator.kube.observed_job import observe_job
from elastipod_operator.kube.store import Job, Store

Body = dict[str, Any]
SEEN = {
    "conditions": [
        {"type": "Created", "status": "True", "reason": "Accepted", "message": "m", "lastTransitionTime": CREATED}
    ]
}
ENDED = Record(
    generation=7, members=(PodId("workers", 0, 0),), outcome="Completed", outcome_reason=OpenReason("R"), ended_at=NOW
)
START = HistoryEntry(
    generation=7, from_size=0, to_size=1, kind=TransitionKind.START, cause=OpenReason("C"), at=NOW, detected_at=NOW
)


def written(owner: str, record: Record = ENDED) -> Body:
    """Give a job that an operator cared for, whose UID is `owner`; in annotations of an earlier operator that is empty."""
    body = job_body(uid=owner or JOB_UID, finalizers=[FINALIZER])
    body["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"][0]["image"] = "train:old"
    applied = applied_annotation(body, adopts_spec=True, room=10_000)
    assert applied is not None
    body["metadata"]["annotations"] = {
        ANNOTATION_STATE: encode(Record(**{**fields(record), "owner": owner})), ANNOTATION_APPLIED: applied,
        ANNOTATION_HISTORY: encode_history((HistoryEntry(**{**fields(START), "owner": owner}),)),
    }  # fmt: skip
    return body


def fields(one: Any) -> dict[str, Any]:
    return {each.name: getattr(one, each.name) for each in dataclasses.fields(one)}


def copied(body: Body) -> Body:
    """Export a manifest, with annotations and finalizers, and apply it under another name, edited."""
    copy_of = copy.deepcopy(body)
    copy_of["metadata"] |= {"name": "another", "uid": "another-uid", "resourceVersion": "50"}
    copy_of["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"][0]["image"] = "train:new"
    return copy_of


def known(body: Body) -> Job:
    store = Store(lambda: NOW)
    store.put_job(body)
    return store.jobs[body["metadata"]["uid"]]


def decided(job: Job, **seen: Any) -> Plan:
    return plan(Snapshot(now=NOW, job=job.fact, **seen))


def test_a_copied_manifest_begins_anew_and_says_so() -> None:
    job = known(copied(written("first-uid")))
    assert job.fact.record is None
    assert job.fact.history_generation == 0
    assert effective_spec(job.body)["replicaSpecs"][0]["template"]["spec"]["containers"][0]["image"] == "train:new"
    todo = decided(job)
    assert todo.conditions[-1].type == "Created"
    assert [a for a in todo.actions if isinstance(a, CreatePod)]
    assert [c.reason for c in todo.conditions if c.type == "Warning"] == ["RecordIgnored"]
    assert "RecordIgnored" in [note.reason for note in todo.events]


def test_what_was_foreign_is_overwritten() -> None:
    job = known(copied(written("first-uid")))
    annotations = metadata_changes(job, decided(job))["annotations"]
    assert decode(annotations[ANNOTATION_STATE]).owner == "another-uid"
    assert decode_history(annotations[ANNOTATION_HISTORY]) == ()
    after = copy.deepcopy(dict(job.body))
    after["metadata"] = {**after["metadata"], "resourceVersion": "51", "annotations": annotations}
    again = known(after)
    assert again.fact.record is not None
    assert not again.fact.has_foreign_record
    assert applied_of(again.body) is not None


def test_it_is_told_until_the_training_begins() -> None:
    job = known(copied(written("first-uid")))
    first = decided(job)
    job.body = {
        **job.body,
        "metadata": {**job.body["metadata"], "annotations": metadata_changes(job, first)["annotations"]},
    }
    told = [
        {"type": c.type, "status": "False", "reason": c.reason, "message": c.message, "lastTransitionTime": CREATED}
        for c in first.conditions
    ]
    fact = observe_job({**job.body, "status": {"conditions": told}})
    assert not fact.has_foreign_record
    later = plan(Snapshot(now=NOW + timedelta(seconds=1), job=fact))
    assert [c.reason for c in later.conditions if c.type == "Warning"] == ["RecordIgnored"]
    assert "RecordIgnored" not in [note.reason for note in later.events], "one Event"


def test_an_own_record_is_taken_with_and_without_a_status() -> None:
    body = written(JOB_UID)
    assert observe_job(body).record is not None
    assert observe_job({**body, "status": SEEN}).record is not None
    assert observe_job(body).history_generation == 7


def test_a_record_of_an_earlier_operator_is_taken_where_the_status_tells_of_one() -> None:
    body = written("")
    assert observe_job({**body, "status": SEEN}).record is not None
    assert observe_job({**body, "status": SEEN}).history_generation == 7
    unseen = observe_job({**body, "status": {}})
    assert unseen.record is None
    assert unseen.has_foreign_record


@pytest.mark.parametrize("part", [ANNOTATION_STATE, ANNOTATION_APPLIED, ANNOTATION_HISTORY])
def test_each_of_the_annotations_alone_is_known_for_foreign(part: str) -> None:
    body = copied(written("first-uid"))
    body["metadata"]["annotations"] = {part: body["metadata"]["annotations"][part]}
    assert observe_job(body).has_foreign_record


def test_the_record_of_a_newer_operator_keeps_no_copy_from_beginning() -> None:
    newer = json.dumps({"v": 99, "uid": "first-uid"})
    own = json.dumps({"v": 99, "uid": JOB_UID})
    assert observe_job(job_body(annotations={ANNOTATION_STATE: own})).unmanaged
    assert not observe_job(job_body(annotations={ANNOTATION_STATE: newer})).unmanaged


def test_a_record_that_somebody_wrote_himself_leaves_no_queue() -> None:
    """Even one that guesses the UID: as long as no operator looked at the job, LocalQueue `default` adopts it."""
    mine = encode(Record(generation=1, members=(PodId("workers", 0, 0),), owner=JOB_UID))
    body = {**job_body(annotations={ANNOTATION_STATE: mine}), "status": {}}
    todo = decided(known(body), default_queue=True)
    assert todo.record.queue == "default"
    assert SetQueueLabel("default") in todo.actions
    assert not [a for a in todo.actions if isinstance(a, CreatePod)]


@pytest.mark.parametrize("record", [Record(owner=JOB_UID), Record(generation=4, owner=JOB_UID)])
def test_an_empty_record_is_a_lost_one(record: Record) -> None:
    """Nobody trains in it, so nobody has completed."""
    todo = decided(known({**job_body(annotations={ANNOTATION_STATE: encode(record)}), "status": SEEN}))
    assert todo.record.outcome == ""
    assert todo.record.transition is not None
    assert todo.record.generation >= record.generation
    assert [a for a in todo.actions if isinstance(a, CreatePod)]


def test_a_record_of_a_later_layout_is_read_without_what_is_new_in_it() -> None:
    """After a rollback; and what an earlier operator wrote less is read too (`test_record`)."""

    for seed in range(30):
        record = any_record(Random(seed))
        body = json.loads(encode(record))
        for name in (
            "times",
            "budget",
            "transition",
            "window",
            "gang",
            "growth",
            "ledger",
            "measures",
            "queue",
            "outcome",
        ):
            if name in body:
                body[name] = [*body[name], "new"]
        for name, at in (("culprits", 1), ("measures", 2), ("ledger", 2)):
            if name in body:
                body[name][at] = [[*row, "new"] for row in body[name][at]]
        body["offences"] = [[*row, "new"] for row in body.get("offences", [])]
        body["brand-new"] = {"a": 1}
        assert decode(json.dumps(body)) == record
