"""What must hold of quota at every moment, seen from Kueue and the API server."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.sim.fault_targets import AFTERMATH_S
from tests.sim.invariant_state import Violation
from tests.sim.kueue_workload import Workload
from tests.sim.objects import SimPod

from elastipod_operator.core.names import ANNOTATION_WORKLOAD, LABEL_INCREMENT, pod_id_of

if TYPE_CHECKING:
    from tests.sim.kueue_server import KueueServer, Tenant

# Longer than the longest pause between two attempts to give something back.
LATE_S = 45.0
# From the end of a fault to an operator that is back, has heard everybody, and has no wait before its next try.
BACK_S = 60.0
# What waits when its job is deleted is taken out of the queue before its pods went.
PROMPT_S = 20.0
LONGEST_DRAIN_S = 600.0  # where gracefulShutdownTimeoutInSeconds is not set


class QuotaInvariantChecker:
    """Sees what is evicted and given back, and every new pod; raises Violation at the first that must not be."""

    def __init__(self, server: KueueServer) -> None:
        self._server = server
        self.met: Counter[str] = Counter()
        self.unfenced_until = 0.0
        """Until when an operator may act on what it saw before others went on."""
        self.hindered_until = 0.0
        """Until when faults, and what follows from them, keep operators from giving quota back in time."""
        self.num_looks = self.num_excused = 0
        """How often it looked at who keeps quota, and how often limits of time did not hold then."""
        self._taken_away: set[str] = set()
        """UIDs of Workloads that somebody else took away or made free."""
        self._waits: dict[tuple[str, bool], float] = {}
        """Since when each is to be given back, while it has pods, or has none any more."""

    @property
    def is_fenced(self) -> bool:
        """Whether no operator acts on what it saw before others went on."""
        return self._server.kernel.now >= self.unfenced_until

    @property
    def is_hindered(self) -> bool:
        """Whether limits of time do not hold now."""
        return self._server.kernel.now < self.hindered_until

    def hinder(self, seconds: float) -> None:
        """Let no limit of time hold for so long, and until operators are back and have heard everybody."""
        self.hindered_until = max(self.hindered_until, self._server.kernel.now + seconds + BACK_S)

    def taken_away(self, one: Workload) -> None:
        """Somebody other than its owner ends a Workload while pods live on it."""
        self._taken_away.add(one.uid)

    def pod_made(self, tenant: Tenant, pod: SimPod) -> None:
        """The API server took a new pod: it must be within what is granted, where Kueue placed it."""
        name = pod.annotations.get(ANNOTATION_WORKLOAD, "")
        one = self._server.kueue.find(tenant.name, name)
        if not self.is_fenced or (one is not None and one.uid in self._taken_away):
            return
        if one is None or not one.has("QuotaReserved") or not one.has("Admitted") or one.has("Finished"):
            if self._server.kernel.now <= tenant.vanished_at.get(name, -1.0) + 1.0:
                return  # somebody took it away between the look at it and this call
            state = {kind: said["status"] for kind, said in one.conditions.items()} if one is not None else "not there"
            raise Violation(f"pod {pod.name} is made on Workload {name!r}, which is {state}")
        self._within(tenant, one)
        _are_where_placed([pod], one)
        self.met["pod on quota"] += 1

    def asked(self, tenant: Tenant, one: Workload) -> None:
        """A job asks for more: beside its base, for training is as slow as its slowest replica."""
        base = next((other for other in tenant.workloads if is_base(other) and other.holds), None)
        if is_base(one) or base is None or base.admission is None:
            return
        flavors = {f for assigned in base.admission["podSetAssignments"] for f in assigned["flavors"].values()}
        wanted = [body["template"]["spec"].get("nodeSelector") for body in one.spec["podSets"]]
        if wanted != [{"pool": flavor} for flavor in flavors] * len(wanted):
            raise Violation(f"{one.name} asks for {wanted}, but its base is on {sorted(flavors)}")

    def _within(self, tenant: Tenant, one: Workload) -> None:
        """Pods of which nobody can know whether they live do not keep others from their places."""
        used = Counter(_spec_of(pod) for pod in living(tenant, one) if not self._is_out_of_sight(pod))
        over = {spec: pods for spec, pods in used.items() if pods > one.counts().get(spec, 0)}
        if over:
            raise Violation(f"{over} pods live on Workload {one.name}, which is for {one.counts()}")

    def _is_out_of_sight(self, pod: SimPod) -> bool:
        """Whether faults keep, or kept until a while ago, the operator from seeing how a pod is."""
        node, agent = pod.node, pod.agent
        if node is None:
            return False
        ends = [node.frozen_until, node.cut_until, node.hidden_until, node.deaf_until, node.mute_until]
        if agent is not None:
            ends += [agent.hangs_until, agent.lags_until, agent.lies_until]
        return not node.ready or self._server.kernel.now < max(ends) + AFTERMATH_S

    def before_release(self, tenant: Tenant, one: Workload, how: str) -> None:
        """The owner is about to give quota back: no pod may live on it."""
        pods = [pod.name for pod in living(tenant, one)]
        if pods and self.is_fenced and one.has("QuotaReserved") and not one.has("Finished"):
            raise Violation(f"Workload {one.name} is {how} while {pods} live on its quota")
        share = "base" if is_base(one) else "increment"
        self.met[f"quota: {share} {how}{' after an eviction' if one.must_release_quota else ''}"] += 1

    def job_gone(self, tenant: Tenant) -> None:
        """A deleted job is gone: its Workloads went before, but for those that hold nothing because they are finished."""
        left = [one.name for one in tenant.workloads if not one.has("Finished")]
        if left and self.is_fenced and not self.is_hindered:
            raise Violation(f"the job of {tenant.name} is gone, and leaves {left} to the garbage collector")
        self.met["quota: the job is gone last"] += not left

    def evicts(self, one: Workload, victim: Workload) -> None:
        """Kueue evicts somebody for somebody."""
        self.met[f"evicts: {_kind(victim)} for {_kind(one)}"] += 1
        self._server.say(f"-- Kueue evicts {victim.tenant}/{victim.name} for {one.tenant}/{one.name}")
        if self._server.settings.are_recommended and not is_base(one) and is_base(victim):
            raise Violation(f"increment {one.name} of {one.tenant} evicts the base {victim.name} of {victim.tenant}")

    def look(self) -> None:
        """Nobody keeps quota that Kueue wants back, or that is of no use, longer than the pods need; nor asks for who is to go."""
        now, waits = self._server.kernel.now, {}
        self.num_looks += 1
        self.num_excused += self.is_hindered
        if not self.is_hindered:
            for tenant in self._server.tenants.values():
                self._asks_no_more(tenant, now)
        there = self._server.kueue.workloads.values()
        with_base = {one.tenant for one in there if is_base(one) and one.holds}
        for one in there:
            if one.holds and self.is_fenced:
                _are_where_placed(living(self._server.tenants[one.tenant], one), one)
            is_wanted_back = one.must_release_quota and one.is_active
            if is_wanted_back and is_base(one) and not self.is_hindered:
                self._is_short_of_pods(one)
            if not is_wanted_back and (one.tenant in with_base or not one.holds):
                continue
            tenant = self._server.tenants[one.tenant]
            pods = on_quota(tenant, one)
            key = (one.uid, not pods)
            waits[key] = self._waits.get(key, now)
            limit = _drain_s(tenant, pods) if pods else LATE_S
            if not self.is_hindered and now - waits[key] > limit:
                since = f"for {now - waits[key]:g} s with {[pod.name for pod in pods]}"
                raise Violation(f"Workload {one.name} of {one.tenant} keeps its quota {since}")
        # What hindered somebody until now is no fault of theirs.
        self._waits = {} if self.is_hindered else waits

    def _asks_no_more(self, tenant: Tenant, now: float) -> None:
        job = tenant.cluster.job if tenant.cluster is not None else None
        if job is None or job.deleted_at is None or now - job.deleted_at < PROMPT_S:
            return
        waiting = [one.name for one in tenant.workloads if not (one.has("QuotaReserved") or one.has("Finished"))]
        if waiting:
            raise Violation(f"{waiting} of {tenant.name} still wait for quota though their job is being deleted")

    def _is_short_of_pods(self, base: Workload) -> None:
        """Nobody has Kueue stop a whole job for want of a pod of its base, while as many of its replicas run."""
        tenant = self._server.tenants[base.tenant]
        is_new = base.uid not in {uid for uid, _ in self._waits}
        if not is_new or tenant.cluster is None or base.conditions["Evicted"].get("reason") != "PodsReadyTimeout":
            return
        at_work = [pod.name for one in tenant.workloads for pod in living(tenant, one) if pod.phase == "Running"]
        if len(at_work) >= sum(base.counts().values()):
            raise Violation(f"Kueue takes {base.name} back though {at_work} run")


def _are_where_placed(pods: Sequence[SimPod], one: Workload) -> None:
    assert one.admission is not None
    flavors = {assigned["name"]: assigned["flavors"].values() for assigned in one.admission["podSetAssignments"]}
    for pod in pods:
        placed = flavors[_spec_of(pod)]
        if pod.selector != {"pool": next(iter(placed))}:
            raise Violation(f"pod {pod.name} is for {pod.selector}, but Kueue put it on {sorted(placed)}")


def on_quota(tenant: Tenant, one: Workload) -> list[SimPod]:
    """Give the pods on a Workload's quota that have not ended, as far as the API server knows."""
    if tenant.cluster is None:
        return []
    pods, name = tenant.cluster.pods.values(), one.name
    return [pod for pod in pods if pod.annotations.get(ANNOTATION_WORKLOAD) == name and not pod.ended]


def living(tenant: Tenant, one: Workload) -> list[SimPod]:
    """Give those of them that may live: nothing does on a machine without power."""
    return [pod for pod in on_quota(tenant, one) if pod.node is None or pod.node.powered]


def _drain_s(tenant: Tenant, pods: Sequence[SimPod]) -> float:
    """Give how long pods may take to go; for those of nodes that do not answer nobody knows."""
    assert tenant.cluster is not None
    job = tenant.cluster.job
    if job is None or any(pod.node is not None and not pod.node_runs() for pod in pods):
        return math.inf
    drain_s = (job.spec.get("elasticPolicy") or {}).get("gracefulShutdownTimeoutInSeconds", LONGEST_DRAIN_S)
    return float(drain_s) + max(pod.grace_s for pod in pods) + LATE_S


def is_base(one: Workload) -> bool:
    return str(one.meta.get("labels", {}).get(LABEL_INCREMENT, "0")) == "0"


def _kind(one: Workload) -> str:
    return "base" if is_base(one) else "increment"


def _spec_of(pod: SimPod) -> str:
    found = pod_id_of(pod.labels)
    return found.spec if found is not None else ""
