"""The cache of jobs, their pods and the nodes.

Watches may be late, so responses to the operator's own writes are added too, and older versions never replace newer ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from .. import clock
from ..core.growth_mode import GrowthMode
from ..core.names import LABEL_UID
from ..core.snapshot import ObservedJob, ObservedNode, ObservedPod, ObservedWorkload
from .first_seen import job_as_seen, pod_as_seen, workload_as_seen
from .limits import without_unused_parts
from .observed_job import effective_job
from .observed_node import Disruption, disruption_of, observe_node
from .observed_pod import observe_pod
from .reading import labels_of, mapping, mappings, name_of, text, uid_of
from .versioned_cache import VersionedCache
from .workloads import LABEL_OF_JOB, digest_of, workload_fact

# Versions of etcd have 64 bits.
MAX_DIGITS = 20
NO_DISRUPTION = Disruption("", ())


@dataclass(frozen=True, slots=True)
class CachedWorkload:
    """A Workload of a job, and the digest of the templates for which it was created."""

    fact: ObservedWorkload
    digest: str


@dataclass(slots=True)
class Job:
    """A job as last seen. body: the object with the spec in effect, for its templates and annotations."""

    body: Mapping[str, Any]
    fact: ObservedJob
    version: int
    pods: dict[str, ObservedPod] = field(default_factory=dict)
    """By pod UID."""
    listed: bool = False
    """The pods are known, usually from a list. Before that an absent pod proves nothing."""
    pods_listed_at: datetime | None = None
    """When the pods were last listed."""
    list_version: int = -1
    """Version of the last list. A pod that is neither in it nor newer is gone, even if a late event shows it."""
    pod_versions: dict[str, int] = field(default_factory=dict)
    """The newest version seen of each pod, including deleted ones."""
    workloads: VersionedCache[CachedWorkload] = field(default_factory=VersionedCache)


class Store:
    """Jobs by UID with their pods, and nodes by name. now: gives the time."""

    def __init__(self, now: Callable[[], datetime] = clock.now) -> None:
        self._now = now
        self.jobs: dict[str, Job] = {}
        self.nodes: dict[str, ObservedNode] = {}
        self._disruptions: dict[str, Disruption] = {}
        self.capacity_freed_at: datetime | None = None
        """When capacity last became free: a node became schedulable, for pods that tolerate its taints at least, or a job ended."""

    def put_job(self, body: Mapping[str, Any]) -> bool:
        """Take a job from a watch or from the response to a write; False if it is malformed or a newer version is known."""
        uid, version = uid_of(body), version_of(body)
        if not uid:
            return False
        known = self.jobs.get(uid)
        if known is not None and version <= known.version:
            return False
        body, read = effective_job(body)
        fact = job_as_seen(read, known.fact if known is not None else None, self._now())
        if known is None:
            self.jobs[uid] = Job(without_unused_parts(body), fact, version)
            return True
        had_ended = _has_ended(known.fact)
        known.body, known.fact, known.version = without_unused_parts(body), fact, version
        if _has_ended(known.fact) and not had_ended:
            self.capacity_freed_at = self._now()
        return True

    def drop_job(self, uid: str) -> None:
        """Forget a deleted job and its pods."""
        if self.jobs.pop(uid, None) is not None:
            self.capacity_freed_at = self._now()

    def put_pod(self, body: Mapping[str, Any]) -> str | None:
        """Take a pod; gives the UID of its job when something changed.

        Anyone can write labels, in any namespace, so only a pod that the job owns counts. A pod that arrives before its job is
        dropped, because the first pass over a job lists its pods.
        """
        job = self.jobs.get(labels_of(body).get(LABEL_UID, ""))
        uid, version = uid_of(body), version_of(body)
        if job is None or not uid or not _is_owned(body, job.fact):
            return None
        if version <= job.pod_versions.get(uid, job.list_version):
            return None
        container = job.fact.policy.container if job.fact.policy else ""
        fact = observe_pod(body, container)
        if fact is None:
            return None
        job.pod_versions[uid] = version
        before = job.pods.get(uid)
        fact = pod_as_seen(fact, before, self._now())
        job.pods[uid] = fact
        return job.fact.uid if fact != before else None

    def drop_pod(self, body: Mapping[str, Any]) -> str | None:
        """Forget a deleted pod; gives the UID of its job."""
        job, uid = self.jobs.get(labels_of(body).get(LABEL_UID, "")), uid_of(body)
        if job is None or (uid not in job.pods and not _is_owned(body, job.fact)):
            return None
        job.pod_versions[uid] = max(version_of(body), job.pod_versions.get(uid, -1))
        job.pods.pop(uid, None)
        return job.fact.uid

    def drop_pod_uid(self, job_uid: str, uid: str) -> None:
        """Forget a pod by UIDs."""
        job = self.jobs.get(job_uid)
        if job is not None:
            job.pods.pop(uid, None)

    def replace_pods(self, job_uid: str, bodies: Sequence[Mapping[str, Any]], version: int) -> None:
        """Take a full list of a job's pods. Pods that are neither in it nor newer are gone."""
        job = self.jobs.get(job_uid)
        if job is None:
            return
        present = {uid_of(body) for body in bodies}
        for uid in list(job.pods):
            if uid not in present and job.pod_versions[uid] <= version:
                job.pods.pop(uid)
                job.pod_versions[uid] = version
        for body in bodies:
            self.put_pod(body)
        job.listed, job.pods_listed_at, job.list_version = True, self._now(), max(version, job.list_version)
        # Deleted pods older than the list need no entry: the version of the list keeps them out.
        job.pod_versions = {u: v for u, v in job.pod_versions.items() if u in job.pods or v > job.list_version}

    def expect_no_pods(self, job: Job) -> None:
        """Assume that a job has no pods if no operator has ever written to it: the record is written before pods are created.

        If another operator has just done so, the next write fails, because it names the version that is known here.
        """
        if job.fact.record is None and not job.fact.has_finalizer and not job.body.get("status"):
            job.listed, job.pods_listed_at = True, self._now()

    def put_workload(self, body: Mapping[str, Any]) -> str | None:
        """Take a Workload that a job owns; gives the UID of the job when something changed."""
        job = self._owner_of_workload(body)
        fact = self._workload_of(job, body) if job is not None else None
        if job is None or fact is None:
            return None
        changed = job.workloads.put(fact.uid, version_of(body), CachedWorkload(fact, digest_of(body)))
        return job.fact.uid if changed else None

    def drop_workload(self, body: Mapping[str, Any]) -> str | None:
        """Forget a deleted Workload; gives the UID of its job if it was known."""
        job = self._owner_of_workload(body)
        if job is None or not job.workloads.drop(uid_of(body), version_of(body)):
            return None
        return job.fact.uid

    def replace_workloads(self, job_uid: str, bodies: Sequence[Mapping[str, Any]], version: int) -> bool:
        """Take a full list of a job's Workloads; False when nothing changed."""
        job = self.jobs.get(job_uid)
        if job is None:
            return False
        own = [(body, self._workload_of(job, body)) for body in bodies if _is_owned(body, job.fact)]
        found = {
            fact.uid: (version_of(body), CachedWorkload(fact, digest_of(body)))
            for body, fact in own
            if fact is not None
        }
        return job.workloads.replace(found, version)

    def replace_all_workloads(self, namespace: str, bodies: Sequence[Mapping[str, Any]], version: int) -> list[str]:
        """Take a full list of the Workloads of all jobs of a namespace ("": of all); gives the jobs that see a change."""
        by_job: dict[str, list[Mapping[str, Any]]] = {}
        for body in bodies:
            by_job.setdefault(_job_of_workload(body), []).append(body)
        jobs = [
            uid for uid, job in self.jobs.items() if job.workloads.is_listed and namespace in ("", job.fact.namespace)
        ]
        return [uid for uid in jobs if self.replace_workloads(uid, by_job.get(uid, ()), version)]

    def clear_workloads(self, namespace: str) -> list[str]:
        """Forget the Workloads of a namespace ("": of all) because the API server no longer has the kind; gives the jobs that had some."""
        return [
            uid for uid, job in self.jobs.items() if namespace in ("", job.fact.namespace) and job.workloads.clear()
        ]

    def _workload_of(self, job: Job, body: Mapping[str, Any]) -> ObservedWorkload | None:
        fact = workload_fact(body)
        if fact is None:
            return None
        known = job.workloads.get(fact.uid)
        return workload_as_seen(fact, known.fact if known is not None else None, self._now())

    def _owner_of_workload(self, body: Mapping[str, Any]) -> Job | None:
        job = self.jobs.get(_job_of_workload(body))
        return job if job is not None and _is_owned(body, job.fact) else None

    def put_node(self, body: Mapping[str, Any]) -> list[str]:
        """Take a node; when something changed, gives the UIDs of the jobs that have pods there or wait for capacity."""
        name = name_of(body)
        if not name:
            return []
        before, now = self.nodes.get(name), self._now()
        fact, disruption = observe_node(body, before, now), disruption_of(body)
        known = self._disruptions.pop(name, NO_DISRUPTION)
        self.nodes[name] = fact
        if disruption != NO_DISRUPTION:
            self._disruptions[name] = disruption
        if fact == before and disruption == known:
            return []
        was_fit = before is not None and _is_fit(before, known)
        if not _is_fit(fact, disruption) or (was_fit and all(taint in disruption.taints for taint in known.taints)):
            return self.jobs_on(name)
        self.capacity_freed_at = now
        waiting = (uid for uid, job in self.jobs.items() if _awaits_capacity(job.fact))
        return list(dict.fromkeys((*self.jobs_on(name), *waiting)))

    def drop_node(self, name: str) -> list[str]:
        """Forget a node that was deleted; gives the UIDs of the jobs that had pods there."""
        self.nodes.pop(name, None)
        self._disruptions.pop(name, None)
        return self.jobs_on(name)

    def nodes_of(self, job: Job) -> dict[str, ObservedNode]:
        """Give the nodes of a job's pods by name. A taint that all of its pods there tolerate is no disruption."""
        found = {pod.node: self.nodes[pod.node] for pod in job.pods.values() if pod.node in self.nodes}
        living: dict[str, list[ObservedPod]] = {name: [] for name in found.keys() & self._disruptions.keys()}
        for pod in job.pods.values():
            if pod.node in living and not pod.ended:
                living[pod.node].append(pod)
        for name, there in living.items():
            found[name] = replace(found[name], disruption=_reason_to_leave(self._disruptions[name], there))
        return found

    def closed_nodes(self) -> dict[str, str]:
        """Give the nodes that new pods must keep away from, although the scheduler does not know it, and what they announce."""
        return {name: node.closed for name, node in self.nodes.items() if node.closed}

    def jobs_on(self, node: str) -> list[str]:
        """Give the UIDs of the jobs with pods on a node, or with pods that avoid it."""
        return [
            uid for uid, job in self.jobs.items() if any(node == p.node or node in p.avoids for p in job.pods.values())
        ]


def _reason_to_leave(disruption: Disruption, pods: Iterable[ObservedPod]) -> str:
    """Say why some of these pods must leave their node; empty when all may stay."""
    kinds = sorted({pod.tolerations for pod in pods}) or [()]
    reasons = (disruption.reason_for([json.loads(one) for one in kind]) for kind in kinds)
    return next(filter(None, reasons), "")


def _is_fit(node: ObservedNode, disruption: Disruption) -> bool:
    """Whether pods that tolerate its taints may go there."""
    return node.ready and not node.cordoned and not disruption.announced


def _has_ended(job: ObservedJob) -> bool:
    return job.record is not None and bool(job.record.outcome)


def _awaits_capacity(job: ObservedJob) -> bool:
    """Whether no pod of the job may be pending: it grows on spare capacity, or a partial gang has released its nodes."""
    if job.policy is not None and job.policy.growth is GrowthMode.SPARE_CAPACITY_ONLY:
        return True
    return job.record is not None and job.record.gang is not None and job.record.gang.released_until is not None


def _is_owned(body: Mapping[str, Any], job: ObservedJob) -> bool:
    meta = mapping(mapping(body).get("metadata"))
    owners = mappings(meta.get("ownerReferences"))
    return meta.get("namespace") == job.namespace and any(
        o.get("uid") == job.uid and o.get("controller") for o in owners
    )


def _job_of_workload(body: Mapping[str, Any]) -> str:
    return labels_of(body).get(LABEL_OF_JOB, "")


def version_of(body: Any) -> int:
    """Give an object's version. Those of one kind are comparable as numbers on every API server with etcd behind it."""
    version = text(mapping(mapping(body).get("metadata")).get("resourceVersion"))
    return int(version) if version.isdecimal() and len(version) < MAX_DIGITS else 0
