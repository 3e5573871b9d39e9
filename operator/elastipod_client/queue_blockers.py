"""Blockers that the Workloads and the queue of a job show, in Kueue's own words."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime

from elastipod_operator.core.reasons import Reason, Severity
from elastipod_operator.kube.reading import Body, condition_of, mapping, mappings, name_of, text
from elastipod_operator.kube.times import time_or

from .blocker import Blocker, blocker_of, kueue_advice
from .pod_blockers import named
from .situation import JobFacts, Situation


def queue_blockers(situation: Situation, job: JobFacts) -> list[Blocker]:
    """Give what the job's queue and each of its Workloads wait for; nothing for a job without a queue, or that has ended."""
    if not job.queue or job.has_ended or job.deleting_since is not None:
        return []
    return [*_queue_problems(situation, job), *_waiting(situation), *_evicted(situation)]


def _queue_problems(situation: Situation, job: JobFacts) -> list[Blocker]:
    if situation.local_queue is None:
        if "localqueues" in situation.unread:
            return []
        message = f"LocalQueue {job.queue} does not exist in the job's namespace"
        return [blocker_of(Reason.QUEUE_MISSING, f"LocalQueue {job.queue}", message, None)]
    found = []
    for kind, queue in (("LocalQueue", situation.local_queue), ("ClusterQueue", situation.cluster_queue)):
        if queue is None:
            continue
        active = condition_of(queue, "Active")
        if active.get("status") == "False":
            what = f"{kind} {name_of(queue)}"
            is_stopped = text(mapping(queue.get("spec")).get("stopPolicy")) not in ("", "None")
            reason = Reason.QUEUE_STOPPED if is_stopped else Reason.QUEUE_INACTIVE
            message = f"{what} admits nothing: {text(active.get('message'))}"
            found.append(blocker_of(reason, what, message, _since(active, situation.now)))
    return found


def _waiting(situation: Situation) -> list[Blocker]:
    """Give the Workloads without quota; those for which Kueue says the same stand together."""
    names: dict[str, list[str]] = defaultdict(list)
    since: dict[str, datetime] = {}
    for body in situation.workloads:
        reserved = condition_of(body, "QuotaReserved")
        if _is(body, "Admitted") or _is(body, "Finished") or mapping(body.get("spec")).get("active") is False:
            continue
        condition = condition_of(body, "Admitted") if reserved.get("status") == "True" else reserved
        message = text(condition.get("message")) or "Kueue has not considered it yet"
        names[message].append(name_of(body))
        created = time_or(mapping(body.get("metadata")).get("creationTimestamp"), situation.now)
        since[message] = min(since.get(message, situation.now), time_or(condition.get("lastTransitionTime"), created))
    return [
        blocker_of(
            Reason.QUEUED, _workloads(one), f"{_workloads(one)} waits for quota: {message}", since[message]
        )
        for message, one in names.items()
    ]  # fmt: skip


def _evicted(situation: Situation) -> list[Blocker]:
    found = []
    for body in situation.workloads:
        evicted = condition_of(body, "Evicted")
        if evicted.get("status") == "True" and _is(body, "QuotaReserved") and not _is(body, "Finished"):
            reason, what = text(evicted.get("reason")), f"Workload {name_of(body)}"
            found.append(
                Blocker(
                    reason=Reason.QUOTA_LOST, where=what, since=_since(evicted, situation.now), severity=Severity.INFO,
                    message=f"Kueue evicts {what} ({reason}): {text(evicted.get('message'))}",
                    advice=kueue_advice(reason),
                )
            )  # fmt: skip
    return found


def usage_text(cluster_queue: Body | None) -> str:
    """Say how full a ClusterQueue is: "ClusterQueue gpu: 8 of 8 nvidia.com/gpu used (flavor a100); 2 Workloads wait there"."""
    if cluster_queue is None:
        return ""
    nominal = {
        (text(flavor.get("name")), text(resource.get("name"))): resource.get("nominalQuota")
        for group in mappings(mapping(cluster_queue.get("spec")).get("resourceGroups"))
        for flavor in mappings(group.get("flavors"))
        for resource in mappings(flavor.get("resources"))
    }
    status = mapping(cluster_queue.get("status"))
    used = [
        f"{resource.get('total')} of {nominal.get((text(flavor.get('name')), text(resource.get('name'))), '?')} "
        f"{text(resource.get('name'))} used (flavor {text(flavor.get('name'))})"
        for flavor in mappings(status.get("flavorsUsage"))
        for resource in mappings(flavor.get("resources"))
    ]
    pending = status.get("pendingWorkloads")
    waiting = [f"pending Workloads: {pending}"] if isinstance(pending, int) and pending else []
    return f"ClusterQueue {name_of(cluster_queue)}: {', '.join([*used, *waiting])}" if used or waiting else ""


def _workloads(names: list[str]) -> str:
    return named("Workload", names) if len(names) == 1 else f"each of the {named('Workload', names)}"


def _is(body: Body, kind: str) -> bool:
    return condition_of(body, kind).get("status") == "True"


def _since(condition: Body, now: datetime) -> datetime:
    return time_or(condition.get("lastTransitionTime"), now)
