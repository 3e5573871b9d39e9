"""Releases quota, and reports ready pods to Kueue.

Quota is released only when a list from the API server shows no living pod on it, because a watch may be late.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from .. import clock
from ..core.actions import DeleteWorkload, FinishWorkload, Plan, ReleaseBaseQuota, SetPodsReady
from ..core.quota import effective_quota_requests, is_on
from ..core.snapshot import ObservedPod, ObservedWorkload
from ..kube.api import CALL_ERRORS, ApiError
from ..kube.store import Job
from ..kube.workload_status import finished_status, pods_ready_status, release_patch
from ..kube.workloads import workload_fact
from ..kube.writes import log_fields, timed_write
from .workload_control import (
    FIRST_RETRY_S,
    RELEASING,
    WorkloadControl,
    call_for_each,
    is_for_good,
    is_kueue_away,
    release_error,
)

log = logging.getLogger(__name__)

# After this many failed releases a base is deleted and requested again.
MAX_FAILED_RELEASES = 3

ReleaseAction = DeleteWorkload | ReleaseBaseQuota | FinishWorkload


async def release_quota(
    control: WorkloadControl, job: Job, todo: Plan, list_pods: Callable[[Job], Awaitable[None]]
) -> None:
    """Carry out the actions that release quota. One that fails is retried later and does not hold up the others."""
    orders = [a for a in todo.actions if isinstance(a, ReleaseAction)]
    retry, is_deleting = control.state(job).releasing, job.fact.deleting_since is not None
    if not orders and not is_deleting:
        control.clear_problem(job, RELEASING)
    if not orders or not retry.is_due():
        return
    in_turn = sorted(orders, key=lambda order: _release_order(control, job, order))
    try:
        await list_pods(job)
        await call_for_each(in_turn, lambda order: _give(control, job, order))
    except CALL_ERRORS as error:
        control.retry_later(job, retry, "quota could not be returned", error)
        if is_deleting or is_for_good(error):
            control.report_problem(job, RELEASING, release_error(error))
    else:
        retry.reset()
        control.clear_problem(job, RELEASING)


async def report_pods_ready(control: WorkloadControl, job: Job, todo: Plan) -> None:
    """Set condition PodsReady of Workloads."""
    orders = [a for a in todo.actions if isinstance(a, SetPodsReady)]
    if not orders or not control.state(job).reporting_ready.is_due():
        return
    at = clock.now()
    try:
        await call_for_each(
            orders, lambda order: _apply(control, job, order.name, pods_ready_status(job.fact.namespace, order, at))
        )
    except CALL_ERRORS as error:
        control.retry_later(
            job, control.state(job).reporting_ready, "readiness of pods could not be reported to Kueue", error
        )
    else:
        control.state(job).reporting_ready.reset()


def pods_on(job: Job, workload: ObservedWorkload) -> list[ObservedPod]:
    """Give the living pods on a Workload's quota: those created for it, and those in its slots."""
    policy = job.fact.policy
    base = next((asked.fact for asked in job.workloads.items if asked.fact.number == 0), None)
    shares = effective_quota_requests(policy, base) if policy is not None else ()
    return [p for p in job.pods.values() if not p.ended and is_on(p, workload, shares)]


def _release_order(control: WorkloadControl, job: Job, order: ReleaseAction) -> tuple[bool, bool]:
    """Order releases so that those that free quota come first: calls take time, and pending Workloads hold no quota."""
    workload = control.workload(job, order.name)
    return workload is None or not workload.eviction_reason, workload is None or not workload.reserved


async def _give(control: WorkloadControl, job: Job, order: ReleaseAction) -> None:
    workload = control.workload(job, order.name)
    if workload is None or workload.uid != order.uid:
        return
    # A pending Workload holds no quota: it is deleted at once, before Kueue admits it.
    if pods_on(job, workload) and (workload.reserved or not isinstance(order, DeleteWorkload)):
        control.wake_later(job, FIRST_RETRY_S)
        return
    how = type(order).__name__
    log.info("quota returned", extra={**log_fields(job.fact), "workload": order.name, "uid": order.uid, "how": how})
    await _HANDLERS[type(order)](control, job, order)


async def _finish(control: WorkloadControl, job: Job, order: FinishWorkload) -> None:
    await _apply(control, job, order.name, finished_status(job.fact.namespace, order, clock.now()))


async def _release(control: WorkloadControl, job: Job, order: ReleaseBaseQuota) -> None:
    vain = control.state(job).failed_releases
    if vain.get(order.uid, 0) >= MAX_FAILED_RELEASES:
        await _delete(control, job, order)
        return
    try:
        body = await control.api.read_workload(job.fact.namespace, order.name)
        fact = workload_fact(body)
        if fact is not None and fact.uid == order.uid and fact.eviction_reason:
            patch = release_patch(body, clock.now())
            body = await timed_write(
                "workload", control.api.patch_workload_status(job.fact.namespace, order.name, patch)
            )
        vain.pop(order.uid, None)
        control.put(job, body)
    except ApiError as error:
        if error.status == 404:
            control.drop(job, order.name)
            return
        if error.status != 409 and not is_kueue_away(error):
            vain[order.uid] = vain.get(order.uid, 0) + 1
        raise


async def _delete(control: WorkloadControl, job: Job, order: DeleteWorkload | ReleaseBaseQuota) -> None:
    try:
        body = await timed_write("workload", control.api.delete_workload(job.fact.namespace, order.name, order.uid))
    except ApiError as error:
        if error.status not in (404, 409):
            raise
        body = {}
    if body.get("kind") == "Workload":  # a finalizer keeps it
        control.put(job, body)
    else:
        control.drop(job, order.name)


async def _apply(control: WorkloadControl, job: Job, name: str, status: tuple[str, dict[str, Any]]) -> None:
    try:
        control.put(job, await timed_write("workload", control.api.apply_workload_status(*status)))
    except ApiError as error:
        if error.status != 404:
            raise
        control.drop(job, name)


_HANDLERS: Mapping[type[ReleaseAction], Callable[[WorkloadControl, Job, Any], Awaitable[None]]] = {
    FinishWorkload: _finish,
    DeleteWorkload: _delete,
    ReleaseBaseQuota: _release,
}
