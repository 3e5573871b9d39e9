"""What Kueue keeps: Workloads and queues, what its clients change there, and who is to be looked at next."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from tests.sim.kernel import format_time
from tests.sim.kueue_choice import Asker
from tests.sim.kueue_workload import Body, Workload, asker
from tests.sim.quota_capacity import Allowance, ClusterQueue, Place

from elastipod_operator.kube.api import ApiError

Told = Callable[[Workload, str], None]


@dataclass(slots=True)
class LocalQueue:
    """Where the Workloads of a tenant ask."""

    queue: str
    stop: str = "None"


class KueueObjects:
    """The Workloads and their queues, and what others than Kueue do with them.

    now: gives the time; told: hears of every change of a Workload; evicts: of who is evicted for whom.
    """

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
