"""Giving quota back, and telling Kueue how the pods are.

Quota is given back only when the API server shows no living pod on it (decision 6): a watch may be late.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from .. import clock
from ..core.actions import DeleteWorkload, FinishWorkload, Plan, ReleaseBaseQuota, SetPodsReady
from ..core.quota import effective_quota_requests, is_on
from ..core.snapshot import ObservedPod, ObservedWorkload
from ..kube.api import CALL_ERRORS, ApiError
from ..kube.store import Job
from ..kube.workload_status import finished_status, pods_ready_status, release_patch
from ..kube.workloads import workload_fact
from ..kube.writes import about, written
from .workload_control import FIRST_RETRY_S, RETURNING, Desk, for_each, is_for_good, is_kueue_away, not_returned

log = logging.getLogger(__name__)

# A base that could not be released so many times is deleted, and asked for anew.
RELEASE_TRIES = 3

GiveBack = DeleteWorkload | ReleaseBaseQuota | FinishWorkload


async def give_back(desk: Desk, job: Job, todo: Plan, list_pods: Callable[[Job], Awaitable[None]]) -> None:
    """Carry out what gives quota back; what fails is tried again later, and keeps no other Workload from going."""
    orders = [a for a in todo.actions if isinstance(a, GiveBack)]
    retry, is_deleting = desk.memory(job).giving, job.fact.deleting_since is not None
    if not orders and not is_deleting:
        desk.solved(job, RETURNING)
    if not orders or not retry.is_due():
        return
    in_turn = sorted(orders, key=lambda order: _comes_late(desk, job, order))
    try:
        await list_pods(job)
        await for_each(in_turn, lambda order: _give(desk, job, order))
    except CALL_ERRORS as error:
        desk.failed(job, retry, "quota could not be given back", error)
        if is_deleting or is_for_good(error):
            desk.trouble(job, RETURNING, not_returned(error))
    else:
        retry.worked()
        desk.solved(job, RETURNING)


async def mark(desk: Desk, job: Job, todo: Plan) -> None:
    """Tell Kueue which Workloads have all their pods ready."""
    orders = [a for a in todo.actions if isinstance(a, SetPodsReady)]
    if not orders or not desk.memory(job).marking.is_due():
        return
    at = clock.now()
    try:
        await for_each(
            orders, lambda order: _apply(desk, job, order.name, pods_ready_status(job.fact.namespace, order, at))
        )
    except CALL_ERRORS as error:
        desk.failed(job, desk.memory(job).marking, "Kueue could not be told of pods", error)
    else:
        desk.memory(job).marking.worked()


def pods_on(job: Job, workload: ObservedWorkload) -> list[ObservedPod]:
    """Give the pods that live on a Workload's quota: those made for it, and those in its slots."""
    policy = job.fact.policy
    base = next((asked.fact for asked in job.workloads.items if asked.fact.number == 0), None)
    shares = effective_quota_requests(policy, base) if policy is not None else ()
    return [p for p in job.pods.values() if not p.ended and is_on(p, workload, shares)]


def _comes_late(desk: Desk, job: Job, order: GiveBack) -> tuple[bool, bool]:
    """Whether others wait less for what is given back: calls take their time, and one for a Workload in wait frees nothing."""
    workload = desk.workload(job, order.name)
    return workload is None or not workload.eviction_reason, workload is None or not workload.reserved


async def _give(desk: Desk, job: Job, order: GiveBack) -> None:
    workload = desk.workload(job, order.name)
    if workload is None or workload.uid != order.uid:
        return
    # What waits holds nothing: it goes at once, before Kueue grants it.
    if pods_on(job, workload) and (workload.reserved or not isinstance(order, DeleteWorkload)):
        desk.look_later(job, FIRST_RETRY_S)
        return
    how = type(order).__name__
    log.info("quota given back", extra={**about(job.fact), "workload": order.name, "uid": order.uid, "how": how})
    if isinstance(order, FinishWorkload):
        await _apply(desk, job, order.name, finished_status(job.fact.namespace, order, clock.now()))
    elif isinstance(order, DeleteWorkload):
        await _delete(desk, job, order)
    else:
        await _release(desk, job, order)


async def _release(desk: Desk, job: Job, order: ReleaseBaseQuota) -> None:
    vain = desk.memory(job).vain_releases
    if vain.get(order.uid, 0) >= RELEASE_TRIES:
        await _delete(desk, job, order)
        return
    try:
        body = await desk.api.read_workload(job.fact.namespace, order.name)
        fact = workload_fact(body)
        if fact is not None and fact.uid == order.uid and fact.eviction_reason:
            patch = release_patch(body, clock.now())
            body = await written("workload", desk.api.patch_workload_status(job.fact.namespace, order.name, patch))
        vain.pop(order.uid, None)
        desk.put(job, body)
    except ApiError as error:
        if error.status == 404:
            desk.drop(job, order.name)
            return
        if error.status != 409 and not is_kueue_away(error):
            vain[order.uid] = vain.get(order.uid, 0) + 1
        raise


async def _delete(desk: Desk, job: Job, order: DeleteWorkload | ReleaseBaseQuota) -> None:
    try:
        body = await written("workload", desk.api.delete_workload(job.fact.namespace, order.name, order.uid))
    except ApiError as error:
        if error.status not in (404, 409):
            raise
        body = {}
    if body.get("kind") == "Workload":  # somebody's finalizer keeps it
        desk.put(job, body)
    else:
        desk.drop(job, order.name)


async def _apply(desk: Desk, job: Job, name: str, status: tuple[str, dict[str, Any]]) -> None:
    try:
        desk.put(job, await written("workload", desk.api.apply_workload_status(*status)))
    except ApiError as error:
        if error.status != 404:
            raise
        desk.drop(job, name)
