"""What the watches have shown: jobs, their pods and the nodes, as small records (decision 8).

Reads may be stale, so the answers to our own writes are put in as well and older versions never replace newer ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ..core.facts import JobFact, NodeFact, PodFact
from ..core.names import LABEL_UID
from .translate import job_fact, node_fact, pod_fact


@dataclass(slots=True)
class Job:
    """A job as last seen. body is kept because its templates and annotations are needed as they are."""

    body: Mapping[str, Any]
    fact: JobFact
    version: int
    pods: dict[str, PodFact] = field(default_factory=dict)
    """By pod UID."""
    listed: bool = False
    """True once the API server was asked for the pods: before that an absent pod proves nothing."""


class Store:
    """Jobs by UID with their pods, and nodes by name."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.nodes: dict[str, NodeFact] = {}
        self._pod_versions: dict[str, int] = {}
        self._early_pods: dict[str, dict[str, Mapping[str, Any]]] = {}

    def put_job(self, body: Mapping[str, Any]) -> bool:
        """Take a job from a watch or from the answer to a write; False when a newer one is known already."""
        uid, version = body["metadata"]["uid"], _version(body)
        known = self.jobs.get(uid)
        if known is None:
            self.jobs[uid] = Job(body, job_fact(body), version)
            for pod in self._early_pods.pop(uid, {}).values():
                self.put_pod(pod)
            return True
        if version <= known.version:
            return False
        known.body, known.fact, known.version = body, job_fact(body), version
        return True

    def drop_job(self, uid: str) -> None:
        """Forget a job that is gone, and its pods."""
        job = self.jobs.pop(uid, None)
        for pod in job.pods if job else ():
            self._pod_versions.pop(pod, None)
        self._early_pods.pop(uid, None)

    def put_pod(self, body: Mapping[str, Any]) -> str | None:
        """Take a pod; gives the UID of its job when something changed."""
        job_uid = (body["metadata"].get("labels") or {}).get(LABEL_UID)
        if not job_uid:
            return None
        uid, version = body["metadata"]["uid"], _version(body)
        job = self.jobs.get(job_uid)
        if job is None:
            self._early_pods.setdefault(job_uid, {})[uid] = body
            return None
        if version <= self._pod_versions.get(uid, -1):
            return None
        container = job.fact.policy.container if job.fact.policy else ""
        fact = pod_fact(body, container)
        if fact is None:
            return None
        self._pod_versions[uid] = version
        before = job.pods.get(uid)
        job.pods[uid] = fact
        return str(job_uid) if fact != before else None

    def drop_pod(self, body: Mapping[str, Any]) -> str | None:
        """Forget a pod that is gone; gives the UID of its job."""
        job_uid = (body["metadata"].get("labels") or {}).get(LABEL_UID)
        if not job_uid:
            return None
        self.drop_pod_uid(job_uid, body["metadata"]["uid"])
        return str(job_uid)

    def drop_pod_uid(self, job_uid: str, uid: str) -> None:
        """Forget a pod by UIDs."""
        self._early_pods.get(job_uid, {}).pop(uid, None)
        job = self.jobs.get(job_uid)
        if job is not None:
            job.pods.pop(uid, None)

    def replace_pods(self, job_uid: str, bodies: list[Mapping[str, Any]], listed_at: int) -> None:
        """Take a full list of a job's pods: what is not in it and not newer than it is gone."""
        job = self.jobs.get(job_uid)
        if job is None:
            return
        present = {body["metadata"]["uid"] for body in bodies}
        for uid in list(job.pods):
            if uid not in present and self._pod_versions.get(uid, 0) <= listed_at:
                self.drop_pod_uid(job_uid, uid)
        for body in bodies:
            self.put_pod(body)
        job.listed = True

    def put_node(self, body: Mapping[str, Any]) -> list[str]:
        """Take a node; gives the UIDs of the jobs that have pods there when something changed."""
        name = body["metadata"]["name"]
        before = self.nodes.get(name)
        fact = node_fact(body, before, datetime.now(UTC))
        self.nodes[name] = fact
        return self.jobs_on(name) if fact != before else []

    def drop_node(self, name: str) -> list[str]:
        """Forget a node that was deleted; gives the UIDs of the jobs that had pods there."""
        self.nodes.pop(name, None)
        return self.jobs_on(name)

    def jobs_on(self, node: str) -> list[str]:
        """Give the UIDs of the jobs with pods on a node."""
        return [uid for uid, job in self.jobs.items() if any(pod.node == node for pod in job.pods.values())]


def _version(body: Mapping[str, Any]) -> int:
    """resourceVersions of one kind of object are comparable as numbers on every API server with etcd behind it."""
    text = str(body["metadata"].get("resourceVersion") or "0")
    return int(text) if text.isdigit() else 0
