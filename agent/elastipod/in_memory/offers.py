"""Which step a new world resumes at, and where each rank gets its state from. Pure; every rank computes the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from elastipod.string_enum import StringEnum


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank brings to a new world, as it tells all other ranks.

    parts: the parts of the state that its tensors hold; with DDP the one part 0, with sharded state its shards.
    completed: the newest step that its tensors have completed; None when they hold nothing whole: a newcomer's, or those
    of a rank that failed inside its optimizer.
    is_prepared: the reduced gradients of the step after `completed` are all there and known to be good.
    images: the parts of its memory images, own and copied, by step.
    """

    parts: frozenset[int] = frozenset()
    completed: int | None = None
    is_prepared: bool = False
    images: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def parts_at(self, step: int) -> frozenset[int]:
        """Give the parts whose state at a step this rank has, or can compute on its own."""
        return self._tensors_at(step) | self.images.get(step, frozenset())

    def _tensors_at(self, step: int) -> frozenset[int]:
        return self.parts if self.has_completed(step) or self.can_complete(step) else frozenset()

    def has_completed(self, step: int) -> bool:
        """Whether its tensors hold the state after a step."""
        return self.completed == step

    def can_complete(self, step: int) -> bool:
        """Whether only its optimizer is left to run for a step."""
        return self.is_prepared and self.completed is not None and self.completed + 1 == step


class Preparation(StringEnum):
    """What a rank does with its own tensors before anything is transferred."""

    KEEP = "keep"
    # Run the optimizer on the prepared gradients.
    COMPLETE = "complete"
    # Nothing: all that it needs comes from images or from other ranks.
    REPLACE = "replace"


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """Where a new world goes on. Preparations and donors are by rank of the new world; donors by part, in rank order."""

    step: int
    preparations: tuple[Preparation, ...]
    donors: Mapping[int, tuple[int, ...]]


def newest_resume(offers: tuple[Offer, ...], parts: Iterable[int]) -> ResumePlan | None:
    """Give the newest step at which the ranks together have every part of the state; None when there is none in memory.

    offers: of all ranks of the new world, by rank. A prepared step counts as complete: each rank that prepared it has the
    sum of all ranks' gradients for its parts, so no other rank is needed to finish it.
    """
    needed = frozenset(parts)
    for step in sorted(_candidates(offers), reverse=True):
        held = [offer.parts_at(step) for offer in offers]
        donors = {part: tuple(rank for rank, parts in enumerate(held) if part in parts) for part in needed}
        if all(donors.values()):
            return ResumePlan(step, tuple(_preparation(offer, step) for offer in offers), donors)
    return None


def _candidates(offers: Iterable[Offer]) -> set[int]:
    steps: set[int] = set()
    for offer in offers:
        steps.update(offer.images)
        if offer.completed is not None:
            steps.add(offer.completed)
            if offer.is_prepared:
                steps.add(offer.completed + 1)
    return steps


def _preparation(offer: Offer, step: int) -> Preparation:
    if offer.has_completed(step):
        return Preparation.KEEP
    return Preparation.COMPLETE if offer.can_complete(step) else Preparation.REPLACE
