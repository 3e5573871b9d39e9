"""Kueue's own jobs beside ours: what they are made of, who plays their pods, and whether anybody wrote to what is another's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from tests.api.compat_nodes import PlayedNodes
from tests.api.etcd_history import Change
from tests.api.kueue_objects import API, pod_spec
from tests.api.quota_checker import JOB, POD, WORKLOAD

BATCH_JOB = "Job"
GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"
GROUP_COUNT = "kueue.x-k8s.io/pod-group-total-count"
KUEUE = "kueue"
# The scheduler, and the node that a test plays.
NODES = {"kube-scheduler", "Python"}
WRITERS_OF_OUR_PODS = {"elastipod-operator", *NODES}
# Beside Kueue, whose managers' names begin with its own: whoever handed it in, and who makes pods of Jobs.
WRITERS_OF_THEIRS = {"kubectl-client-side-apply", "kube-controller-manager", *NODES}
# Labels, annotations and finalizers that begin like that have no place on what is not ours.
OUR_MARKS = ("elastipod.io", "HPJob", "sagemaker.amazonaws.com")
Body = dict[str, Any]


class SharedNodes(PlayedNodes):
    """Nodes on which pods of anybody run. Pods that are not ours run until they are let go, or sent away."""

    def finish(self, pods: Iterable[str]) -> None:
        """Let these pods come to a good end."""

        async def let_end() -> None:
            await asyncio.gather(*(self._succeed(self.seen[name]) for name in pods))

        self._call(let_end())

    async def _end(self, pod: dict[str, Any], *, delete: bool) -> None:
        if delete and "HPJob" not in pod["metadata"].get("labels", {}):
            # As a kubelet does: finalizers of others wait for it.
            await self._patch_status(pod, {"phase": "Failed"})
        await super()._end(pod, delete=delete)


def parallel_job(name: str, namespace: str, queue: str, priority: str, pods: int) -> Body:
    """Give a Job of so many pods with a CPU each, handed in to a queue."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": namespace, "labels": _labels(queue, priority)},
        "spec": {"parallelism": pods, "completions": pods, "template": {"spec": pod_spec(cpu="1")}},
    }


def plain_pod(name: str, namespace: str, queue: str, priority: str) -> Body:
    """Give a pod with a CPU, handed in to a queue."""
    metadata = {"name": name, "namespace": namespace, "labels": _labels(queue, priority)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod_spec(cpu="1")}


def pod_group(name: str, namespace: str, queue: str, priority: str, pods: int, first: int = 0) -> list[Body]:
    """Give the pods of a group, handed in to a queue as one; they are numbered from `first` on."""
    found = [plain_pod(f"{name}-{number}", namespace, queue, priority) for number in range(first, first + pods)]
    for pod in found:
        pod["metadata"]["labels"][GROUP_LABEL] = name
        pod["metadata"]["annotations"] = {GROUP_COUNT: str(pods)}
    return found


def _labels(queue: str, priority: str) -> dict[str, str]:
    return {"kueue.x-k8s.io/queue-name": queue, "kueue.x-k8s.io/priority-class": priority}


def shared_paths(namespace: str) -> dict[str, str]:
    """Give the paths of all that either side writes."""
    return {
        POD: f"/api/v1/namespaces/{namespace}/pods",
        WORKLOAD: f"/apis/{API}/namespaces/{namespace}/workloads",
        BATCH_JOB: f"/apis/batch/v1/namespaces/{namespace}/jobs",
        JOB: f"/apis/sagemaker.amazonaws.com/v1/namespaces/{namespace}/hyperpodpytorchjobs",
    }


def is_ours(change: Change) -> bool:
    """Whether an object belongs to a job of the operator's, or is one."""
    owners = change.body["metadata"].get("ownerReferences", ())
    return change.kind == JOB or any(one["kind"] == JOB and one.get("controller") for one in owners)


def trespasses(history: Iterable[Change], deleted_by_us: set[str]) -> set[str]:
    """Say, once each, what was written to an object by a side that it does not belong to.

    deleted_by_us: UIDs of pods and Workloads that the operator says it has sent away.
    """
    found: set[str] = set()
    for change in history:
        found |= {
            f"{change.kind} {change.body['metadata']['name']}: {what}"
            for what in (_of_ours(change, deleted_by_us) if is_ours(change) else _of_theirs(change, deleted_by_us))
        }
    return found


def _of_ours(change: Change, deleted_by_us: set[str]) -> list[str]:
    meta, spec = change.body["metadata"], change.body["spec"]
    marks = [mark for mark in meta.get("finalizers", ()) if KUEUE in mark]
    marks += [gate["name"] for gate in spec.get("schedulingGates", ()) if KUEUE in gate["name"]]
    found = [f"Kueue holds it by {mark}" for mark in marks]
    for manager, part in _writers(change.body):
        if change.kind == POD and manager not in WRITERS_OF_OUR_PODS:
            found.append(f"{manager} wrote to it")
        elif manager.startswith(KUEUE) and (change.kind, part) != (WORKLOAD, "status"):
            found.append(f"{manager} wrote to its {part or 'body'}")
    is_going = "deletionTimestamp" in meta or change.type == "DELETED"
    if change.kind in (POD, WORKLOAD) and is_going and change.uid not in deleted_by_us:
        found.append("it was deleted, and not by the operator")
    return found


def _of_theirs(change: Change, deleted_by_us: set[str]) -> list[str]:
    meta = change.body["metadata"]
    found = [
        f"{manager} wrote to it"
        for manager, _ in _writers(change.body)
        if manager not in WRITERS_OF_THEIRS and not manager.startswith(KUEUE)
    ]
    marks = [*meta.get("labels", {}), *meta.get("annotations", {}), *meta.get("finalizers", ())]
    found += [f"it bears {mark}" for mark in marks if mark.startswith(OUR_MARKS)]
    return [*found, *(["the operator deleted it"] if change.uid in deleted_by_us else ())]


def _writers(body: Body) -> set[tuple[str, str]]:
    return {(entry["manager"], entry.get("subresource", "")) for entry in body["metadata"].get("managedFields", ())}
