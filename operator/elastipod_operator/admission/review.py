"""What the webhook says about a job: the sentences of the operator's conditions and Events, before anything runs. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..core.conditions.warning import FOREIGN_RECORD, pending_edits, spec_warnings, unusable_edits
from ..core.ending import KEPT_TEXT
from ..core.names import LABEL_QUEUE
from ..core.queue_facts import QueueFact
from ..core.queue_warnings import queue_problems
from ..core.spec_edits import no_ceiling_text
from ..core.wording import counted
from ..kube.observed_job import effective_job
from ..kube.reading import labels_of, mapping, mappings, shortened, text
from .hints import template_hints

# The API server cuts all warnings of an answer at 4,096 characters together.
WARNING_LENGTH = 1000
OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")

Body = Mapping[str, Any]


def queue_named_in(request: Body) -> tuple[str, str]:
    """Give namespace and name of the queue of the reviewed job; empty names for none, and for what cannot be names.

    They go into the path of a call with the operator's rights, and anybody on the pod network can send a review.
    """
    job = mapping(request.get("object"))
    templates = (mapping(one.get("template")) for one in mappings(mapping(job.get("spec")).get("replicaSpecs")))
    found = (labels_of(one).get(LABEL_QUEUE, "") for one in (job, *templates))
    names = text(request.get("namespace")), next(filter(None, found), "")
    return names if all(OBJECT_NAME.fullmatch(name) for name in names) else ("", "")


def job_without_ceiling(request: Body) -> tuple[str, str]:
    """Give namespace and name of the job whose ceiling a scale removes; empty names for any other scale, and as above."""
    is_removed = _ceiling(request.get("oldObject")) and not _ceiling(request.get("object"))
    names = text(request.get("namespace")), text(request.get("name"))
    return names if is_removed and all(OBJECT_NAME.fullmatch(name) for name in names) else ("", "")


def allow(request: Body, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """Give the AdmissionReview that allows a request."""
    response = {"uid": text(request.get("uid")), "allowed": True, "warnings": [*warnings]}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def answer(request: Body, queue: QueueFact | str | None) -> dict[str, Any]:
    """Give the AdmissionReview that allows a request, with warnings.

    queue: that of the job, or a sentence on why it cannot be used; None if there is none, or it is unknown.
    """
    return allow(request, [shortened(one, WARNING_LENGTH) for one in dict.fromkeys(_warnings(request, queue))])


def _warnings(request: Body, queue: QueueFact | str | None) -> Iterator[str]:
    body, is_new = mapping(request.get("object")), request.get("operation") == "CREATE"
    before, now = _ceiling(request.get("oldObject")), _ceiling(body)
    if request.get("subResource") == "scale":
        if before and not now:
            yield no_ceiling_text(before, "its largest size")
        return
    in_force, job = effective_job(body)
    policy = job.policy
    if policy is None:
        yield f"the job cannot run: {job.spec_error}"
        return
    if is_new and job.has_foreign_record:
        yield FOREIGN_RECORD
    if before and not now:
        yield no_ceiling_text(before, counted(policy.sizes.maximum, "replica"))
    if isinstance(queue, str):
        yield queue
    elif queue is not None:
        yield from (sentence for _, sentence in queue_problems(job.namespace, queue))
    for _, sentence in (*unusable_edits(job), *pending_edits(job), *spec_warnings(job, policy)):
        yield sentence
    if policy.is_ttl_zero:
        yield KEPT_TEXT
    yield from template_hints(mapping(in_force.get("spec")))


def _ceiling(body: Any) -> int:
    found = mapping(mapping(body).get("spec")).get("replicas")
    return found if isinstance(found, int) else 0
