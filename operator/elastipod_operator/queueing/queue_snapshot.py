"""The part of a snapshot that comes from Kueue."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .. import clock, metrics
from ..core.queue_facts import QueueFact
from ..core.queue_warnings import eviction_due_at
from ..core.quota import DEFAULT_QUEUE
from ..core.reasons import ReasonAndMessage
from ..core.snapshot import ObservedWorkload, Policy
from ..kube.api import CALL_ERRORS, ApiError
from ..kube.applied import effective_spec
from ..kube.store import Job
from ..kube.workloads import ranked, templates_digest
from .workload_control import (
    LAST_RETRY_S,
    PLACING,
    RELEASING,
    QuotaState,
    WorkloadControl,
    is_kueue_away,
    quota_error,
    release_error,
)

log = logging.getLogger(__name__)

LISTING, LEFTOVERS = "listing", "left"
RELEASE_PROBLEMS = (LEFTOVERS, RELEASING)


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """As in `Snapshot`."""

    workloads: tuple[ObservedWorkload, ...] = ()
    default_queue: bool | None = None
    problem: ReasonAndMessage | None = None
    queue: QueueFact | None = None
    quota_return_error: str = ""


async def observe(control: WorkloadControl, job: Job) -> None:
    """Read what a decision needs and the caches lack."""
    fact = job.fact
    named = bool(fact.queue or fact.queue_in_template)
    if fact.deleting_since is not None:
        if named or _is_in_queue(control, job):
            await _list_what_is_left(control, job)
        return
    if (fact.record is None or not fact.was_reconciled) and not named and control.state(job).default_queue is None:
        control.state(job).default_queue = await _has_default(control, fact.namespace)
    if not job.workloads.is_listed and (named or _is_in_queue(control, job)):
        control.needed.set()
        await _list(control, job)


def snapshot(control: WorkloadControl, job: Job) -> QueueSnapshot:
    """Give the present state of the caches."""
    state, workloads = control.known_state(job), workloads_of(job)
    if state is None and not workloads:
        return QueueSnapshot()
    state = control.state(job)
    _measure(state, workloads, job.fact.policy)
    if not any(workload.name == state.unplaced and workload.is_granted for workload in workloads):
        state.problems.pop(PLACING, None)  # it concerned quota that the job has no more
    problem = next((said for what, said in state.problems.items() if what not in RELEASE_PROBLEMS), None)
    queue = control.reader.fact(job.fact, workloads)
    kept = next((state.problems[what][1] for what in RELEASE_PROBLEMS if what in state.problems), "")
    return QueueSnapshot(workloads, state.default_queue, problem, queue, kept)


def workloads_of(job: Job) -> tuple[ObservedWorkload, ...]:
    """Give the Workloads of a job, compared with its templates in effect and its priorities."""
    asked = job.workloads.items
    if not asked or job.fact.policy is None:
        return tuple(one.fact for one in asked)
    spec = effective_spec(job.body)
    now = {names: templates_digest(spec, names) for names in {_names(one.fact) for one in asked}}
    base = next((one.fact for one in asked if one.fact.number == 0), None)
    return tuple(
        replace(
            ranked(one.fact, job.body, spec, base), is_outdated=bool(one.digest) and one.digest != now[_names(one.fact)]
        )
        for one in asked
    )


def _names(workload: ObservedWorkload) -> tuple[str, ...]:
    return tuple(name for name, count in workload.counts if count)


async def _has_default(control: WorkloadControl, namespace: str) -> bool:
    try:
        await control.api.read_local_queue(namespace, DEFAULT_QUEUE)
    except ApiError as error:
        if error.status == 404:
            return False
        if error.status == 403:
            log.warning("cannot look for LocalQueue %s in namespace %s: %s", DEFAULT_QUEUE, namespace, error)
            return False
        # Only what is there has to be converted.
        if is_kueue_away(error) and "conversion" in str(error):
            return True
        raise
    return True


def _is_in_queue(control: WorkloadControl, job: Job) -> bool:
    record, state = job.fact.record, control.known_state(job)
    if record is not None and record.queue:
        return True
    # Removing the label does not remove the quota on which pods run.
    return bool(state is not None and state.default_queue) or any(pod.workload for pod in job.pods.values())


async def _list(control: WorkloadControl, job: Job) -> None:
    fact = job.fact
    try:
        bodies, version = await control.api.list_workloads(fact.namespace, fact.uid)
    except CALL_ERRORS as error:
        is_missing = isinstance(error, ApiError) and error.status == 404
        if is_missing:
            control.store.replace_workloads(fact.uid, (), 0)
        elif job.pods:
            raise
        # Without pods the job may safely count as one without quota; the next pass retries.
        problem = quota_error(error)
        control.state(job).problems[LISTING] = (problem.reason, str(problem))
        if not is_missing:
            control.wake_later(job, LAST_RETRY_S)  # nothing else wakes an idle job
        return
    control.state(job).problems.pop(LISTING, None)
    control.store.replace_workloads(fact.uid, bodies, version)


async def _list_what_is_left(control: WorkloadControl, job: Job) -> None:
    """List the Workloads of a job that is being deleted, and again when its pods are gone, because the last request may be unknown.

    If that fails, the pods are deleted and known quota is released nevertheless.
    """
    retry = control.state(job).listing
    if (job.workloads.is_listed and job.pods) or not retry.is_due():
        return
    try:
        bodies, version = await control.api.list_workloads(job.fact.namespace, job.fact.uid)
    except CALL_ERRORS as error:
        if not isinstance(error, ApiError) or error.status != 404:
            control.retry_later(job, retry, "the Workloads of a deleted job could not be listed", error)
            control.report_problem(job, LEFTOVERS, release_error(error))
            return
        job.workloads.clear()  # the API server no longer has Workloads
        bodies, version = [], 0
    retry.reset()
    control.store.replace_workloads(job.fact.uid, bodies, version)
    control.clear_problem(job, LEFTOVERS)
    if not job.workloads.items:
        control.clear_problem(job, RELEASING)


def _measure(state: QuotaState, workloads: Sequence[ObservedWorkload], policy: Policy | None) -> None:
    now = clock.now()
    for workload in workloads:
        share = "increment" if workload.number else "base"
        if not (workload.admitted or workload.finished):
            state.waiting.setdefault(workload.uid, now)
        elif (since := state.waiting.pop(workload.uid, None)) is not None and workload.admitted:
            metrics.QUOTA_WAIT_SECONDS.labels(share).observe((now - since).total_seconds())
        if workload.eviction_reason and workload.uid not in state.evicted:
            metrics.EVICTIONS.labels(share, metrics.eviction_cause(workload.eviction_reason)).inc()
    present = {workload.uid for workload in workloads}
    state.late = (
        sum((at := eviction_due_at(w, policy)) is not None and at <= now for w in workloads)
        if policy is not None
        else 0
    )
    state.evicted = {workload.uid for workload in workloads if workload.eviction_reason}
    state.waiting = {uid: since for uid, since in state.waiting.items() if uid in present}
