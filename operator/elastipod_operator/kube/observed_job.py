"""A job as the API server shows it, as a frozen dataclass for `core`. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from ..api import HyperPodPyTorchJob, explain
from ..core.names import ANNOTATION_APPLIED, ANNOTATION_DRAIN_ON_DELETE, FINALIZER, LABEL_QUEUE, PodId
from ..core.reasons import as_reason
from ..core.sizes import SizeError
from ..core.snapshot import Condition, ObservedJob, Policy
from .applied import changed_specs, effective_spec, last_good_spec, pending_edits
from .identity import was_reconciled
from .job_annotations import has_foreign_record, newest_generation, record_of
from .job_policy import policy_of
from .limits import limit_violation
from .object_warnings import object_warnings
from .placement import Placement
from .pods import pod_manifest
from .reading import (
    MAX_DEPTH,
    annotations_of,
    finalizers_of,
    is_within_depth,
    labels_of,
    mapping,
    mappings,
    shortened,
    text,
)
from .times import time_or

# For a job with an unreadable creation time; the store uses the time at which it first saw the job.
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
# Everything that quota can add to a pod.
SOME_PLACE = Placement({"label": "value"}, ({"key": "taint"},), {"label": "value"}, {"note": "value"}, ("gate",))


def observe_job(body: Mapping[str, Any]) -> ObservedJob:
    """Read a job. An invalid one has no policy and a `spec_error`. Never raises."""
    meta, annotations, status = mapping(body.get("metadata")), annotations_of(body), mapping(body.get("status"))
    policy, spec_error = _policy_of(body)
    record, unmanaged = record_of(body)
    accepted = time_or(meta.get("creationTimestamp"), LONG_AGO)
    fact = ObservedJob(
        namespace=text(meta.get("namespace")),
        name=text(meta.get("name")),
        uid=text(meta.get("uid")),
        created_at=accepted,
        policy=policy,
        spec_error=spec_error,
        record=record,
        has_foreign_record=has_foreign_record(body),
        was_reconciled=was_reconciled(body),
        unmanaged=unmanaged,
        warnings=object_warnings(body) if policy is not None else (),
        pending_edits=pending_edits(body) if policy is not None else (),
        history_generation=newest_generation(body),
        conditions=_conditions_of(status.get("conditions"), accepted),
        scaling=mapping(status.get("elasticScalingStatus")),
        has_finalizer=FINALIZER in finalizers_of(body),
        deleting_since=time_or(meta["deletionTimestamp"], accepted) if meta.get("deletionTimestamp") else None,
        drain_on_delete=annotations.get(ANNOTATION_DRAIN_ON_DELETE) == "true",
        queue=labels_of(body).get(LABEL_QUEUE, ""),
        queue_in_template=_queue_in_template(body.get("spec")),
        start_time=time_or(started, accepted) if (started := status.get("startTime")) else None,
    )
    if policy is None:
        return fact
    problem = _template_problem(fact, policy, body)
    return replace(fact, policy=None, spec_error=problem) if problem else fact


def effective_job(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ObservedJob]:
    """Read a job as it is in effect: the last valid spec replaces an invalid one."""
    fact = observe_job(body)
    problem = fact.spec_error or (_problem_of_edits(body) if fact.pending_edits else "")
    good = last_good_spec(body) if problem else None
    if good is None:
        return body, fact
    in_force = {**body, "spec": good}
    kept = observe_job(in_force)
    return (in_force, replace(kept, edit_error=problem)) if kept.policy is not None else (body, fact)


def _problem_of_edits(body: Mapping[str, Any]) -> str:
    """Say why pending edits would be invalid; empty if they are valid."""
    meta = mapping(body.get("metadata"))
    annotations = {name: value for name, value in annotations_of(body).items() if name != ANNOTATION_APPLIED}
    return observe_job({**body, "metadata": {**meta, "annotations": annotations}}).spec_error


def _queue_in_template(spec: Any) -> str:
    found = (
        labels_of(mapping(one.get("template"))).get(LABEL_QUEUE) for one in mappings(mapping(spec).get("replicaSpecs"))
    )
    return next(filter(None, found), "")


def _policy_of(body: Mapping[str, Any]) -> tuple[Policy | None, str]:
    # The CRD admits few invalid objects, but another version of it may have admitted anything. No such object may raise here.
    try:
        return _checked_policy(body)
    except Exception as error:  # any error becomes a sentence for the user
        return (
            None,
            f"the spec cannot be read ({_error_text(error)}); compare it with kubectl explain hpjob.spec",
        )


def _checked_policy(body: Mapping[str, Any]) -> tuple[Policy | None, str]:
    try:
        # Fields that take effect only on resume are read as they are in effect.
        spec = effective_spec(body) if isinstance(body.get("spec"), Mapping) else body.get("spec")
        about = {name: part for name, part in body.items() if name != "status"}
        job = HyperPodPyTorchJob.model_validate(about | {"spec": spec} if "spec" in body else about)
        spec_error = changed_specs(body) or limit_violation(body)
        return (None, spec_error) if spec_error else (policy_of(job.spec), "")
    except ValidationError as error:
        return None, explain(error)
    except SizeError as error:
        return None, str(error)


def _error_text(error: Exception) -> str:
    return shortened(f"{type(error).__name__}: {error}", 200)


def _template_problem(fact: ObservedJob, policy: Policy, body: Mapping[str, Any]) -> str:
    """Say why no pod can be created from a template; empty if pods can be created from all."""
    spec = effective_spec(body)
    for one in spec["replicaSpecs"]:
        try:
            # Check with everything that may be added to a pod, so that later pods can be created too.
            manifest = pod_manifest(
                fact, spec, policy, PodId(one["name"], 0, 0), 1, "secret",
                avoids=("node",), only_on=("node",), placed=SOME_PLACE,
            )  # fmt: skip
            if not is_within_depth(manifest, MAX_DEPTH):
                return f"spec.replicaSpecs[{one['name']}].template is nested more than {MAX_DEPTH} levels deep"
            json.dumps(manifest)
        except Exception as error:  # as above: an error in the user's template
            what = f"spec.replicaSpecs[{one['name']}].template is not a valid pod template ({_error_text(error)})"
            return f"{what}; compare it with kubectl explain pod"
    return ""


def _conditions_of(listed: Any, created_at: datetime) -> tuple[Condition, ...]:
    """Read the conditions as last written; malformed entries are left out."""
    return tuple(
        Condition(
            text(c.get("type")), c.get("status") == "True", as_reason(text(c.get("reason"))), text(c.get("message")),
            time_or(c.get("lastTransitionTime"), created_at),
        )
        for c in mappings(listed)
    )  # fmt: skip
