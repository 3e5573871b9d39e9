"""The model of Kueue 0.15: Workloads, queues, and what its scheduler and its controller make of them.

Time passes only where the caller lets it: `work` does one thing after the other until all is at rest. Nobody is evicted by
a time-out here, and an evicted Workload keeps its quota until its owner gives it back, as with the real one. Left out are
fair sharing, cohorts within cohorts, admission checks and topology.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from tests.sim.kueue_choice import Asker, Assignment, Chooser, Mode
from tests.sim.kueue_objects import KueueObjects, LocalQueue
from tests.sim.kueue_workload import AT_ITS_TIME, Workload
from tests.sim.quota_capacity import NOTHING, ClusterQueue, Place, QuotaUse

BACKOFF_S = 60
# Evictions that Kueue itself takes back when what stopped the queue is over.
BY_QUEUES = {"ClusterQueueStopped": "ClusterQueueRestarted", "LocalQueueStopped": "LocalQueueRestarted"}


class Kueue(KueueObjects):
    """All of it: what its scheduler and its controller do with the Workloads."""

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
