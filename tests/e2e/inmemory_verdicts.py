"""What many schedules in memory came to: one verdict for each, a line of a file as soon as it is known, and the figures of all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.inmemory_schedules import KINDS_AT, ONLY_STATE, Played, place_of

LEAST_OF_EACH = 10
LEAST_IN_MEMORY = 0.95
Schedule = tuple[str, int]  # state and seed


@dataclass(frozen=True, slots=True)
class Verdict:
    """One schedule. state: "replicated" or "sharded". problem: the first line of what did not hold; empty when all did. planned: how many
    generations nothing but a planned change led to. begun_by_agents: how many agents began by themselves.

    has_lost_all: the last copy of some part was lost, or in sharded state may have been, so that only a disk could help. repeated:
    steps that planned changes, and those after crashes, gave up.
    """

    state: str
    seed: int
    commit: str
    seconds: float
    problem: str = ""
    is_ended: bool = False
    is_in_memory: bool = False
    has_lost_all: bool = False
    faults: int = 0
    planned: int = 0
    begun_by_agents: int = 0
    repeated_when_planned: int = 0
    repeated_after_faults: int = 0
    happened: list[str] = field(default_factory=list)

    def of(self, played: Played, **found: Any) -> Verdict:
        """Give this verdict with what can be said of a job that has ended."""
        told = {**asdict(self), **found}
        planned = played.ended.planned
        repeated = played.given_up
        return Verdict(
            **{
                **told,
                "is_ended": True,
                "is_in_memory": played.is_in_memory,
                "has_lost_all": bool(played.ended.lost_copies)
                or (self.state == "sharded" and may_have_lost_a_part(played)),
                "faults": played.ended.faults,
                "planned": len(planned),
                "begun_by_agents": len(played.ended.begun_by_agents),
                "repeated_when_planned": sum(steps for at, steps in repeated.items() if at in planned),
                "repeated_after_faults": sum(steps for at, steps in repeated.items() if at not in planned),
                "happened": list(played.happened()),
            }
        )


def may_have_lost_a_part(played: Played) -> bool:
    """Whether a job of sharded state did not go on in memory after two of its processes had died before others had copies."""
    return not played.is_in_memory and played.ended.most_dead > 1


def too_many_repeated(played: Played, *, most_after_a_crash: int = 1) -> str:
    """Say in which generation too many steps were computed again: none may be after a planned change. Empty when there is none."""
    for generation, steps in played.given_up.items():
        allowed = 0 if generation in played.ended.planned else most_after_a_crash
        if steps > allowed:
            return f"generation {generation} repeats {steps} steps, and {allowed} may be"
    return ""


class Verdicts:
    """The verdicts of one run, by schedule. A schedule that is played again replaces its verdict."""

    def __init__(self, path: Path, *, goes_on: bool) -> None:
        """goes_on: keep what an earlier run left in the file."""
        self._path = path
        self._found: dict[tuple[str, int], Verdict] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if not goes_on:
            path.unlink(missing_ok=True)
        for line in path.read_text().splitlines() if path.exists() else ():
            verdict = Verdict(**json.loads(line))
            self._found[verdict.state, verdict.seed] = verdict

    def add(self, verdict: Verdict) -> None:
        self._found[verdict.state, verdict.seed] = verdict
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(verdict)) + "\n")

    def all(self) -> list[Verdict]:
        return list(self._found.values())

    def problems(self) -> list[str]:
        return [f"{each.state} seed {each.seed}: {each.problem}" for each in self.all() if each.problem]

    def table(self) -> dict[str, int]:
        """Give how often each fault happened, by moment and kind; all that are possible are in it."""
        happened = Counter(what for each in self.all() for what in each.happened)
        return {what: happened[what] for what in (f"{at} x {kind}" for at, kind in KINDS_AT)}

    def next(self, under_way: Collection[Schedule], first: int) -> Schedule:
        """Choose what to play next, with the fault that was seen least often so far: each fourth of sharded state, where both have it.

        Those under way count as seen, and so does a third of those that were to happen: one that never does must not be tried for ever.
        first: the least seed. A schedule is given once.
        """
        known = {*self._found, *under_way}
        planned = Counter(place_of(seed) for _, seed in known)
        running = Counter(place_of(seed) for _, seed in under_way)
        seen = [max(times + running[at], planned[at] // 3) for at, times in enumerate(self.table().values())]
        rarest = min(range(len(seen)), key=seen.__getitem__)
        at, _ = KINDS_AT[rarest]
        state = ONLY_STATE.get(at, "sharded" if len(known) % 4 == 3 else "replicated")
        seed = first + (rarest - first) % len(KINDS_AT)
        while (state, seed) in known:
            seed += len(KINDS_AT)
        return state, seed

    def unsettled(self) -> list[Schedule]:
        """Give the schedules that were played and did not hold; they are to be played again."""
        return [schedule for schedule, each in self._found.items() if each.problem]

    def rare(self) -> list[int]:
        """Give the places in KINDS_AT of the faults that happened too seldom."""
        return [at for at, times in enumerate(self.table().values()) if times < LEAST_OF_EACH]

    def share_in_memory(self) -> float:
        """Give the share that ended in memory of the schedules that did not lose the last copy."""
        kept = [each for each in self.all() if each.is_ended and not each.has_lost_all]
        return sum(each.is_in_memory for each in kept) / max(1, len(kept))

    def counts(self) -> dict[str, int | float]:
        found = self.all()
        return {
            "schedules": len(found),
            **{f"{state}_schedules": number for state, number in sorted(Counter(each.state for each in found).items())},
            "failed": len(self.problems()),
            "did_not_end": sum(not each.is_ended for each in found),
            "faults": sum(each.faults for each in found),
            "planned_changes": sum(each.planned for each in found),
            "changes_begun_by_agents": sum(each.begun_by_agents for each in found),
            **_outcomes(found),
            "share_in_memory": round(self.share_in_memory(), 4),
            "steps_repeated_by_planned_changes": sum(each.repeated_when_planned for each in found),
            **{
                f"steps_repeated_after_faults_{state}": sum(
                    each.repeated_after_faults for each in found if each.state == state
                )
                for state in ("replicated", "sharded")
            },
            "least_of_a_moment_and_kind": min(self.table().values()),
        }

    def details(self) -> dict[str, object]:
        commits = Counter(each.commit for each in self.all())
        return {"moments_and_kinds": self.table(), "commits": dict(commits), "problems": self.problems()}


def _outcomes(found: Iterable[Verdict]) -> dict[str, int]:
    outcomes: Counter[str] = Counter()
    for each in found:
        if each.is_ended:
            outcomes["lost_last_copy" if each.has_lost_all else "kept_a_copy"] += 1
            outcomes["ended_in_memory"] += each.is_in_memory and not each.has_lost_all
    return dict(outcomes)
