"""Small scenarios in queues, and who has quota at rest after each step: run on the model and on the real Kueue.

They are about what the settings in examples/kueue promise. Nothing depends on the order of two steps of the same second,
which Kueue does not tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MORE = -1_000_000_000
"""The priority of increments."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A Workload of so many pods with one CPU each."""

    name: str
    count: int
    priority: int = 0
    queue: str = "a"
    pool: str = ""
    """The node label that its pods must have."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Its owner deletes it, as the operator does with increments."""

    name: str


@dataclass(frozen=True, slots=True)
class Release:
    """Its owner gives the quota back and leaves it in the queue, as the operator does with bases."""

    name: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Its job is done."""

    name: str


@dataclass(frozen=True, slots=True)
class Activate:
    """A user deactivates it, or activates it again."""

    name: str
    active: bool


@dataclass(frozen=True, slots=True)
class SetQuota:
    """An administrator edits the quota of a queue's first flavor."""

    queue: str
    cpu: int


@dataclass(frozen=True, slots=True)
class Stop:
    """An administrator stops a queue, or lets it go on. policy: Hold, HoldAndDrain, None."""

    queue: str
    policy: str


Operation = Ask | Drop | Release | Finish | Activate | SetQuota | Stop


@dataclass(frozen=True, slots=True)
class Queue:
    """A ClusterQueue and its LocalQueue. quota: CPUs by flavor; a flavor's nodes have the label `pool` of its name."""

    name: str = "a"
    quota: Mapping[str, int] = field(default_factory=lambda: {"x": 4})
    borrowing: int | None = None
    lending: int | None = None
    strategy: str = "BestEffortFIFO"
    within: str = "LowerPriority"
    reclaim: str = "Never"
    borrow: str = "Never"
    threshold: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What somebody does and who holds quota, is to give it back, and waits, at rest after it."""

    does: Operation
    admitted: str = ""
    evicted: str = ""
    pending: str = ""

    def seen(self) -> dict[str, str]:
        return {
            **dict.fromkeys(self.admitted.split(), "admitted"),
            **dict.fromkeys(self.evicted.split(), "evicted"),
            **dict.fromkeys(self.pending.split(), "pending"),
        }


@dataclass(frozen=True, slots=True)
class Scenario:
    """Queues, which lend to each other where there are several, and what happens in them."""

    queues: tuple[Queue, ...]
    steps: tuple[Step, ...]


def _one(*steps: Step, cpu: int = 4, strategy: str = "BestEffortFIFO", within: str = "LowerPriority") -> Scenario:
    return Scenario((Queue(quota={"x": cpu}, strategy=strategy, within=within),), steps)


def _two(*steps: Step, reclaim: str = "LowerPriority", borrow: str = "Never") -> Scenario:
    threshold = -900_000_000 if borrow != "Never" else None
    queues = (Queue(name, reclaim=reclaim, borrow=borrow, threshold=threshold) for name in ("a", "b"))
    return Scenario(tuple(queues), steps)


SCENARIOS: dict[str, Scenario] = {
    "the newest increment goes, and only as many as are needed": _one(
        Step(Ask("base", 2), "base"),
        Step(Ask("more-1", 1, MORE), "base more-1"),
        Step(Ask("more-2", 1, MORE), "base more-1 more-2"),
        Step(Ask("more-3", 1, MORE), "base more-1 more-2 more-3"),
        Step(Ask("new", 2), "base more-1 more-2", "more-3", "new"),
        Step(Drop("more-3"), "base more-1 more-2 new"),
        Step(Ask("more-3", 1, MORE), "base more-1 more-2 new", pending="more-3"),
        cpu=6,
    ),
    "bases of one class wait for each other": _one(
        Step(Ask("first", 3), "first"),
        Step(Ask("second", 3), "first", pending="second"),
        Step(Ask("third", 1), "first third", pending="second"),
        Step(Finish("first"), "second third"),
    ),
    "an increment goes before any base, a base only for a higher class": _one(
        Step(Ask("weak", 2, -10), "weak"),
        Step(Ask("more", 2, MORE), "weak more"),
        Step(Ask("new", 2), "weak", "more", "new"),
        Step(Drop("more"), "weak new"),
        Step(Ask("high", 2, 1000), "new", "weak", "high"),
        Step(Release("weak"), "new high", pending="weak"),
        Step(Finish("new"), "weak high"),
    ),
    "increments evict nobody": _one(
        Step(Ask("weak", 2, -10), "weak"),
        Step(Ask("base", 2), "weak base"),
        Step(Ask("more", 1, MORE), "weak base", pending="more"),
        Step(Ask("most", 1, MORE + 1000), "weak base", pending="more most"),
        Step(Finish("weak"), "base more most"),
    ),
    "increments one below their base would evict weaker bases": _one(
        Step(Ask("weak", 2, -10), "weak"),
        Step(Ask("base", 2), "weak base"),
        Step(Ask("more", 1, -1), "base", "weak", "more"),
        Step(Release("weak"), "base more", pending="weak"),
    ),
    "of increments that wait a small one passes a large one": _one(
        Step(Ask("base", 3), "base"),
        Step(Ask("large", 2, MORE), "base", pending="large"),
        Step(Ask("small", 1, MORE), "base small", pending="large"),
    ),
    "under StrictFIFO it does not, but a base does": _one(
        Step(Ask("base", 2), "base"),
        Step(Ask("large", 3, MORE), "base", pending="large"),
        Step(Ask("small", 1, MORE), "base", pending="large small"),
        Step(Ask("other", 1), "base other", pending="large small"),
        Step(Finish("base"), "other large", pending="small"),
        strategy="StrictFIFO",
    ),
    "nobody overtakes who waits for the end of those that it evicted": _one(
        Step(Ask("more-1", 2, MORE), "more-1"),
        Step(Ask("more-2", 2, MORE), "more-1 more-2"),
        Step(Ask("new", 3), "", "more-1 more-2", "new"),
        Step(Ask("late", 2, 5), "", "more-1 more-2", "new late"),
        Step(Drop("more-2"), "", "more-1", "new late"),
        Step(Drop("more-1"), "", "new", "late"),
        Step(Release("new"), "late", pending="new"),
    ),
    "one after the other evicts, first those that have to go already": _one(
        Step(Ask("more-1", 2, MORE), "more-1"),
        Step(Ask("more-2", 2, MORE), "more-1 more-2"),
        Step(Ask("new", 2), "more-1", "more-2", "new"),
        Step(Ask("next", 2), "more-1", "more-2", "new next"),
        Step(Drop("more-2"), "new", "more-1", "next"),
        Step(Drop("more-1"), "new next"),
    ),
    "without preemption nobody goes": _one(
        Step(Ask("base", 2), "base"),
        Step(Ask("more", 2, MORE), "base more"),
        Step(Ask("new", 2, 1000), "base more", pending="new"),
        within="Never",
    ),
    "older increments would evict newer ones under LowerOrNewerEqualPriority": _one(
        Step(Ask("base", 3), "base"),
        Step(Ask("old", 4, MORE), "base", pending="old"),
        Step(Ask("young", 1, MORE), "base young", pending="old"),
        Step(Finish("base"), "", "young", "old"),
        Step(Drop("young"), "old"),
        within="LowerOrNewerEqualPriority",
    ),
    "a base that was given back keeps its place, one asked for anew does not": _one(
        Step(Ask("first", 4), "first"),
        Step(Ask("second", 4), "first", pending="second"),
        Step(Ask("high", 4, 10), "", "first", "high second"),
        Step(Release("first"), "high", pending="first second"),
        Step(Finish("high"), "first", pending="second"),
        Step(Drop("first"), "second"),
        Step(Ask("first", 4), "second", pending="first"),
    ),
    "a lender takes increments back, its own increments take nothing": _two(
        Step(Ask("own", 4, queue="b"), "own"),
        Step(Ask("lent", 3, MORE, queue="b"), "own lent"),
        Step(Ask("more", 2, MORE), "own lent", pending="more"),
        Step(Ask("owner", 2), "own", "lent", "owner more"),
        Step(Drop("lent"), "own owner more"),
    ),
    "with reclaim Any an increment takes back what a base borrowed": _two(
        Step(Ask("own", 4, queue="b"), "own"),
        Step(Ask("lent", 4, queue="b"), "own lent"),
        Step(Ask("more", 2, MORE), "own", "lent", "more"),
        Step(Release("lent"), "own more", pending="lent"),
        reclaim="Any",
    ),
    "a base that borrows pushes increments aside that borrow": _two(
        Step(Ask("small", 2, -100, queue="b"), "small"),
        Step(Ask("lent", 6, MORE, queue="b"), "small lent"),
        Step(Ask("big", 5, 1000), "small", "lent", "big"),
        Step(Drop("lent"), "small big"),
        borrow="LowerPriority",
    ),
    "but no base that borrows": _two(
        Step(Ask("small", 4, -100, queue="b"), "small"),
        Step(Ask("lent", 2, -100, queue="b"), "small lent"),
        Step(Ask("big", 5, 1000), "small lent", pending="big"),
        Step(Ask("fair", 3, 1000), "small", "lent", "fair big"),
        Step(Release("lent"), "small fair", pending="big lent"),
        borrow="LowerPriority",
    ),
    "without it who borrows waits": _two(
        Step(Ask("lent", 7, MORE, queue="b"), "lent"),
        Step(Ask("big", 5, 1000), "lent", pending="big"),
        Step(Ask("fair", 4, 1000), "", "lent", "big fair"),
    ),
    "a queue borrows and lends as much as it may": Scenario(
        (Queue(borrowing=1, reclaim="LowerPriority"), Queue("b", lending=2, reclaim="LowerPriority")),
        (
            Step(Ask("never", 6), "", pending="never"),
            Step(Ask("most", 5), "most", pending="never"),
            Step(Ask("own", 3, queue="b"), "most own", pending="never"),
            Step(Ask("back", 1, 10, queue="b"), "own", "most", "back never"),
            Step(Release("most"), "own back", pending="most never"),
            Step(Ask("low", 4, -5), "own back low", pending="most never"),
        ),
    ),
    "an edit of the quota evicts nobody": _one(
        Step(Ask("first", 3), "first"),
        Step(Ask("second", 3), "first", pending="second"),
        Step(SetQuota("a", 6), "first second"),
        Step(SetQuota("a", 3), "first second"),
        Step(Ask("more", 1, MORE), "first second", pending="more"),
        Step(Finish("second"), "first", pending="more"),
        Step(SetQuota("a", 4), "first more"),
    ),
    "a queue on hold lets nobody in": _one(
        Step(Ask("base", 2), "base"),
        Step(Stop("a", "Hold"), "base"),
        Step(Ask("more", 1, MORE), "base", pending="more"),
        Step(Stop("a", "None"), "base more"),
    ),
    "a queue that is drained takes all back, and lets them in again": _one(
        Step(Ask("base", 2), "base"),
        Step(Ask("more", 1, MORE), "base more"),
        Step(Stop("a", "HoldAndDrain"), "", "base more"),
        Step(Drop("more"), "", "base"),
        Step(Release("base"), "", pending="base"),
        Step(Stop("a", "None"), "base"),
    ),
    "who is deactivated is booked out at once": _one(
        Step(Ask("base", 4), "base"),
        Step(Ask("other", 4), "base", pending="other"),
        Step(Activate("base", False), "other", "base"),
        Step(Release("base"), "other", pending="base"),
        Step(Finish("other"), "", pending="base"),
        Step(Activate("base", True), "base"),
    ),
    "increments that are pinned to a flavor wait for it": Scenario(
        (Queue(quota={"x": 3, "y": 4}),),
        (
            Step(Ask("base", 3), "base"),
            Step(Ask("more", 2, MORE, pool="x"), "base", pending="more"),
            Step(Ask("other", 3), "base other", pending="more"),
            Step(Ask("last", 3), "base other", pending="more last"),
            Step(Finish("base"), "other last", pending="more"),
        ),
    ),
}  # fmt: skip
