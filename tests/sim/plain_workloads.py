"""Jobs of others in the queues: gangs that run for a while, owned as Kueue's own integrations own them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.sim.kernel import Script
from tests.sim.kueue_server import LOCAL_QUEUE, RESOURCE, KueueServer, Tenant
from tests.sim.kueue_workload import Workload

from elastipod_operator.kube.workload_status import release_patch


@dataclass(frozen=True, slots=True)
class PlainGang:
    """A job of fixed size. at: when it comes; runs_s: for how long it needs its quota; stops_s: how long its pods take to go."""

    at: float
    count: int
    priority: int
    queue: int = 0
    runs_s: float = 60.0
    stops_s: float = 5.0


def manifest(gang: PlainGang, name: str) -> dict[str, Any]:
    """Give its Workload."""
    container = {"name": "main", "resources": {"requests": {RESOURCE: "1"}}}
    pod_set = {"name": "main", "count": gang.count, "template": {"spec": {"containers": [container]}}}
    spec = {"queueName": LOCAL_QUEUE, "priority": gang.priority, "podSets": [pod_set]}
    return {"metadata": {"name": name}, "spec": spec}


def live(server: KueueServer, gang: PlainGang, name: str) -> Script:
    """The life of one: it asks, runs, gives way and comes back, and ends."""
    tenant = server.tenant(name, gang.queue)
    yield max(0.0, gang.at - server.kernel.now)
    while server.is_away:
        yield 1.0
    one = server.kueue.create(name, manifest(gang, name))
    left_s = gang.runs_s
    while left_s > 0:
        while not (one.has("Admitted") and not one.must_release_quota):
            yield 1.0
            if one.must_release_quota:
                yield from _give_back(server, tenant, one, gang)
        while left_s > 0 and not one.must_release_quota:
            if not one.has("PodsReady") and not server.is_away:
                server.kueue.apply_condition(one, _condition(server, "PodsReady", "Started"))
            yield 1.0
            left_s -= 1.0
    while server.is_away:
        yield 1.0
    server.kueue.apply_condition(one, _condition(server, "Finished", "Succeeded"))
    server.watch.met["a gang finishes"] += 1


def _give_back(server: KueueServer, tenant: Tenant, one: Workload, gang: PlainGang) -> Script:
    yield gang.stops_s
    while server.is_away:
        yield 1.0
    server.kueue.merge_status(one, release_patch(one.body(), server.kernel.utc()))
    server.watch.met["a gang gives way"] += 1


def _condition(server: KueueServer, kind: str, reason: str) -> dict[str, Any]:
    now = server.kernel.utc().isoformat(timespec="seconds").replace("+00:00", "Z")
    return {"type": kind, "status": "True", "reason": reason, "message": "", "lastTransitionTime": now}
