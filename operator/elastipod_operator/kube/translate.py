"""From objects of the API server to facts: pure, small records instead of raw bodies (decision 8)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from ..api import HyperPodPyTorchJob, JobSpec, explain
from ..api.models import Recovery, Switch
from ..core.caches import limited_cache
from ..core.history import decode_history
from ..core.names import (
    ANNOTATION_APPLIED,
    ANNOTATION_AVOIDS,
    ANNOTATION_DRAIN_ON_DELETE,
    ANNOTATION_HISTORY,
    ANNOTATION_STATE,
    ANNOTATION_WORKLOAD,
    DEFAULT_AGENT_PORT,
    FINALIZER,
    LABEL_GENERATION,
    LABEL_QUEUE,
    PodId,
    pod_id_of,
)
from ..core.queue_facts import PodRequests
from ..core.quoted_output import quote_output
from ..core.record import Record
from ..core.record_codec import NewerRecordError, RecordError, decode
from ..core.sizes import SizeError, SizeRequest, resolve
from ..core.snapshot import (
    NOT_CONSIDERED,
    Condition,
    ObservedContainer,
    ObservedJob,
    ObservedNode,
    ObservedPod,
    Policy,
    SpecLimits,
)
from .applied import any_applied_of, changed_specs, effective_spec, last_good_spec, pending_edits
from .containers import agent_container_name, all_ended, container_fact, statuses_by_name
from .identity import is_own, was_reconciled
from .job_keys import key_secret_of
from .limits import limit_violation
from .needs import pod_needs
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
    name_of,
    text,
)
from .templates import check_worker_counts, snooze_warnings, template_warnings
from .times import time_or

HEALTH_LABEL = "sagemaker.amazonaws.com/node-health-status"
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
# Set by the node controller on nodes that stopped answering: what that means is judged by the agents, not by the taint.
FAILURE_TAINTS = frozenset({"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"})
# Announcements of an end that use NoSchedule or PreferNoSchedule.
DISRUPTION_TAINTS = frozenset(
    {
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "ToBeDeletedByClusterAutoscaler",
        "cloud.google.com/impending-node-termination",
        "aws-node-termination-handler/spot-itn",
        "aws-node-termination-handler/scheduled-maintenance",
        "aws-node-termination-handler/asg-lifecycle-termination",
        "aws-node-termination-handler/rebalance-recommendation",
        "sagemaker.amazonaws.com/node-health-status",
    }
)
# Notices that say how long the node stays: a Spot instance is taken two minutes after its notice.
NOTICES = {"aws-node-termination-handler/spot-itn": timedelta(seconds=120)}
PULL_TROUBLES = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
# What a pod has that says nothing of it.
KUBELET_GRACE_S = 30
START_TROUBLES = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})


# Pods in records that are kept as they were read, of all jobs together: some 100 bytes each.
RECORDED_PODS_KEPT = 200_000

# When it cannot be told when a job or a pod was made: the store takes a pod's time as no later than when it was first seen.
LONG_AGO, NOT_YET = datetime(1970, 1, 1, tzinfo=UTC), datetime(2900, 1, 1, tzinfo=UTC)
# All that quota can add to a pod.
SOME_PLACE = Placement({"label": "value"}, ({"key": "taint"},), {"label": "value"}, {"note": "value"}, ("gate",))


def job_fact(body: Mapping[str, Any]) -> ObservedJob:
    """Read a job. One that cannot be used has no policy and a refusal in one sentence; it never raises."""
    meta, annotations, status = mapping(body.get("metadata")), annotations_of(body), mapping(body.get("status"))
    policy, refusal = _policy_of(body)
    record, unmanaged = _record_of(body)
    accepted = time_or(meta.get("creationTimestamp"), LONG_AGO)
    fact = ObservedJob(
        namespace=text(meta.get("namespace")),
        name=text(meta.get("name")),
        uid=text(meta.get("uid")),
        created_at=accepted,
        policy=policy,
        refusal=refusal,
        record=record,
        has_foreign_record=_has_foreign_record(body),
        was_reconciled=was_reconciled(body),
        unmanaged=unmanaged,
        warnings=object_warnings(body) if policy is not None else (),
        pending_edits=pending_edits(body) if policy is not None else (),
        history_generation=_newest_generation(body),
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
    return replace(fact, policy=None, refusal=problem) if problem else replace(fact, needs=_needs(body))


def effective_job(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ObservedJob]:
    """Read a job as it is in force: where its spec cannot be used, the last one that could be stands in its place (decision 31)."""
    fact = job_fact(body)
    problem = fact.refusal or (_problem_of_edits(body) if fact.pending_edits else "")
    good = last_good_spec(body) if problem else None
    if good is None:
        return body, fact
    in_force = {**body, "spec": good}
    kept = job_fact(in_force)
    return (in_force, replace(kept, refused_edit=problem)) if kept.policy is not None else (body, fact)


def _problem_of_edits(body: Mapping[str, Any]) -> str:
    """Say why edits that wait for a suspension could not be used then; empty when they could."""
    meta = mapping(body.get("metadata"))
    annotations = {name: value for name, value in annotations_of(body).items() if name != ANNOTATION_APPLIED}
    return job_fact({**body, "metadata": {**meta, "annotations": annotations}}).refusal


def _needs(body: Mapping[str, Any]) -> tuple[PodRequests, ...]:
    try:
        return pod_needs(effective_spec(body))
    except Exception:  # an odd template may still make pods; only how much they need is not known
        return ()


def _queue_in_template(spec: Any) -> str:
    found = (
        labels_of(mapping(one.get("template"))).get(LABEL_QUEUE) for one in mappings(mapping(spec).get("replicaSpecs"))
    )
    return next(filter(None, found), "")


def _policy_of(body: Mapping[str, Any]) -> tuple[Policy | None, str]:
    # The CRD lets little through that is not what it should be. An object that another version of it let through may hold
    # anything, and whatever comes of reading that must not end the care for the job.
    try:
        return _checked_policy(body)
    except Exception as error:  # whatever a user wrote becomes a sentence for that user
        return (
            None,
            f"the spec cannot be read ({_error_text(error)}); compare it with kubectl explain hpjob.spec",
        )


def _checked_policy(body: Mapping[str, Any]) -> tuple[Policy | None, str]:
    try:
        # What acts only at the next start is read as it was taken up then (decision 31).
        spec = effective_spec(body) if isinstance(body.get("spec"), Mapping) else body.get("spec")
        about = {name: part for name, part in body.items() if name != "status"}
        job = HyperPodPyTorchJob.model_validate(about | {"spec": spec} if "spec" in body else about)
        refusal = changed_specs(body) or limit_violation(body)
        return (None, refusal) if refusal else (policy_of(job.spec), "")
    except ValidationError as error:
        return None, explain(error)
    except SizeError as error:
        return None, str(error)


def _error_text(error: Exception) -> str:
    return _shortened(f"{type(error).__name__}: {error}", 200)


def _template_problem(fact: ObservedJob, policy: Policy, body: Mapping[str, Any]) -> str:
    """Say why no pod can be made of a template; empty when pods can be made of all."""
    spec = effective_spec(body)
    for one in spec["replicaSpecs"]:
        try:
            # With all that a pod may get beyond its template, so that what passes here can be made later, too.
            manifest = pod_manifest(
                fact, spec, policy, PodId(one["name"], 0, 0), 1, "secret", avoids=("node",), placed=SOME_PLACE
            )
            if not is_within_depth(manifest, MAX_DEPTH):
                return f"spec.replicaSpecs[{one['name']}].template is nested more than {MAX_DEPTH} levels deep"
            json.dumps(manifest)
        except Exception as error:  # as above: the user's template, not a mistake of ours
            what = f"spec.replicaSpecs[{one['name']}].template is no template of a pod ({_error_text(error)})"
            return f"{what}; compare it with kubectl explain pod"
    return ""


def policy_of(spec: JobSpec) -> Policy:
    """Fill in the defaults and resolve the sizes. Raises SizeError."""
    elastic, run, ours = spec.elastic_policy, spec.run_policy, spec.elastipod
    sizes = resolve(
        SizeRequest(
            spec_replicas=tuple(s.replicas for s in spec.replica_specs),
            spec_max_replicas=tuple(s.max_replicas for s in spec.replica_specs),
            elastic=elastic is not None,
            min_replicas=elastic.min_replicas if elastic else None,
            max_replicas=elastic.max_replicas if elastic else None,
            step=elastic.replica_increment_step if elastic else None,
            values=elastic.replica_discrete_values if elastic else (),
            ceiling=spec.replicas,
            spares=sum(s.spares for s in spec.replica_specs),
        )
    )
    ttl = run.ttl_seconds_after_finished or 0
    container = ours.container or _first_container(spec.replica_specs[0].template)
    check_worker_counts(spec, container)
    restarts = run.restart_policy
    policy = Policy(
        sizes=sizes,
        specs=_shapes(spec, sizes.maximum),
        snooze=timedelta(seconds=restarts.scale_up_snooze_time_in_seconds),
        min_stable=timedelta(seconds=ours.min_stable_seconds),
        backoff_base=timedelta(seconds=ours.backoff.base_seconds),
        backoff_max=timedelta(seconds=ours.backoff.max_seconds),
        max_retries=run.job_max_retry_count,
        eval_period=timedelta(seconds=restarts.eval_period_seconds),
        restarts_before_full=restarts.num_restart_before_full_job_restart,
        max_full_restarts=restarts.max_full_job_restarts,
        max_offenders=restarts.max_num_repeat_offenders_to_avoid,
        payback=ours.payback is Switch.AUTO,
        new_processes=ours.recovery is Recovery.PROCESS,
        clean_pods=run.clean_pod_policy,
        ttl=_seconds(ttl) if ttl > 0 else None,
        ceiling=spec.replicas,
        is_ttl_zero=run.ttl_seconds_after_finished == 0,
        suspend=run.suspend,
        active_deadline=_seconds(run.active_deadline_seconds),
        startup_deadline=_seconds(run.startup_deadline_seconds),
        fault_deadline=_seconds(run.fault_deadline_seconds),
        agent_port=agent_port(spec),
        container=container,
        warnings=(
            *template_warnings(spec, container),
            *snooze_warnings(spec),
            *_recovery_warnings(ours.recovery),
        ),
        has_key=ours.authentication is Switch.AUTO,
    )
    if ours.graceful_shutdown_timeout_in_seconds is not None:
        policy = replace(policy, graceful_timeout=timedelta(seconds=ours.graceful_shutdown_timeout_in_seconds))
    if elastic is None:
        return policy
    grace_s = ours.graceful_shutdown_timeout_in_seconds
    if grace_s is None:
        grace_s = elastic.graceful_shutdown_timeout_in_seconds
    return replace(
        policy,
        scaling_timeout=timedelta(seconds=elastic.scaling_timeout_in_seconds),
        graceful_timeout=timedelta(seconds=grace_s),
        faulty_timeout=timedelta(seconds=elastic.faulty_scale_down_timeout_in_seconds),
    )


def _recovery_warnings(wish: Recovery) -> tuple[str, ...]:
    if wish is not Recovery.IN_MEMORY:
        return ()
    return (
        "spec.elastipod.recovery InMemory acts only where the launcher runs with --inprocess-restart; elsewhere workers come "
        "back as new processes, from a checkpoint",
    )


def _shapes(spec: JobSpec, maximum: int) -> tuple[SpecLimits, ...]:
    """How many pods each spec may hold; where no spec names a maximum, the last one takes what the policy allows."""
    limits = [max(s.replicas, s.max_replicas if s.max_replicas is not None else s.replicas) for s in spec.replica_specs]
    if all(s.max_replicas is None for s in spec.replica_specs):
        limits[-1] = max(limits[-1], maximum - sum(limits[:-1]))
    limits[0] = max(limits[0], 1)
    return tuple(SpecLimits(s.name, limit, s.spares) for s, limit in zip(spec.replica_specs, limits, strict=True))


def agent_port(spec: JobSpec) -> int:
    """Give the agent's port: the container port named agent, else spec.elastipod.agentPort, else 8080 (decision 21)."""
    for container in (spec.replica_specs[0].template.get("spec") or {}).get("containers") or ():
        for port in container.get("ports") or ():
            number = port.get("containerPort")
            if port.get("name") == "agent" and isinstance(number, int) and 0 < number < 65536:
                return number
    return spec.elastipod.agent_port or DEFAULT_AGENT_PORT


def _first_container(template: Mapping[str, Any]) -> str:
    containers = (template.get("spec") or {}).get("containers") or [{}]
    return str(containers[0].get("name", ""))


def _pods_on_record(read: tuple[Record | None, str], text: str) -> int:
    """A short text may stand for thousands of pods."""
    record = read[0] or Record()
    return 64 + len(text) // 64 + len(record.members) + len(record.lost) + len(record.incarnations)


@limited_cache(RECORDED_PODS_KEPT, _pods_on_record)
def decode_record(written: str) -> tuple[Record | None, str, str]:
    """Read a record, with a reason to leave the job alone where there is one, and the UID of its job; none where nobody can read it."""
    try:
        record = decode(written)
    except NewerRecordError as error:
        return None, str(error), error.owner
    except RecordError:  # whoever may edit the job may write anything there
        return None, "", ""
    return record, "", record.owner


def _record_of(body: Mapping[str, Any]) -> tuple[Record | None, str]:
    written = annotations_of(body).get(ANNOTATION_STATE)
    record, unmanaged, owner = decode_record(written) if written else (None, "", "")
    return (record, unmanaged) if is_own(owner, body) else (None, "")


def _has_foreign_record(body: Mapping[str, Any]) -> bool:
    annotations = annotations_of(body)
    written, applied = annotations.get(ANNOTATION_STATE), any_applied_of(body)
    owners = [owner for _, owner in _starts(annotations.get(ANNOTATION_HISTORY, ""))]
    if written:
        record, unmanaged, owner = decode_record(written)
        owners += [owner] if record is not None or unmanaged else []
    if applied is not None:
        owners.append(text(applied.get("uid")))
    return not all(is_own(owner, body) for owner in owners)


def _newest_generation(body: Mapping[str, Any]) -> int:
    starts = _starts(annotations_of(body).get(ANNOTATION_HISTORY, ""))
    return max((generation for generation, owner in starts if is_own(owner, body)), default=0)


@lru_cache(maxsize=512)
def _starts(history: str) -> tuple[tuple[int, str], ...]:
    """Give generation and owner of the starts that a history tells of."""
    return tuple((entry.generation, entry.owner) for entry in decode_history(history))


def _conditions_of(listed: Any, created_at: datetime) -> tuple[Condition, ...]:
    """Read the conditions as they were last written; what is none is left out."""
    return tuple(
        Condition(
            text(c.get("type")), c.get("status") == "True", text(c.get("reason")), text(c.get("message")),
            time_or(c.get("lastTransitionTime"), created_at),
        )
        for c in mappings(listed)
    )  # fmt: skip


def pod_fact(body: Mapping[str, Any], container: str) -> ObservedPod | None:
    """Read a pod of a job; None when its labels are not ours. `container` is the one that runs the agent."""
    meta, spec, status = (mapping(body.get(part)) for part in ("metadata", "spec", "status"))
    labels, annotations = labels_of(body), annotations_of(body)
    identity = pod_id_of(labels)
    if identity is None:
        return None
    name, created_at = text(meta.get("name")), time_or(meta.get("creationTimestamp"), NOT_YET)
    states = statuses_by_name(status.get("containerStatuses"))
    mine: Mapping[str, Any] = states.get(agent_container_name(spec, container)) or {}
    container_now = container_fact(spec, mine)
    reason, trouble = _trouble(name, status, mine, states, container_now)
    if not reason:
        reason, trouble = _not_considered(name, spec, status)
    conditions = mappings(status.get("conditions"))
    disruption = next(
        (c for c in conditions if c.get("type") == "DisruptionTarget" and c.get("status") == "True"), None
    )
    return ObservedPod(
        id=identity,
        name=name,
        uid=text(meta.get("uid")),
        created_at=created_at,
        phase=text(status.get("phase")) or "Pending",
        ip=text(status.get("podIP")),
        node=text(spec.get("nodeName")),
        started=bool(mapping(mine.get("state")).get("running")),
        container=container_now,
        containers_ended=all_ended(spec, states),
        deletion_grace=_deletion_grace(meta, spec) if meta.get("deletionTimestamp") else None,
        disruption=_shortened(disruption.get("reason") or "Disruption") if disruption else "",
        trouble=trouble,
        trouble_reason=reason,
        key_secret=key_secret_of(body, container),
        generation=_number(labels.get(LABEL_GENERATION)),
        avoids=tuple(filter(None, annotations.get(ANNOTATION_AVOIDS, "").split(","))),
        workload=annotations.get(ANNOTATION_WORKLOAD, ""),
    )


def _deletion_grace(meta: Mapping[str, Any], spec: Mapping[str, Any]) -> timedelta:
    """How long the deletion of a pod leaves its containers: as the deletion says, else as the pod does."""
    told = meta.get("deletionGracePeriodSeconds"), spec.get("terminationGracePeriodSeconds"), KUBELET_GRACE_S
    return timedelta(seconds=next(one for one in told if isinstance(one, int) and 0 <= one < 2**31))


def _number(label: str | None) -> int:
    return int(label) if label and label.isdecimal() and len(label) < 16 else 0


def _trouble(
    pod: str,
    status: Mapping[str, Any],
    mine: Mapping[str, Any],
    states: Mapping[str, Mapping[str, Any]],
    fact: ObservedContainer | None,
) -> tuple[str, str]:
    if status.get("phase") in ("Failed", "Succeeded") or (fact is not None and fact.ended):
        return "ContainerEnded", _how_it_ended(pod, status, mine)
    if fact is not None and fact.is_restarting:
        last = _ended(mine) or mapping(mapping(mine.get("lastState")).get("terminated"))
        how = _one_end(f"container {mine.get('name')} of pod {pod}", last)
        return "ContainerEnded", f"{how}; its kubelet starts it again"
    first = statuses_by_name(status.get("initContainerStatuses"))
    for name, container in {**first, **states, text(mine.get("name")): mine}.items():
        waiting = mapping(mapping(container.get("state")).get("waiting"))
        reason, message = text(waiting.get("reason")), text(waiting.get("message"))
        if reason in PULL_TROUBLES:
            image = _shortened(container.get("image"))
            what = f"image {image} of pod {pod} cannot be pulled ({reason}: {_shortened(message)})"
            return "ImagePullFailed", f"{what}; check its name, its tag and the pull secret"
        if reason in START_TROUBLES:
            return (
                "ContainerCannotStart",
                f"container {name} of pod {pod} cannot be started ({reason}): {_shortened(message)}",
            )
    for condition in mappings(status.get("conditions")):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return "Unschedulable", _shortened(condition.get("message") or "not scheduled yet")
    return "", ""


def _not_considered(pod: str, spec: Mapping[str, Any], status: Mapping[str, Any]) -> tuple[str, str]:
    """Say that no scheduler has looked at a pod: one that has says so in condition PodScheduled, also where it finds no place."""
    is_known = any(c.get("type") == "PodScheduled" for c in mappings(status.get("conditions")))
    if is_known or spec.get("nodeName") or (status.get("phase") or "Pending") != "Pending":
        return "", ""
    wanted = _shortened(text(spec.get("schedulerName")) or "default-scheduler")
    return NOT_CONSIDERED, (
        f"no scheduler has looked at pod {pod}: nobody seems to serve schedulerName {wanted}; start that scheduler, or change "
        "spec.replicaSpecs[].template.spec.schedulerName"
    )


def _how_it_ended(pod: str, status: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    if status.get("reason"):  # its node ended it: whatever its containers say of their ends follows from that
        told = [text(status[part]) for part in ("reason", "message") if status.get(part)]
        return f"pod {pod} ended: {_shortened(': '.join(told))}"
    for first in mappings(status.get("initContainerStatuses")):
        if _ended(first).get("exitCode"):
            return _one_end(f"init container {first.get('name')} of pod {pod}", _ended(first))
    if not _ended(mine):
        return f"pod {pod} ended: {_shortened(status.get('message') or 'no reason given')}"
    how = _one_end(f"container {mine.get('name')} of pod {pod}", _ended(mine))
    if _ended(mine).get("reason") == "OOMKilled":
        return how
    return f"{how}; its command must start hyperpodrun, which stays until the job ends"


def _ended(container: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping(mapping(container.get("state")).get("terminated"))


def _one_end(what: str, ended: Mapping[str, Any]) -> str:
    if ended.get("reason") == "OOMKilled":
        return f"{what} was killed for using more memory than its limit; raise resources.limits.memory"
    said = f": {quote_output(_shortened(ended['message']))}" if ended.get("message") else ""
    return f"{what} ended with exit code {_shortened(ended.get('exitCode'), 20)}{said}"


def _shortened(found: Any, limit: int = 300) -> str:
    line = " ".join(str(found if isinstance(found, str | int | float) else "?")[: 10 * limit].split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def node_fact(body: Mapping[str, Any], before: ObservedNode | None, now: datetime) -> ObservedNode:
    """Read a node. `not_ready_since` is when this operator first saw it not ready, for other clocks are not trusted."""
    spec, status = mapping(body.get("spec")), mapping(body.get("status"))
    conditions = mappings(status.get("conditions"))
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
    since = None if ready else (before.not_ready_since if before and before.not_ready_since else now)
    return ObservedNode(
        name=name_of(body),
        ready=ready,
        not_ready_since=since,
        cordoned=bool(spec.get("unschedulable")),
        out_of_service=any(t.get("key") == OUT_OF_SERVICE for t in mappings(spec.get("taints"))),
        disruption=disruption_of(body).why(()),
        leaves_at=_leaves_at(mappings(spec.get("taints")), before, now),
    )


def _leaves_at(taints: Sequence[Mapping[str, Any]], before: ObservedNode | None, now: datetime) -> datetime | None:
    notices = [NOTICES[key] for t in taints if (key := str(t.get("key"))) in NOTICES]
    if not notices:
        return None
    return before.leaves_at if before is not None and before.leaves_at is not None else now + min(notices)


@dataclass(frozen=True, slots=True)
class Disruption:
    """What drives pods off a node: announcements of its end, which concern everybody, and taints that may be tolerated."""

    announced: str
    taints: tuple[Mapping[str, Any], ...]

    def why(self, tolerations: Sequence[Mapping[str, Any]]) -> str:
        """Say why pods with these tolerations must leave; empty when they may stay."""
        expelling = (t for t in self.taints if not any(_tolerates(one, t) for one in tolerations))
        taint = next(expelling, None)
        return self.announced or (_taint_text(taint) if taint is not None else "")


def disruption_of(body: Mapping[str, Any]) -> Disruption:
    """Read what drives pods off a node."""
    listed = mappings(mapping(body.get("spec")).get("taints"))
    taints = [t for t in listed if text(t.get("key")) not in {*FAILURE_TAINTS, OUT_OF_SERVICE}]
    announced = next((_taint_text(t) for t in taints if text(t.get("key")) in DISRUPTION_TAINTS), "")
    health = labels_of(body).get(HEALTH_LABEL, "Schedulable")
    if not announced and health != "Schedulable":
        announced = f"label {HEALTH_LABEL}={health}"
    return Disruption(announced, tuple(t for t in taints if t.get("effect") == "NoExecute"))


def tolerations_of(job: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Give the tolerations that every template of a job has, as its pods are made from them. Its spec must be one that can be used."""
    templates = [mapping(s.get("template")) for s in mappings(effective_spec(job).get("replicaSpecs"))]
    first, *others = [mappings(mapping(t.get("spec")).get("tolerations")) for t in templates] or [[]]
    return [one for one in first if all(one in other for other in others)]


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    """Whether a pod may stay for good in spite of a NoExecute taint, as Kubernetes reads tolerations."""
    if toleration.get("tolerationSeconds") is not None or toleration.get("effect") not in (None, "", "NoExecute"):
        return False
    if not toleration.get("key"):
        return toleration.get("operator") == "Exists"
    is_any = toleration.get("operator") == "Exists"
    return toleration["key"] == taint.get("key") and (
        is_any or (toleration.get("value") or "") == (taint.get("value") or "")
    )


def _taint_text(taint: Mapping[str, Any]) -> str:
    return f"taint {_shortened(taint.get('key', ''))}:{_shortened(taint.get('effect', ''))}"


def _seconds(value: int | None) -> timedelta | None:
    return timedelta(seconds=value) if value is not None else None
