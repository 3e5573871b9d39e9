"""The model of Kueue 0.15: Workloads, queues, and what its scheduler and its controller make of them.

Time passes only where the caller lets it: `work` does one thing after the other until all is at rest. Nobody is evicted by
a time-out here, and an evicted Workload keeps its quota until its owner gives it back, as with the real one. Left out are
fair sharing, cohorts within cohorts, admission checks and topology.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from tests.sim.kernel import format_time
from tests.sim.kueue_choice import Asker, Assignment, Chooser, Mode
from tests.sim.kueue_workload import AT_ITS_TIME, Body, Workload, asker
from tests.sim.quota_capacity import NOTHING, Allowance, ClusterQueue, Place, QuotaUse

from elastipod_operator.kube.api import ApiError

Told = Callable[[Workload, str], None]

BACKOFF_S = 60
# Evictions that Kueue itself takes back when what stopped the queue is over.
BY_QUEUES = {"ClusterQueueStopped": "ClusterQueueRestarted", "LocalQueueStopped": "LocalQueueRestarted"}


@dataclass(slots=True)
class LocalQueue:
    """Where the Workloads of a tenant ask."""

    queue: str
    stop: str = "None"


class Kueue:
    """All of it. now: gives the time; told: hears of every change of a Workload; evicts: of who is evicted for whom."""

    def __init__(
        self,
        now: Callable[[], datetime],
        told: Told = lambda *_: None,
        evicts: Callable[[Workload, Workload], None] = lambda *_: None,
        pods_ready_timeout: timedelta | None = None,
    ) -> None:
        self._now = now
        self._told = told
        self._evicts = evicts
        self._pods_ready_timeout = pods_ready_timeout
        self.queues: dict[str, ClusterQueue] = {}
        self.local: dict[tuple[str, str], LocalQueue] = {}
        self.labels: dict[str, Mapping[str, str]] = {}
        """Node labels by flavor."""
        self.workloads: dict[str, Workload] = {}
        self._due: dict[str, None] = {}
        self._made = 0

    # -- what others do

    def add_queue(self, queue: ClusterQueue) -> None:
        self.queues[queue.name] = queue

    def create(self, tenant: str, manifest: Mapping[str, Any], version: int = 0) -> Workload:
        """Take a new Workload. Raises ApiError."""
        name = manifest["metadata"]["name"]
        if self.find(tenant, name) is not None:
            raise ApiError(409, f'workloads.kueue.x-k8s.io "{name}" already exists')
        self._made += 1
        meta = {
            **copy.deepcopy(dict(manifest["metadata"])),
            "uid": f"{self._made * 7919 % 10007:05d}-wl",
            "creationTimestamp": format_time(self._now()),
            "generation": 1,
        }
        one = Workload(tenant, meta, copy.deepcopy(dict(manifest["spec"])), version)
        self.workloads[one.uid] = one
        self._told(one, "ADDED")
        self._queue(one)
        self._due[one.uid] = None
        return one

    def find(self, tenant: str, name: str) -> Workload | None:
        return next((one for one in self.workloads.values() if (one.tenant, one.name) == (tenant, name)), None)

    def of(self, tenant: str) -> list[Workload]:
        return [one for one in self.workloads.values() if one.tenant == tenant]

    def delete(self, one: Workload) -> None:
        """Delete a Workload: its quota is free."""
        had = one.has("QuotaReserved")
        del self.workloads[one.uid]
        self._unqueue(one)
        self._told(one, "DELETED")
        if had:
            self._wake(self._queue_of(one))

    def merge_status(self, one: Workload, patch: Mapping[str, Any]) -> None:
        """Merge into the status, the list of conditions as a whole. Raises ApiError as API server and webhook do."""
        version = patch.get("metadata", {}).get("resourceVersion")
        if version is not None and str(version) != str(one.version):
            raise ApiError(409, "the object has been modified; please apply your changes to the latest version")
        status = dict(patch["status"])
        wanted = status.pop("conditions", None)
        conditions = one.conditions if wanted is None else {c["type"]: _without_type(c) for c in wanted}
        admission = status.pop("admission", one.admission)
        if admission is None and conditions.get("QuotaReserved", {}).get("status") == "True":
            raise ApiError(500, "admission webhook panicked: invalid memory address or nil pointer dereference")

        def change() -> None:
            one.conditions, one.admission = copy.deepcopy(conditions), admission
            one.status |= status

        self._change(one, change)

    def apply_condition(self, one: Workload, condition: Mapping[str, Any]) -> None:
        """Set one condition, as its owner's field manager does."""
        self._change(one, lambda: one.conditions.update({condition["type"]: _without_type(condition)}))

    def patch_spec(self, one: Workload, changes: Mapping[str, Any]) -> None:
        """Merge into the spec: its owner gives it another priority."""

        def change() -> None:
            spec = {**one.spec, **changes}
            one.spec = {key: value for key, value in spec.items() if value is not None}

        self._change(one, change)

    def set_active(self, one: Workload, active: bool) -> None:
        """A user deactivates or reactivates a Workload: Kueue books it out at once, whatever runs on it."""
        self._change(one, lambda: one.spec.update(active=active))

    def set_allowance(self, queue: str, place: Place, allowance: Allowance) -> None:
        """An administrator edits a quota; nobody is evicted for that."""
        self.queues[queue].allowances[place] = allowance
        self._wake(self.queues[queue])

    def set_stop(self, queue: str, stop: str) -> None:
        """An administrator stops a ClusterQueue, or lets it go on."""
        self.queues[queue].stop = stop
        self._wake(self.queues[queue])
        self._due.update(dict.fromkeys(one.uid for one in self._asking_in(queue)))

    def set_local_stop(self, tenant: str, name: str, stop: str) -> None:
        """The same with a LocalQueue."""
        self.local[tenant, name].stop = stop
        for one in self.of(tenant):
            if one.spec["queueName"] != name:
                continue
            self._due[one.uid] = None
            if stop == "None":
                self._queue(one)
            else:
                self._unqueue(one)

    def restart(self) -> None:
        """Kueue's process begins anew, with what the API server holds."""
        for queue in self.queues.values():
            queue.waiting.clear()
            queue.parked.clear()
            queue.sticky = ""
        for one in self.workloads.values():
            self._queue(one)
            self._due[one.uid] = None

    # -- what Kueue does

    def work(self) -> bool:
        """Do the next thing; False when there is nothing to do until something changes or time passes."""
        if self._due:
            uid = next(iter(self._due))
            del self._due[uid]
            if uid in self.workloads:
                self._control(self.workloads[uid])
            return True
        return self._cycle()

    def settle(self) -> None:
        """Work until all is at rest."""
        while self.work():
            pass

    def tick(self) -> bool:
        """Look at what waits for a time; True when there is something to do."""
        now = self._now()
        for one in self.workloads.values():
            is_back = one.requeue_at is not None and one.requeue_at <= now
            if is_back or (self._pods_ready_timeout is not None and one.holds):
                self._due[one.uid] = None
        return bool(self._due)

    def _control(self, one: Workload) -> None:
        """What the controller of Workloads sees to."""
        queue, local = self._queue_of(one), self.local.get((one.tenant, one.spec["queueName"]))
        requeued = one.conditions.get("Requeued", {})
        why = requeued.get("reason") if requeued.get("status") == "False" else None
        if one.has("Finished"):
            return
        if not one.is_active:
            if not one.has("Evicted"):
                self._evict(one, "Deactivated", "The workload is deactivated")
            return
        if one.requeue_at is not None and one.requeue_at <= self._now() and one.phase == "Pending":
            one.requeue_at = None
            self._queue(one)
        if why == "Deactivated":
            self._set(one, "Requeued", True, "Reactivated", "The workload was reactivated")
        elif why in AT_ITS_TIME and one.requeue_at is None:
            self._set(one, "Requeued", True, "BackoffFinished", "The workload backoff was finished")
        elif why == "LocalQueueStopped" and local is not None and local.stop == "None":
            self._set(one, "Requeued", True, BY_QUEUES[why], "The LocalQueue was restarted after being stopped")
        elif why == "ClusterQueueStopped" and queue is not None and queue.stop == "None":
            self._set(one, "Requeued", True, BY_QUEUES[why], "The ClusterQueue was restarted after being stopped")
        elif one.has("QuotaReserved"):
            self._control_holder(one, queue, local)
        else:
            self._tell_why_not(one, queue, local)

    def _control_holder(self, one: Workload, queue: ClusterQueue | None, local: LocalQueue | None) -> None:
        if one.has("Evicted"):
            return
        if local is not None and local.stop == "HoldAndDrain":
            self._evict(one, "LocalQueueStopped", "The LocalQueue is stopped")
        elif queue is not None and queue.stop == "HoldAndDrain":
            self._evict(one, "ClusterQueueStopped", "The ClusterQueue is stopped")
        elif self._pods_ready_timeout is not None and not one.has("PodsReady"):
            ready = one.conditions.get("PodsReady", {})
            is_recovery = ready.get("reason") == "WaitForRecovery"
            since = ready if is_recovery else one.conditions["Admitted"]
            if self._now() >= _time(since["lastTransitionTime"]) + self._pods_ready_timeout:
                one.requeues += 1
                wait_s = BACKOFF_S * 2 ** (one.requeues - 1)
                one.requeue_at = self._now() + timedelta(seconds=min(3600, wait_s))
                self._evict(one, "PodsReadyTimeout", f"Exceeded the PodsReady timeout {one.name}")

    def _tell_why_not(self, one: Workload, queue: ClusterQueue | None, local: LocalQueue | None) -> None:
        name = one.spec["queueName"]
        if local is None:
            self._waits(one, "Inadmissible", f"LocalQueue {name} doesn't exist")
        elif local.stop != "None":
            self._waits(one, "Inadmissible", f"LocalQueue {name} is inactive")
        elif queue is None:
            self._waits(one, "Inadmissible", f"ClusterQueue {local.queue} doesn't exist")
        elif queue.stop != "None":
            self._waits(one, "Inadmissible", f"ClusterQueue {queue.name} is inactive")

    def _cycle(self) -> bool:
        """Let the scheduler look at the first of each queue once; True when anything became another."""
        quota_use = QuotaUse(self.queues.values())
        holders = {one.uid: self._asker(one) for one in self.workloads.values() if one.holds}
        for holder in holders.values():
            quota_use.add(holder.queue, holder.held)
        chooser = Chooser(quota_use, list(holders.values()), self.labels)
        entries = [(wish, chooser.assign(wish)) for wish in self._heads()]
        entries.sort(key=lambda entry: (entry[1].borrows, -entry[0].priority, entry[0].created))
        gone: dict[str, Asker] = {}
        changed = False
        for wish, found in entries:
            changed |= self._process(wish, found, quota_use, gone)
        return changed

    def _heads(self) -> Iterator[Asker]:
        for queue in self.queues.values():
            if queue.stop == "None" and queue.waiting:
                quota_requests = [self._asker(self.workloads[uid]) for uid in queue.waiting]
                yield min(
                    quota_requests, key=lambda one: (one.uid != queue.sticky, -one.priority, one.created, one.uid)
                )

    def _process(self, wish: Asker, found: Assignment, quota_use: QuotaUse, gone: dict[str, Asker]) -> bool:
        """Admit, evict for it, or let it wait; `gone`: who is evicted in this cycle."""
        one, queue = self.workloads[wish.uid], self.queues[wish.queue]
        if found.mode is Mode.NO_FIT:
            return self._park(one, queue, found.message)
        if found.mode is not Mode.FIT and not found.victims:
            if queue.reclaim != "Any":
                quota_use.add(queue.name, _to_reserve(queue, found, quota_use))
            return self._park(one, queue, found.message)
        victims = [victim for victim, _ in found.victims]
        if any(victim.uid in gone for victim in victims):
            return self._waits(one, "Pending", "Workload has overlapping preemption targets with another workload")
        with quota_use.without((away.queue, away.held) for away in (*gone.values(), *victims)):
            fits = quota_use.fits(queue, found.amounts)
        if not fits:
            return self._waits(one, "Pending", "Workload no longer fits after processing another workload")
        gone |= {victim.uid: victim for victim in victims}
        quota_use.add(queue.name, found.amounts)
        if victims:
            return self._preempt(one, queue, found)
        self._admit(one, queue, found)
        return True

    def _preempt(self, one: Workload, queue: ClusterQueue, found: Assignment) -> bool:
        changed = queue.strategy == "BestEffortFIFO" and queue.sticky != one.uid
        if changed:
            queue.sticky = one.uid
        for victim, why in found.victims:
            away = self.workloads[victim.uid]
            if away.has("Evicted"):
                continue
            job = one.meta.get("labels", {}).get("kueue.x-k8s.io/job-uid") or "UNKNOWN"
            what = f"Preempted to accommodate a workload (UID: {one.uid}, JobUID: {job}) due to {why}"
            self._evicts(one, away)
            self._set(away, "Preempted", True, why.partition(",")[0], what)
            self._evict(away, "Preempted", what)
            changed = True
        count = len(found.victims)
        return self._waits(one, "Pending", f"{found.message}. Pending the preemption of {count} workload(s)") or changed

    def _admit(self, one: Workload, queue: ClusterQueue, found: Assignment) -> None:
        by_name = {pod_set.name: pod_set for pod_set in self._asker(one).pod_sets}
        assigned = [
            {
                "name": name,
                "flavors": dict.fromkeys(by_name[name].requests, flavor),
                "count": one.counts()[name],
                "resourceUsage": dict(by_name[name].requests),
            }
            for name, flavor in found.flavors.items()
        ]

        def change() -> None:
            one.admission = {"clusterQueue": queue.name, "podSetAssignments": assigned}
            what = f"Quota reserved in ClusterQueue {queue.name}"
            self._note(one, "QuotaReserved", True, "QuotaReserved", what)
            for kind in ("Evicted", "Preempted"):
                if one.has(kind):
                    self._note(one, kind, False, "QuotaReserved", f"Previously: {one.said(kind)}")
            self._note(one, "Admitted", True, "Admitted", "The workload is admitted")

        self._change(one, change)

    def _park(self, one: Workload, queue: ClusterQueue, why: str) -> bool:
        """It does not fit. Under StrictFIFO it stays at the head all the same."""
        is_first = queue.strategy != "StrictFIFO" and one.uid in queue.waiting
        if is_first:
            queue.waiting.discard(one.uid)
            queue.parked.add(one.uid)
        return self._waits(one, "Pending", why) or is_first

    # -- queues

    def _queue_of(self, one: Workload) -> ClusterQueue | None:
        local = self.local.get((one.tenant, one.spec["queueName"]))
        return self.queues.get(local.queue) if local is not None else None

    def _asking_in(self, queue: str) -> list[Workload]:
        of = ((one, self._queue_of(one)) for one in self.workloads.values())
        return [one for one, its in of if its is not None and its.name == queue]

    def _queue(self, one: Workload) -> None:
        """Put it among those that are looked at, if it may be."""
        self._unqueue(one, forget_sticky=False)
        queue, local = self._queue_of(one), self.local.get((one.tenant, one.spec["queueName"]))
        if queue is None or local is None or local.stop != "None" or one.phase != "Pending" or not one.is_active:
            return
        (queue.waiting if self._may_be_looked_at(one) else queue.parked).add(one.uid)

    def _may_be_looked_at(self, one: Workload) -> bool:
        is_out = one.conditions.get("Requeued", {}).get("status") == "False"
        return not is_out and (one.requeue_at is None or one.requeue_at <= self._now())

    def _unqueue(self, one: Workload, *, forget_sticky: bool = True) -> None:
        for queue in self.queues.values():
            queue.waiting.discard(one.uid)
            queue.parked.discard(one.uid)
            if forget_sticky and queue.sticky == one.uid:
                queue.sticky = ""

    def _wake(self, queue: ClusterQueue | None) -> None:
        """Quota may have become free: whoever shares it is looked at again."""
        if queue is None:
            return
        for other in self.queues.values():
            if other is queue or (queue.cohort and other.cohort == queue.cohort):
                back = {uid for uid in other.parked if self._may_be_looked_at(self.workloads[uid])}
                other.parked -= back
                other.waiting |= back

    # -- objects

    def _asker(self, one: Workload) -> Asker:
        queue = self._queue_of(one)
        name = one.admission["clusterQueue"] if one.admission is not None else queue.name if queue is not None else ""
        return asker(one, name, self.queues.get(name))

    def _evict(self, one: Workload, reason: str, message: str) -> None:
        self._set(one, "Evicted", True, reason, message)

    def _waits(self, one: Workload, reason: str, message: str) -> bool:
        before = one.conditions.get("QuotaReserved", {})
        if (before.get("status"), before.get("reason"), before.get("message")) == ("False", reason, message):
            return False
        self._set(one, "QuotaReserved", False, reason, message)
        return True

    def _set(self, one: Workload, kind: str, status: bool, reason: str, message: str) -> None:
        self._change(one, lambda: self._note(one, kind, status, reason, message))

    def _note(self, one: Workload, kind: str, status: bool, reason: str, message: str) -> None:
        before, text = one.conditions.get(kind, {}), "True" if status else "False"
        since = before["lastTransitionTime"] if before.get("status") == text else format_time(self._now())
        one.conditions[kind] = {
            "status": text,
            "reason": reason,
            "message": message,
            "lastTransitionTime": since,
            "observedGeneration": 1,
        }

    def _change(self, one: Workload, change: Callable[[], None]) -> None:
        """Change an object; then do what Kueue's queues do on hearing of it."""
        before, was = one.phase, _what_matters(one)
        change()
        self._told(one, "MODIFIED")
        self._due[one.uid] = None
        if one.phase == "Finished" or not one.is_active:
            self._unqueue(one)
            self._wake(self._queue_of(one))
        elif before == "Pending" and one.phase == "Pending":
            if _what_matters(one) != was:
                self._queue(one)
        elif before == "Pending":
            self._unqueue(one)
        elif one.phase == "Pending":
            self._wake(self._queue_of(one))
            self._queue(one)


def _what_matters(one: Workload) -> tuple[object, ...]:
    """What makes Kueue look again at a Workload that did not fit."""
    return copy.copy(one.spec), one.conditions.get("Evicted"), one.conditions.get("Requeued")


def _without_type(condition: Mapping[str, Any]) -> Body:
    return {key: value for key, value in condition.items() if key != "type"}


def _to_reserve(queue: ClusterQueue, found: Assignment, quota_use: QuotaUse) -> dict[Place, int]:
    """What is kept for who waits and can evict nobody, so that others of the cohort do not take it meanwhile."""
    kept: dict[Place, int] = {}
    for place, amount in found.amounts.items():
        own = queue.allowances.get(place, NOTHING)
        limit = own.nominal - quota_use.used(queue, place)
        if found.borrows:
            kept[place] = amount if own.borrowing is None else min(amount, limit + own.borrowing)
        else:
            kept[place] = max(0, min(amount, limit))
    return kept


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))
