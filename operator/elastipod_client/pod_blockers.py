"""Blockers that the pods of a job and their nodes show, also those that no condition repeats."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime

from elastipod_operator.core.names import ANNOTATION_NODE_SIGNALS
from elastipod_operator.core.reasons import AnyReason, Reason
from elastipod_operator.core.snapshot import ObservedPod
from elastipod_operator.kube.node_signals import SignalEffect, parse_signals
from elastipod_operator.kube.observed_node import Disruption, disruption_of
from elastipod_operator.kube.observed_pod import observe_pod
from elastipod_operator.kube.reading import Body, condition_of, mapping, mappings, name_of, text
from elastipod_operator.kube.times import time_or

from .blocker import Blocker, blocker_of
from .situation import UNKNOWN, JobFacts, Situation

NAMED = 3


def pod_blockers(situation: Situation, job: JobFacts) -> list[Blocker]:
    """Give what keeps pods from running or from ending, each problem once with the pods that have it."""
    container = text(mapping(mapping(situation.job.get("spec")).get("elastipod")).get("container"))
    pods = [(body, pod) for body in situation.pods if (pod := observe_pod(body, container)) is not None]
    if job.has_ended:
        pods = [(body, pod) for body, pod in pods if not pod.ended]
    found = _not_starting([pair for pair in pods if pair[1].deletion_grace is None], situation.now)
    found += _not_ending(pods, situation.now)
    return found + _sick_nodes(pods, situation, _signals(job.annotations.get(ANNOTATION_NODE_SIGNALS, "")))


def _signals(written: str) -> dict[str, SignalEffect]:
    """Read what the job's operator is told about announcements of nodes; nothing, if that cannot be read."""
    try:
        return parse_signals(written)
    except ArgumentTypeError:
        return {}


def _not_starting(pods: Iterable[tuple[Body, ObservedPod]], now: datetime) -> list[Blocker]:
    names: dict[tuple[AnyReason, str], list[str]] = defaultdict(list)
    since: dict[tuple[AnyReason, str], datetime] = {}
    for body, pod in pods:
        if pod.problem and pod.problem_reason != Reason.NO_SCHEDULER:
            # The scheduler's words are the same for many pods; the others name their pod.
            key = (pod.problem_reason, pod.problem)
            names[key].append(pod.name)
            since[key] = min(since.get(key, now), _problem_since(body, now))
    return [
        blocker_of(reason, named("pod", names[reason, message]), message, since[reason, message])
        for reason, message in names
    ]


def _problem_since(body: Body, now: datetime) -> datetime:
    """Give when the scheduler first failed, else when the pod was created."""
    conditions = mappings(mapping(body.get("status")).get("conditions"))
    scheduled = next((c for c in conditions if c.get("type") == "PodScheduled" and c.get("status") == "False"), {})
    created = time_or(mapping(body.get("metadata")).get("creationTimestamp"), now)
    return time_or(scheduled.get("lastTransitionTime"), created)


def _not_ending(pods: Iterable[tuple[Body, ObservedPod]], now: datetime) -> list[Blocker]:
    found = []
    for body, pod in pods:
        until = time_or(mapping(body.get("metadata")).get("deletionTimestamp"), now)
        if pod.deletion_grace is not None and until < now:
            where = f"node {pod.node}" if pod.node else "no node"
            message = f"pod {pod.name} on {where} should have ended by now, and is still there"
            found.append(blocker_of(Reason.PODS_NOT_DELETED, f"pod {pod.name}", message, until))
    return found


def _sick_nodes(
    pods: Iterable[tuple[Body, ObservedPod]], situation: Situation, signals: Mapping[str, SignalEffect]
) -> list[Blocker]:
    """Give the nodes of pods that are lost or announce their end. A node is only missed if nodes could be read."""
    by_node: dict[str, list[Body]] = defaultdict(list)
    for found_pod, pod in pods:
        if pod.node and not pod.ended:
            by_node[pod.node].append(found_pod)
    found = []
    for node, there in sorted(by_node.items()):
        body = situation.nodes.get(node)
        where = f"node {node} ({named('pod', [*map(name_of, there)])})"
        if body is None:
            if "nodes" not in situation.unread:
                found.append(blocker_of(Reason.NODE_DELETED, f"node {node}", f"{where} does not exist any more", None))
            continue
        ready = condition_of(body, "Ready")
        if ready.get("status") != "True":
            at = time_or(ready.get("lastTransitionTime"), UNKNOWN)
            since = at if at is not UNKNOWN else None
            found.append(blocker_of(Reason.NODE_LOST, f"node {node}", f"{where} is not ready", since))
        found += _drained(node, there, disruption_of(body, signals))
    return found


def _drained(node: str, pods: Iterable[Body], disruption: Disruption) -> list[Blocker]:
    """Give why pods must leave their node, each reason once. Pods stay where they tolerate the taint."""
    leave: dict[str, list[str]] = defaultdict(list)
    for pod in pods:
        if reason := disruption.reason_for(mappings(mapping(pod.get("spec")).get("tolerations"))):
            leave[reason].append(name_of(pod))
    return [
        blocker_of(
            Reason.NODE_DRAINED, f"node {node}", f"pods must leave node {node} ({named('pod', names)}): {reason}", None
        )
        for reason, names in leave.items()
    ]


def named(what: str, names: list[str]) -> str:
    """Name some objects: "pod a", "pods a, b and 2 more"."""
    shown = ", ".join(sorted(names)[:NAMED])
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{what if len(names) == 1 else what + 's'} {shown}{more}"


def pods_left(situation: Situation) -> str:
    """Say which pods of a job that is being deleted still exist."""
    names = [name_of(body) for body in situation.pods]
    return named("pod", names) if names else ""


def nodes_of(pods: Iterable[Mapping[str, object]]) -> list[str]:
    """Give the names of the nodes on which pods run."""
    return sorted({name for pod in pods if (name := text(mapping(pod.get("spec")).get("nodeName")))})
