"""Updates the priority of existing Workloads after an edit, as Kueue does for its own jobs."""

from __future__ import annotations

import logging
from typing import Any

from ..core.actions import CreateWorkload, Plan, UpdateWorkloadPriority
from ..core.reasons import Reason
from ..core.snapshot import ObservedWorkload
from ..kube.api import CALL_ERRORS, ApiError
from ..kube.applied import effective_spec
from ..kube.queue_lookups import QuotaError
from ..kube.store import Job
from ..kube.workloads import class_ref
from ..kube.writes import log_fields, timed_write
from .workload_control import WorkloadControl, is_for_good

log = logging.getLogger(__name__)

PRIORITIES = "ranking"


async def update_priorities(control: WorkloadControl, job: Job, todo: Plan) -> None:
    """Give Workloads the job's present priority. Failures are reported and retried later."""
    orders = [a for a in todo.actions if isinstance(a, UpdateWorkloadPriority)]
    if not orders:
        control.clear_problem(job, PRIORITIES)
        return
    retry = control.state(job).prioritizing
    if not retry.is_due():
        return
    try:
        for order in orders:
            workload = control.workload(job, order.name)
            if workload is not None and workload.uid == order.uid:
                await _update_priority(control, job, workload)
    except (*CALL_ERRORS, QuotaError) as error:
        control.retry_later(job, retry, "a priority could not be changed", error)
        if isinstance(error, QuotaError):
            control.report_problem(job, PRIORITIES, error)
        elif is_for_good(error):
            control.report_problem(
                job,
                PRIORITIES,
                QuotaError(Reason.PRIORITY_REFUSED, f"the API server refuses the edited priority: {error}"),
            )
    else:
        retry.reset()
        control.clear_problem(job, PRIORITIES)


async def _update_priority(control: WorkloadControl, job: Job, workload: ObservedWorkload) -> None:
    base = next((one.fact for one in job.workloads.items if one.fact.number == 0), None)
    if workload.number and base is None:
        return
    above: dict[str, Any] | None = (
        {"spec": {"priority": base.priority}} if workload.number and base is not None else None
    )
    order = CreateWorkload(workload.number, workload.counts, workload.queue)
    wanted = await control.lookups.priority(job.body, effective_spec(job.body), order, above)
    spec = {"priority": wanted.value, "priorityClassRef": class_ref(wanted)}
    patch = {"metadata": {"uid": workload.uid}, "spec": spec}
    try:
        body = await timed_write("workload", control.api.patch_workload(job.fact.namespace, workload.name, patch))
    except ApiError as error:
        if error.status != 404:
            raise
        control.drop(job, workload.name)
        return
    log.info("priority changed", extra={**log_fields(job.fact), "workload": workload.name, "priority": wanted.value})
    control.put(job, body)
    if (body.get("spec") or {}).get("priority") != wanted.value:
        raise QuotaError(Reason.PRIORITY_REFUSED, f"another client reverts the priority of Workload {workload.name}")
