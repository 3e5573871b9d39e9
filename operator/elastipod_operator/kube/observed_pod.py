"""A pod of a job as a frozen dataclass for `core`. Pure."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from ..core.names import (
    AGENT_PORT_ENV,
    ANNOTATION_AVOIDS,
    ANNOTATION_FAILURES_BEFORE,
    ANNOTATION_ONLY_ON,
    ANNOTATION_WORKLOAD,
    LABEL_GENERATION,
    pod_id_of,
)
from ..core.snapshot import ObservedPod
from .containers import agent_container_of_pod, all_ended, container_fact, statuses_by_name
from .job_keys import key_secret_of
from .pod_problem import pod_problem, scheduler_problem, was_considered
from .reading import annotations_of, labels_of, mapping, mappings, shortened, text
from .times import time_or

# Fields of a pod that are not needed.
KUBELET_GRACE_S = 30
# For a pod with an unreadable creation time; the store uses the time at which it first saw the pod.
NOT_YET = datetime(2900, 1, 1, tzinfo=UTC)
SERVER_PORT = "--server-port"  # of hyperpodrun; it takes precedence over the environment


def observe_pod(body: Mapping[str, Any], container: str) -> ObservedPod | None:
    """Read a pod of a job; None if its labels are not the operator's. container: the one that runs the agent, if the pod does not tell."""
    meta, spec, status = (mapping(body.get(part)) for part in ("metadata", "spec", "status"))
    labels, annotations = labels_of(body), annotations_of(body)
    identity = pod_id_of(labels)
    if identity is None:
        return None
    name, created_at = text(meta.get("name")), time_or(meta.get("creationTimestamp"), NOT_YET)
    states = statuses_by_name(status.get("containerStatuses"))
    runs_agent = agent_container_of_pod(mappings(spec.get("containers")), container) or {"name": container}
    mine: Mapping[str, Any] = states.get(text(runs_agent.get("name"))) or {}
    container_now = container_fact(spec, mine)
    reason, problem = pod_problem(name, status, mine, states, container_now)
    if not reason:
        reason, problem = scheduler_problem(name, spec, status)
    conditions = mappings(status.get("conditions"))
    disruption = next(
        (c for c in conditions if c.get("type") == "DisruptionTarget" and c.get("status") == "True"), None
    )
    return ObservedPod(
        id=identity,
        name=name,
        uid=text(meta.get("uid")),
        created_at=created_at,
        considered_at=created_at if was_considered(status) else None,
        phase=text(status.get("phase")) or "Pending",
        ip=text(status.get("podIP")),
        node=text(spec.get("nodeName")),
        started=bool(mapping(mine.get("state")).get("running")),
        container=container_now,
        containers_ended=all_ended(spec, states),
        deletion_grace=_deletion_grace(meta, spec) if meta.get("deletionTimestamp") else None,
        disruption=shortened(disruption.get("reason") or "Disruption") if disruption else "",
        problem=problem,
        problem_reason=reason,
        key_secret=key_secret_of(body, container),
        agent_port=_agent_port(runs_agent),
        agent_container=sys.intern(text(runs_agent.get("name"))),
        generation=_number(labels.get(LABEL_GENERATION)),
        avoids=_names_in(annotations.get(ANNOTATION_AVOIDS, "")),
        only_on=_names_in(annotations.get(ANNOTATION_ONLY_ON, "")),
        failures_before=_number(failures) if (failures := annotations.get(ANNOTATION_FAILURES_BEFORE)) else None,
        workload=annotations.get(ANNOTATION_WORKLOAD, ""),
        tolerations=_tolerations(spec),
    )


def _agent_port(container: Mapping[str, Any]) -> int | None:
    """Give the port that the agent's container was told; None if it was told none that can be read here, or its command names another."""
    words = [container.get(name) for name in ("command", "args")]
    if any(SERVER_PORT in text(word) for part in words if isinstance(part, list) for word in part):
        return None
    told = [text(one.get("value")) for one in mappings(container.get("env")) if one.get("name") == AGENT_PORT_ENV]
    port = _number(told[-1]) if told else 0
    return port if 0 < port < 65536 else None


def _tolerations(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Give the tolerations that concern taints with the effect NoExecute and do not end, as JSON."""
    lasting = (
        one
        for one in mappings(spec.get("tolerations"))
        if one.get("tolerationSeconds") is None and one.get("effect") in (None, "", "NoExecute")
    )
    return tuple(sys.intern(json.dumps(one, sort_keys=True)) for one in lasting)


def _deletion_grace(meta: Mapping[str, Any], spec: Mapping[str, Any]) -> timedelta:
    """Give the grace period of a pod's deletion, else that of the pod."""
    told = meta.get("deletionGracePeriodSeconds"), spec.get("terminationGracePeriodSeconds"), KUBELET_GRACE_S
    return timedelta(seconds=next(one for one in told if isinstance(one, int) and 0 <= one < 2**31))


def _names_in(listed: str) -> tuple[str, ...]:
    return tuple(filter(None, listed.split(",")))


def _number(label: str | None) -> int:
    return int(label) if label and label.isdecimal() and len(label) < 16 else 0
