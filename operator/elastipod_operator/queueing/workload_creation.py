"""Requests quota: creates a Workload for the base and for each increment."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.actions import CreateWorkload, Plan
from ..core.names import workload_name
from ..core.reasons import Reason
from ..kube.api import CALL_ERRORS, ApiError
from ..kube.applied import effective_spec
from ..kube.placement import PlacementError, flavors_of
from ..kube.queue_lookups import BaseNotPlaced, QuotaError
from ..kube.reading import mapping, mappings, text
from ..kube.store import Job
from ..kube.workloads import workload_manifest
from ..kube.writes import log_fields, timed_write
from .pod_placement import read_if_granted
from .queue_snapshot import LISTING
from .workload_control import WorkloadControl, quota_error

log = logging.getLogger(__name__)

REQUESTING = "asking"

Body = Mapping[str, Any]


async def request_quota(control: WorkloadControl, job: Job, todo: Plan) -> None:
    """Create the Workloads of a plan. Refusals are reported and retried later."""
    orders = [a for a in todo.actions if isinstance(a, CreateWorkload)]
    if not orders:
        control.clear_problem(job, REQUESTING)
        return
    retry = control.state(job).requesting
    if not retry.is_due():
        return
    # A plan that adopts the spec requests quota for pods of the new spec.
    spec = dict(job.body["spec"]) if todo.adopts_spec else effective_spec(job.body)
    try:
        await _request_all(control, job, spec, orders)
    except BaseNotPlaced:
        control.wake_for(job, retry)
    except (*CALL_ERRORS, QuotaError, PlacementError) as error:
        control.retry_later(job, retry, "quota could not be requested", error)
        control.report_problem(job, REQUESTING, quota_error(error))
    else:
        retry.reset()
        control.clear_problem(job, REQUESTING)
        control.clear_problem(job, LISTING)


async def _request_all(control: WorkloadControl, job: Job, spec: Body, orders: Sequence[CreateWorkload]) -> None:
    base: Body | None = None
    for order in orders:
        if order.number and base is None:
            base = await read_if_granted(control, job, workload_name(job.fact.name, job.fact.uid, 0))
            if base is None:
                return  # increments need a base
        before = base if order.number else None
        pins = await _pins(control, job, spec, order, before) if before is not None else {}
        priority = await control.lookups.priority(job.body, spec, order, before)
        await _create(control, job, workload_manifest(job.fact, spec, order, priority, pins))


async def _pins(
    control: WorkloadControl, job: Job, spec: Body, order: CreateWorkload, base: Body
) -> Mapping[str, Mapping[str, str]]:
    flavors = await control.lookups.flavors(flavors_of(base))
    nodes = (p.node for p in job.pods.values() if p.node and p.workload == base["metadata"]["name"])
    return await control.lookups.pins(base, spec, order, flavors, dict.fromkeys(nodes))


async def _create(control: WorkloadControl, job: Job, manifest: dict[str, Any]) -> None:
    name = manifest["metadata"]["name"]
    try:
        body = await timed_write("workload", control.api.create_workload(manifest))
        log.info(
            "quota requested", extra={**log_fields(job.fact), "workload": name, "queue": manifest["spec"]["queueName"]}
        )
    except ApiError as error:
        if error.status != 409 or "already exists" not in str(error):
            raise
        body = await control.api.read_workload(job.fact.namespace, name)
    control.put(job, body)
    if control.workload(job, name) is None:
        raise QuotaError(Reason.WORKLOAD_REFUSED, f"Workload {name} exists and {_whose(body)}")


def _whose(body: Body) -> str:
    """Say whose a Workload is that has the name of one of this job's, and what to do."""
    owner = next(
        (o for o in mappings(mapping(body.get("metadata")).get("ownerReferences")) if o.get("controller")), None
    )
    if owner is None:
        return "does not belong to this job; delete it or rename the job"
    return f"belongs to {text(owner.get('kind'))} {text(owner.get('name'))}; create this job with another name"
