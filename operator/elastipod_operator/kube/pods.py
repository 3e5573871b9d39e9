"""The pod of a replica: the user's template plus identity, environment and safeguards. Pure."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ..core.names import (
    AGENT_PORT_ENV,
    ANNOTATION_AVOIDS,
    ANNOTATION_FAILURES_BEFORE,
    ANNOTATION_ONLY_ON,
    API_VERSION,
    JOB_ENV,
    KIND,
    LABEL_GENERATION,
    LABEL_INCARNATION,
    LABEL_JOB,
    LABEL_ORDINAL,
    LABEL_SPEC,
    LABEL_UID,
    POD_ENV,
    RUN_ID_ENV,
    PodId,
)
from ..core.snapshot import ObservedJob, Policy
from .containers import agent_container
from .job_keys import KEY_ENV, TOKEN_ENV, key_entries
from .placement import Placement, place

# Autoscalers that consolidate nodes must not evict the pod; the user's own value wins.
SAFEGUARDS = {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
# Added to the graceful time-out, so that the agent can end the workers and itself.
GRACE_MARGIN_S = 30
HOSTNAME = "kubernetes.io/hostname"


def pod_manifest(
    job: ObservedJob,
    spec: Mapping[str, Any],
    policy: Policy,
    pod: PodId,
    nnodes: int,
    key_secret: str = "",
    *,
    generation: int = 0,
    avoids: tuple[str, ...] = (),
    only_on: tuple[str, ...] = (),
    failures_before: int | None = None,
    placed: Placement | None = None,
) -> dict[str, Any]:
    """Give the pod to create. spec: the job's spec in effect, as the API server stores it.

    Name and namespace in the template's metadata are ignored. The user's variables are kept, except those of authentication:
    with another key, token or pod name the agent would reject the operator's calls. key_secret: the Secret with the job's key,
    "" for none. generation: the newest one of the job. avoids: nodes to avoid. only_on: host names of the only nodes that it may
    use, if any. failures_before: as of CreatePod, None to say nothing. placed: what its quota adds. Kueue's labels and annotations in the
    template are removed, because they would make the pod a job of its own.
    """
    replica_spec = next(s for s in spec["replicaSpecs"] if s["name"] == pod.spec)
    template = replica_spec.get("template") or {}
    wished = template.get("metadata") or {}
    body = copy.deepcopy(dict(template.get("spec") or {}))
    body["restartPolicy"] = "Never"
    if body.get("terminationGracePeriodSeconds") is None:
        body["terminationGracePeriodSeconds"] = int(policy.graceful_timeout.total_seconds()) + GRACE_MARGIN_S
    containers: list[dict[str, Any]] = body.setdefault("containers", [{}])
    container = agent_container(containers, policy.container)
    if container is None:
        raise ValueError("spec.containers is empty")
    name = pod.name(job.name)
    if key_secret:
        fixed = (KEY_ENV, TOKEN_ENV, POD_ENV)
        container["env"] = [entry for entry in container.get("env") or () if entry.get("name") not in fixed]
    _add_environment(container, _environment(job, spec, policy, name, nnodes))
    if key_secret:
        container["env"] += key_entries(key_secret)
    if body.get("hostNetwork"):
        _add_port(container, policy.agent_port)
    # A field requirement takes exactly one value.
    _require(body, "matchFields", [{"key": "metadata.name", "operator": "NotIn", "values": [n]} for n in avoids])
    # No autoscaler adds a node for a pod that only nodes of other names can take.
    _require(body, "matchExpressions", [{"key": HOSTNAME, "operator": "In", "values": [*only_on]}] if only_on else [])
    ours = _annotations(avoids, only_on, None if failures_before == pod.incarnation else failures_before)
    manifest: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": job.namespace,
            "labels": {**(wished.get("labels") or {}), **_labels(job, pod, generation)},
            "annotations": {**SAFEGUARDS, **(wished.get("annotations") or {}), **ours},
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": KIND,
                    "name": job.name,
                    "uid": job.uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": body,
    }
    place(manifest, placed)
    return manifest


def _require(body: dict[str, Any], kind: str, requirements: list[dict[str, Any]]) -> None:
    """Restrict the nodes by affinity. Terms are alternatives, so the requirements are added to each of the user's terms."""
    if not requirements:
        return
    affinity = body["affinity"] = dict(body.get("affinity") or {})
    node_affinity = affinity["nodeAffinity"] = dict(affinity.get("nodeAffinity") or {})
    required = dict(node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {})
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [{**term, kind: [*(term.get(kind) or ()), *requirements]} for term in terms]
    node_affinity["requiredDuringSchedulingIgnoredDuringExecution"] = required


def _labels(job: ObservedJob, pod: PodId, generation: int) -> dict[str, str]:
    return {
        LABEL_JOB: job.name,
        LABEL_UID: job.uid,
        LABEL_SPEC: pod.spec,
        LABEL_ORDINAL: str(pod.ordinal),
        LABEL_INCARNATION: str(pod.incarnation),
        LABEL_GENERATION: str(generation),
    }


def _annotations(avoids: tuple[str, ...], only_on: tuple[str, ...], failures_before: int | None) -> dict[str, str]:
    found = {ANNOTATION_AVOIDS: ",".join(avoids), ANNOTATION_ONLY_ON: ",".join(only_on)}
    found[ANNOTATION_FAILURES_BEFORE] = "" if failures_before is None else str(failures_before)
    return {name: value for name, value in found.items() if value}


def _environment(
    job: ObservedJob, spec: Mapping[str, Any], policy: Policy, pod_name: str, nnodes: int
) -> dict[str, str]:
    return {
        "NNODES": str(nnodes),
        "NPROC_PER_NODE": str(spec.get("nprocPerNode") or "auto"),
        JOB_ENV: f"{job.namespace}/{job.name}",
        RUN_ID_ENV: job.uid,
        POD_ENV: pod_name,
        AGENT_PORT_ENV: str(policy.agent_port),
    }


def _add_environment(container: dict[str, Any], wanted: dict[str, str]) -> None:
    # A port of the user's own would be one that nobody calls: spec.elastipod.agentPort says which it is.
    present = [entry for entry in container.get("env") or [] if entry.get("name") != AGENT_PORT_ENV]
    names = {entry.get("name") for entry in present}
    # The operator's variables come first, because the user's may refer to them as $(NNODES).
    container["env"] = [{"name": k, "value": v} for k, v in wanted.items() if k not in names] + present


def _add_port(container: dict[str, Any], port: int) -> None:
    """Declare the agent's port, so that the scheduler keeps two agents off one host network."""
    ports = container.get("ports") or []
    if all(entry.get("containerPort") != port for entry in ports):
        # The user's port of that name may be another one, and names are unique.
        name = {} if any(entry.get("name") == "agent" for entry in ports) else {"name": "agent"}
        container["ports"] = [*ports, {**name, "containerPort": port, "protocol": "TCP"}]
