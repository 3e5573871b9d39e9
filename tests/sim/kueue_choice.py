"""What Kueue 0.15 decides about one Workload: which flavors it gets, and who is evicted for it (without fair sharing).

The rules are those of its scheduler, for cohorts of one level, one group of resources and the default fungibility of
flavors; `kueue_scenarios.py` runs on both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from tests.sim.quota_capacity import NOTHING, Amounts, ClusterQueue, Place, QuotaUse


class Mode(IntEnum):
    """How a flavor could be had, worst first."""

    NO_FIT = 0
    NOBODY_TO_EVICT = 1
    EVICT_OWN = 2
    RECLAIM = 3
    FIT = 4


@dataclass(frozen=True, slots=True)
class PodSet:
    """Pods of a Workload that are alike. selector: of nodes."""

    name: str
    requests: Mapping[str, int]
    selector: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Asker:
    """A Workload as decisions see it. held: what it holds; empty while it waits. since: order of its reservation."""

    uid: str
    queue: str
    priority: int
    created: str
    pod_sets: tuple[PodSet, ...]
    held: Amounts = field(default_factory=dict)
    reserved: str = ""
    is_evicted: bool = False


@dataclass(slots=True)
class Assignment:
    """What a Workload could get. flavors: by pod set. needs: where somebody would have to go first."""

    mode: Mode = Mode.FIT
    flavors: dict[str, str] = field(default_factory=dict)
    amounts: dict[Place, int] = field(default_factory=dict)
    needs: set[Place] = field(default_factory=set)
    borrows: int = 0
    message: str = ""
    victims: tuple[tuple[Asker, str], ...] = ()
    """Who would have to go, and why."""


class Chooser:
    """Decides with the quota that is left. labels: node labels by flavor."""

    def __init__(self, quota_use: QuotaUse, holders: Sequence[Asker], labels: Mapping[str, Mapping[str, str]]) -> None:
        self.quota_use = quota_use
        self._holders = holders
        self._labels = labels

    def assign(self, wish: Asker) -> Assignment:
        """Say what a Workload could get now, and who would be evicted for it."""
        queue = self.quota_use.queues[wish.queue]
        found = Assignment()
        for pod_set in wish.pod_sets:
            self._assign_pod_set(found, wish, pod_set, queue)
            if pod_set.name not in found.flavors:
                found.mode = Mode.NO_FIT
                return found
        if Mode.NO_FIT < found.mode < Mode.FIT:
            found.victims = self.victims(wish, found.needs, found.amounts)
        return found

    def _assign_pod_set(self, found: Assignment, wish: Asker, pod_set: PodSet, queue: ClusterQueue) -> None:
        best: tuple[tuple[Mode, int], str, set[Place]] | None = None
        reasons: list[str] = [
            f"resource {name} unavailable in ClusterQueue" for name in pod_set.requests if not queue.covers(name)
        ]
        for flavor in () if reasons else queue.flavors:
            labels = self._labels.get(flavor, {})
            if any(labels.get(key, value) != value for key, value in pod_set.selector.items()):
                reasons.append(f"flavor {flavor} doesn't match node affinity")
                continue
            how = (Mode.FIT, 0)
            needs: set[Place] = set()
            for resource, amount in pod_set.requests.items():
                place = (flavor, resource)
                mode, borrow, why = self._mode(wish, queue, place, found.amounts.get(place, 0) + amount)
                reasons += [why] if why else []
                needs |= {place} if mode not in (Mode.FIT, Mode.NO_FIT) else set()
                how = min(how, (mode, -borrow))
            if how[0] is Mode.NO_FIT:
                continue
            if best is None or how > best[0]:
                best = (how, flavor, needs)
            if how[0] is Mode.FIT:
                break
        if best is not None:
            (mode, borrow), flavor, needs = best
            found.flavors[pod_set.name] = flavor
            found.mode = min(found.mode, mode)
            found.borrows = max(found.borrows, -borrow)
            found.needs |= needs
            for resource, amount in pod_set.requests.items():
                found.amounts[flavor, resource] = found.amounts.get((flavor, resource), 0) + amount
        if best is None or best[0][0] is not Mode.FIT:
            what = f"couldn't assign flavors to pod set {pod_set.name}: {', '.join(reasons)}"
            found.message = "; ".join(filter(None, (found.message, what)))

    def _mode(self, wish: Asker, queue: ClusterQueue, place: Place, amount: int) -> tuple[Mode, int, str]:
        """Say how so much of a flavor's resource could be had: mode, whether it is borrowed (0, 1), and what is missing."""
        flavor, resource = place
        most, available = self.quota_use.most(queue, place), self.quota_use.available(queue, place)
        if amount > most:
            what = f"insufficient quota for {resource} in flavor {flavor}"
            return Mode.NO_FIT, 0, f"{what}, current podset request ({amount}) > maximum capacity ({most})"
        borrow = self._borrow(queue, place, amount)
        if amount <= available:
            return Mode.FIT, borrow, ""
        why = f"insufficient unused quota for {resource} in flavor {flavor}, {amount - available} more needed"
        nominal = queue.allowances.get(place, NOTHING).nominal
        is_within = bool(queue.cohort) and not self.quota_use.borrows(queue, place, amount)
        if amount > nominal and not is_within and queue.borrow == "Never":
            return Mode.NO_FIT, borrow, why
        victims = self.victims(wish, {place}, {place: amount})
        if not victims:
            return Mode.NOBODY_TO_EVICT, borrow, why
        with self.quota_use.without((one.queue, one.held) for one, _ in victims):
            borrow = self._borrow(queue, place, amount)
        is_own = any(one.queue == queue.name for one, _ in victims)
        return Mode.EVICT_OWN if is_own else Mode.RECLAIM, borrow, why

    def _borrow(self, queue: ClusterQueue, place: Place, amount: int) -> int:
        return int(bool(queue.cohort) and self.quota_use.borrows(queue, place, amount))

    # -- who has to go

    def victims(self, wish: Asker, needs: set[Place], amounts: Amounts) -> tuple[tuple[Asker, str], ...]:
        """Give a smallest set of Workloads whose end would free enough quota, as Kueue finds it; none when there is none."""
        queue = self.quota_use.queues[wish.queue]
        own = [] if queue.within == "Never" else self._candidates(wish, queue, queue.within, needs, same=True)
        others: list[Asker] = []
        if queue.cohort and queue.reclaim != "Never":
            others = self._candidates(wish, queue, queue.reclaim, needs, same=False)
        has_right = all(not self.quota_use.borrows(queue, place, amount) for place, amount in amounts.items())
        tried = [
            *((one, self._variant(wish, queue, one, has_right=has_right)) for one in others),
            *((one, "InClusterQueue") for one in own),
        ]
        tried = [pair for pair in tried if pair[0].is_evicted] + [pair for pair in tried if not pair[0].is_evicted]
        for borrowing in self._attempts(queue, bool(others), has_right, needs):
            found = self._try(queue, tried, amounts, needs, borrowing=borrowing)
            if found:
                return tuple(found)
        return ()

    def _candidates(
        self, wish: Asker, queue: ClusterQueue, policy: str, needs: set[Place], *, same: bool
    ) -> list[Asker]:
        found = [
            one
            for one in self._holders
            if (one.queue == queue.name) is same
            and needs.intersection(one.held)
            and _may_evict(policy, wish, one)
            and (same or (self.quota_use.queues[one.queue].cohort == queue.cohort and self._is_over(one.queue, needs)))
        ]
        newest_first = sorted(found, key=lambda one: one.uid)
        newest_first.sort(key=lambda one: one.reserved, reverse=True)
        return sorted(newest_first, key=lambda one: (not one.is_evicted, one.priority))

    def _variant(self, wish: Asker, queue: ClusterQueue, one: Asker, *, has_right: bool) -> str:
        if has_right:
            return "InCohortReclamation"
        is_low = queue.threshold is None or one.priority <= queue.threshold
        may_borrow = queue.borrow != "Never" and one.priority < wish.priority and is_low
        return "InCohortReclaimWhileBorrowing" if may_borrow else "InCohortReclamation, not borrowing"

    def _attempts(self, queue: ClusterQueue, has_others: bool, has_right: bool, needs: set[Place]) -> tuple[bool, ...]:
        """Give whether the queue may borrow in each attempt to find victims, in order."""
        is_forbidden = queue.borrow == "Never"
        is_under = all(
            self.quota_use.used(queue, place) < queue.allowances.get(place, NOTHING).nominal for place in needs
        )
        if not has_others or (is_forbidden and not is_under):
            return (True,)
        return (False, True) if is_forbidden and not has_right else (True, False)

    def _try(
        self,
        queue: ClusterQueue,
        candidates: list[tuple[Asker, str]],
        amounts: Amounts,
        needs: set[Place],
        *,
        borrowing: bool,
    ) -> list[tuple[Asker, str]]:
        """Take one after the other away until it fits, then put back who need not have gone."""
        gone: list[tuple[Asker, str]] = []
        found: list[tuple[Asker, str]] = []
        for one, why in candidates:
            if one.queue != queue.name and (
                (borrowing and "not borrowing" in why) or not self._is_over(one.queue, needs)
            ):
                continue
            self.quota_use.remove(one.queue, one.held)
            gone.append((one, why))
            if self._is_enough(queue, amounts, borrowing=borrowing):
                found = self._spared(queue, gone, amounts, borrowing=borrowing)
                break
        for one, _ in found or gone:
            self.quota_use.add(one.queue, one.held)
        return found

    def _spared(
        self, queue: ClusterQueue, gone: list[tuple[Asker, str]], amounts: Amounts, *, borrowing: bool
    ) -> list[tuple[Asker, str]]:
        *others, last = gone
        kept = [last]
        for one, why in reversed(others):
            self.quota_use.add(one.queue, one.held)
            if not self._is_enough(queue, amounts, borrowing=borrowing):
                self.quota_use.remove(one.queue, one.held)
                kept.append((one, why))
        return kept

    def _is_enough(self, queue: ClusterQueue, amounts: Amounts, *, borrowing: bool) -> bool:
        if not borrowing and any(self.quota_use.borrows(queue, place, amount) for place, amount in amounts.items()):
            return False
        return self.quota_use.fits(queue, amounts)

    def _is_over(self, name: str, needs: set[Place]) -> bool:
        """Whether a queue uses more than its own."""
        return any(self.quota_use.borrows(self.quota_use.queues[name], place) for place in needs)


def _may_evict(policy: str, wish: Asker, one: Asker) -> bool:
    if policy == "Any":
        return True
    is_newer = policy == "LowerOrNewerEqualPriority" and one.priority == wish.priority and wish.created < one.created
    return one.priority < wish.priority or is_newer
