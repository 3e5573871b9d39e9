"""Reads the objects that an explanation needs. What may not be read is noted, and the rest is explained."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from elastipod_operator.core.names import GROUP, LABEL_JOB, PLURAL
from elastipod_operator.kube.reading import Body, mapping, mappings, name_of, text, uid_of

from .kubectl import Kubectl, KubectlError, NotFoundError
from .pod_blockers import nodes_of
from .situation import Situation, job_facts

JOBS = f"{PLURAL}.{GROUP}"
KUEUE = "kueue.x-k8s.io"
Found = TypeVar("Found")
NONE: list[dict[str, Any]] = []
# More nodes than this are not named on a command line; then all are listed.
NAMED_NODES = 200


def observe(kubectl: Kubectl, name: str) -> Situation:
    """Read a job and all that belongs to it. Raises KubectlError if the job itself cannot be read, NotFoundError if it does not exist."""
    job = kubectl.get(JOBS, name)
    uid, queue = uid_of(job), job_facts(job, datetime.now(UTC)).queue
    within = replace(kubectl, namespace=text(mapping(job.get("metadata")).get("namespace")))
    unread: dict[str, str] = {}

    def or_else(kind: str, read: Callable[[], Found], otherwise: Found) -> Found:
        try:
            return read()
        except NotFoundError:
            return otherwise
        except KubectlError as error:
            unread[kind] = str(error)
            return otherwise

    with ThreadPoolExecutor() as calls:
        of_event = f"--field-selector=involvedObject.uid={uid}"
        events = calls.submit(or_else, "events", lambda: within.items("events", of_event), NONE)
        of_workload = f"--selector={KUEUE}/job-uid={uid}"
        workloads = calls.submit(
            or_else, "workloads", lambda: within.items(f"workloads.{KUEUE}", of_workload) if queue else NONE, NONE
        )
        local_queue = calls.submit(or_else, "localqueues", lambda: _queue(within, "localqueues", queue), None)
        listed = or_else("pods", lambda: within.items("pods", f"--selector={LABEL_JOB}={name}"), NONE)
        pods = [pod for pod in listed if uid in _owners(pod)]
        nodes = calls.submit(or_else, "nodes", lambda: _nodes(within, nodes_of(pods)), NONE)
        leads_to = text(mapping(mapping(local_queue.result() or {}).get("spec")).get("clusterQueue"))
        cluster_queue = or_else("clusterqueues", lambda: _queue(within, "clusterqueues", leads_to), None)
        return Situation(
            now=datetime.now(UTC), job=job, pods=pods, workloads=workloads.result(), events=events.result(),
            nodes={name_of(node): node for node in nodes.result()}, unread=unread,
            local_queue=local_queue.result(), cluster_queue=cluster_queue,
        )  # fmt: skip


def _queue(kubectl: Kubectl, kind: str, name: str) -> dict[str, Any] | None:
    return kubectl.get(f"{kind}.{KUEUE}", name) if name else None


def _nodes(kubectl: Kubectl, names: list[str]) -> list[dict[str, Any]]:
    if len(names) > NAMED_NODES:
        return [node for node in kubectl.items("nodes") if name_of(node) in names]
    return kubectl.named("nodes", names)


def _owners(body: Body) -> list[str]:
    return [text(owner.get("uid")) for owner in mappings(mapping(body.get("metadata")).get("ownerReferences"))]
