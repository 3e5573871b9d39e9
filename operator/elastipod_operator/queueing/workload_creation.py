"""Asking Kueue for quota: a Workload for each share."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.actions import CreateWorkload, Plan
from ..core.names import workload_name
from ..kube.api import CALL_ERRORS, ApiError
from ..kube.applied import effective_spec
from ..kube.placement import PlacementError, flavors_of
from ..kube.queue_lookups import NotYet, Trouble
from ..kube.store import Job
from ..kube.workloads import workload_manifest
from ..kube.writes import about, written
from .pod_placement import granted
from .queue_snapshot import LISTING
from .workload_control import FIRST_RETRY_S, Desk, trouble_of

log = logging.getLogger(__name__)

ASKING = "asking"

Body = Mapping[str, Any]


async def ask(desk: Desk, job: Job, todo: Plan) -> None:
    """Ask for what a decision wants. What the API server refuses is told, and tried again later."""
    orders = [a for a in todo.actions if isinstance(a, CreateWorkload)]
    if not orders:
        desk.solved(job, ASKING)
        return
    retry = desk.memory(job).asking
    if not retry.is_due():
        return
    # A decision that takes the spec up asks for pods as they are made from now on.
    spec = dict(job.body["spec"]) if todo.adopts_spec else effective_spec(job.body)
    try:
        await _ask_all(desk, job, spec, orders)
    except NotYet:
        desk.look_later(job, FIRST_RETRY_S)
    except (*CALL_ERRORS, Trouble, PlacementError) as error:
        desk.failed(job, retry, "quota could not be asked for", error)
        desk.trouble(job, ASKING, trouble_of(error))
    else:
        retry.worked()
        desk.solved(job, ASKING)
        desk.solved(job, LISTING)


async def _ask_all(desk: Desk, job: Job, spec: Body, orders: Sequence[CreateWorkload]) -> None:
    base: Body | None = None
    for order in orders:
        if order.number and base is None:
            base = await granted(desk, job, workload_name(job.fact.name, job.fact.uid, 0))
            if base is None:
                return  # increments are for those that have a base
        before = base if order.number else None
        pins = await _pins(desk, job, spec, order, before) if before is not None else {}
        priority = await desk.lookups.priority(job.body, spec, order, before)
        await _create(desk, job, workload_manifest(job.fact, spec, order, priority, pins))


async def _pins(desk: Desk, job: Job, spec: Body, order: CreateWorkload, base: Body) -> Mapping[str, Mapping[str, str]]:
    flavors = await desk.lookups.flavors(flavors_of(base))
    nodes = (p.node for p in job.pods.values() if p.node and p.workload == base["metadata"]["name"])
    return await desk.lookups.pins(base, spec, order, flavors, dict.fromkeys(nodes))


async def _create(desk: Desk, job: Job, manifest: dict[str, Any]) -> None:
    name = manifest["metadata"]["name"]
    try:
        body = await written("workload", desk.api.create_workload(manifest))
        log.info("quota asked for", extra={**about(job.fact), "workload": name, "queue": manifest["spec"]["queueName"]})
    except ApiError as error:
        if error.status != 409 or "already exists" not in str(error):
            raise
        body = await desk.api.read_workload(job.fact.namespace, name)
    desk.put(job, body)
    if desk.workload(job, name) is None:
        raise Trouble(
            "WorkloadRefused", f"Workload {name} exists and does not belong to this job; delete it or rename the job"
        )
