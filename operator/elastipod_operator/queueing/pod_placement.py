"""Where pods may run: only on granted quota, and where Kueue placed them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.actions import CreatePod
from ..core.reasons import Reason
from ..kube.api import ApiError
from ..kube.applied import effective_spec
from ..kube.placement import Placement, PlacementError, flavors_of, placement
from ..kube.queue_lookups import QuotaError
from ..kube.store import Job
from .workload_control import PLACING, WorkloadControl, is_for_good, is_kueue_away

Body = Mapping[str, Any]
Placed = tuple[CreatePod, Placement | None]


async def place_pods(control: WorkloadControl, job: Job, actions: Sequence[CreatePod]) -> tuple[list[Placed], str]:
    """Give the pods that may be created, each with the additions from its quota (none without a queue), and a problem.

    Pods are left out if their Workload is no longer granted, or if they cannot be created as Kueue assigned them; the problem
    then says why, in one sentence. Raises as Api does.
    """
    ready: list[Placed] = [(a, None) for a in actions if not a.workload]
    if len(ready) == len(actions):
        return ready, ""
    templates = {s["name"]: s.get("template") or {} for s in effective_spec(job.body)["replicaSpecs"]}
    unplaced = problem = ""
    for name in dict.fromkeys(a.workload for a in actions if a.workload):
        body = await read_if_granted(control, job, name)
        if body is None:
            continue
        mine = [a for a in actions if a.workload == name]
        try:
            flavors = await control.lookups.flavors(flavors_of(body))
            by_spec = {s: placement(body, s, templates[s], flavors) for s in {a.pod.spec for a in mine}}
        except PlacementError as error:
            unplaced, problem = name, str(error)
            continue
        except ApiError as error:
            if not is_for_good(error):
                raise
            unplaced, problem = name, f"the flavors of Workload {name} cannot be read: {error}"
            continue
        ready += [(a, by_spec[a.pod.spec]) for a in mine]
    if problem:
        control.state(job).unplaced = unplaced
        control.report_problem(job, PLACING, QuotaError(Reason.POD_PLACEMENT_FAILED, problem))
    else:
        control.clear_problem(job, PLACING)
    return ready, problem


async def read_if_granted(control: WorkloadControl, job: Job, name: str) -> Body | None:
    """Read a Workload; None if it is no longer granted, which the next pass observes. Raises as Api does.

    While Kueue is down, Workloads cannot be converted and therefore not be read: then the last known state counts.
    """
    kept = control.state(job).admitted
    try:
        body: Body = await control.api.read_workload(job.fact.namespace, name)
    except (ApiError, TimeoutError) as error:
        if isinstance(error, ApiError) and error.status == 404:
            control.drop(job, name)
            return None
        if name not in kept or not is_kueue_away(error):
            raise
        body = kept[name]
    control.put(job, body)
    fact = control.workload(job, name)
    if fact is None or not fact.is_granted:
        kept.pop(name, None)
        return None
    kept[name] = body
    return body
