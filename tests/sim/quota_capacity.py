"""Quota as Kueue reckons it: what each ClusterQueue has, uses, lends to its cohort and borrows from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

Place = tuple[str, str]
"""A flavor and a resource."""
Amounts = Mapping[Place, int]


@dataclass(frozen=True, slots=True)
class Allowance:
    """The quota of one resource in one flavor. borrowing, lending: how much at most; None for without limit."""

    nominal: int
    borrowing: int | None = None
    lending: int | None = None

    @property
    def kept(self) -> int:
        """What is never lent to others."""
        return 0 if self.lending is None else max(0, self.nominal - self.lending)


NOTHING = Allowance(0)


@dataclass(slots=True)
class ClusterQueue:
    """A queue and its settings, in Kueue's words. allowances: in the order in which flavors are tried."""

    name: str
    allowances: dict[Place, Allowance]
    cohort: str = ""
    strategy: str = "BestEffortFIFO"
    within: str = "Never"
    reclaim: str = "Never"
    borrow: str = "Never"
    threshold: int | None = None
    """The highest priority of those whom a base that borrows may evict; None for any below its own."""
    stop: str = "None"
    waiting: set[str] = field(default_factory=set)
    """UIDs of Workloads that are to be looked at."""
    parked: set[str] = field(default_factory=set)
    """UIDs of those that did not fit when they were looked at; they wait until something changes."""
    sticky: str = ""
    """The UID of who waits for the end of those whom it evicted: nobody may overtake it."""

    @property
    def flavors(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(flavor for flavor, _ in self.allowances))

    def covers(self, resource: str) -> bool:
        return any(covered == resource for _, covered in self.allowances)


class QuotaUse:
    """Quota and its use at one moment. The use may be changed to see what would be."""

    def __init__(self, queues: Iterable[ClusterQueue]) -> None:
        self.queues = {queue.name: queue for queue in queues}
        self._used: dict[tuple[str, Place], int] = defaultdict(int)

    def add(self, queue: str, amounts: Amounts) -> None:
        """Book what a Workload takes."""
        for place, amount in amounts.items():
            self._used[queue, place] += amount

    def remove(self, queue: str, amounts: Amounts) -> None:
        """Book it out."""
        for place, amount in amounts.items():
            self._used[queue, place] -= amount

    @contextmanager
    def without(self, held: Iterable[tuple[str, Amounts]]) -> Iterator[None]:
        """Have some Workloads booked out for a while."""
        gone = list(held)
        for one in gone:
            self.remove(*one)
        try:
            yield
        finally:
            for one in gone:
                self.add(*one)

    def used(self, queue: ClusterQueue, place: Place) -> int:
        return self._used[queue.name, place]

    def available(self, queue: ClusterQueue, place: Place) -> int:
        """Give how much more the queue could take now, borrowing included."""
        own, used = queue.allowances.get(place, NOTHING), self.used(queue, place)
        if not queue.cohort:
            return max(0, own.nominal - used)
        lent = self._lent(queue.cohort, place) - self._taken(queue.cohort, place)
        if own.borrowing is not None:
            lent = min(lent, own.nominal - own.kept - max(0, used - own.kept) + own.borrowing)
        return max(0, max(0, own.kept - used) + lent)

    def most(self, queue: ClusterQueue, place: Place) -> int:
        """Give how much the queue could have if nobody else had anything."""
        own = queue.allowances.get(place, NOTHING)
        if not queue.cohort:
            return own.nominal
        most = own.kept + self._lent(queue.cohort, place)
        return most if own.borrowing is None else min(most, own.nominal + own.borrowing)

    def borrows(self, queue: ClusterQueue, place: Place, more: int = 0) -> bool:
        """Whether the queue would use more than it has of its own."""
        return self.used(queue, place) + more > queue.allowances.get(place, NOTHING).nominal

    def fits(self, queue: ClusterQueue, amounts: Amounts) -> bool:
        return all(self.available(queue, place) >= amount for place, amount in amounts.items())

    def _members(self, cohort: str) -> Iterator[ClusterQueue]:
        return (queue for queue in self.queues.values() if queue.cohort == cohort)

    def _lent(self, cohort: str, place: Place) -> int:
        """Give what all members put together."""
        own = (queue.allowances.get(place, NOTHING) for queue in self._members(cohort))
        return sum(one.nominal - one.kept for one in own)

    def _taken(self, cohort: str, place: Place) -> int:
        """Give what they use of that."""
        return sum(
            max(0, self.used(queue, place) - queue.allowances.get(place, NOTHING).kept)
            for queue in self._members(cohort)
        )
