"""One rank's side of the protocol: what it is in, what it holds, and what each event makes of that. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elastipod.in_memory.offers import Offer, Preparation, ResumePlan, newest_resume
from elastipod.in_memory.phases import Phase, move


@dataclass(frozen=True, slots=True)
class RankState:
    """A rank. parts, completed, is_prepared and images are as in `Offer`; resume: what the ranks agreed on, until it trains."""

    phase: Phase = Phase.PARKED
    generation: int = 0
    parts: frozenset[int] = frozenset()
    completed: int | None = None
    is_prepared: bool = False
    images: Mapping[int, frozenset[int]] = field(default_factory=dict)
    resume: ResumePlan | None = None

    # -- training

    def reduced(self) -> RankState:
        """The gradients of the next step were reduced, and all collectives that fed them are known to be good."""
        return replace(self, phase=move(self.phase, Phase.PREPARED), is_prepared=True)

    def committed(self, keep_from: int | None = None) -> RankState:
        """Every rank is prepared, and the optimizer has run.

        What held the state of two steps before is dropped now, and no sooner: that every rank prepared this step says that
        every rank has an image of the last one. keep_from: the newest step that every rank has an image of, where not every
        step is copied.
        """
        assert self.completed is not None
        step = self.completed + 1
        oldest = step - 1 if keep_from is None else min(keep_from, step - 1)
        kept = {at: parts for at, parts in self.images.items() if at >= oldest}
        return replace(self, phase=move(self.phase, Phase.TRAINING), completed=step, is_prepared=False, images=kept)

    # -- leaving a world

    def stopped(self) -> RankState:
        """A collective failed, the agent asked for the end of the generation, or the stop call was reached."""
        return replace(self, phase=move(self.phase, Phase.QUIESCED), resume=None)

    def failed_inside_optimizer(self) -> RankState:
        """The script's optimizer raised: some tensors have its step and some have not."""
        return replace(self.stopped(), completed=None, is_prepared=False)

    def completed_alone(self) -> RankState:
        """A prepared rank that has left its world has run the optimizer, and keeps the state before that as an image.

        It offers the same as it did prepared, and needs its gradients no more.
        """
        assert self.is_prepared
        assert self.completed is not None
        before = self.images.get(self.completed, frozenset()) | self.parts
        images = {**self.images, self.completed: before}
        return replace(self, completed=self.completed + 1, is_prepared=False, images=images)

    def detached(self) -> RankState:
        """The process groups are gone, and the rank waits at the agent's barrier."""
        return replace(self, phase=move(self.phase, Phase.PARKED))

    # -- joining the next one

    def assigned(self, generation: int) -> RankState:
        """The agent gave the rank its place in a newer generation."""
        assert generation > self.generation, "the agent's fence lets no older generation through"
        return replace(self, phase=move(self.phase, Phase.CONNECTING), generation=generation)

    def connected(self) -> RankState:
        """Every rank of the new generation is in its process group."""
        return replace(self, phase=move(self.phase, Phase.AGREEING))

    def offer(self) -> Offer:
        """Give what the rank tells the others."""
        return Offer(self.parts, self.completed, self.is_prepared, self.images)

    def agreed(
        self, offers: tuple[Offer, ...], rank: int, parts: frozenset[int], all_parts: frozenset[int]
    ) -> RankState | None:
        """Every rank's offer is known; None where memory does not hold any step whole, so that storage must.

        parts: those that this rank is to hold. A rank that has to, completes its step here: it needs nobody for it.
        """
        resume = newest_resume(offers, all_parts)
        if resume is None:
            return None
        # Steps beyond the agreed one are computed again, by other ranks perhaps: their images are of a history that is over.
        images = {at: held for at, held in self.images.items() if at <= resume.step}
        begun = replace(self, phase=move(self.phase, Phase.FILLING), resume=resume, is_prepared=False)
        is_replaced = resume.preparations[rank] is Preparation.REPLACE
        whole_at = self.completed if is_replaced else resume.step
        # Images of the agreed step, such as those that a hand-over leaves, let the new world go back to it until it has copied a later
        # one. They are of no use without the parts whose holders keep them as tensors and overwrite them with the next step.
        is_imaged = not self.parts >= all_parts and any(resume.step in offer.images for offer in offers)
        if (is_replaced or parts != self.parts or is_imaged) and whole_at is not None and whole_at <= resume.step:
            # What is overwritten stays as an image until the new world trains. Others may need it, and if the only donor of
            # the agreed step dies now, it is the newest state that is left.
            images[whole_at] = images.get(whole_at, frozenset()) | self.parts
        return replace(begun, completed=None if is_replaced else resume.step, images=images)

    def filled(self, parts: frozenset[int]) -> RankState:
        """The tensors hold these parts, those of the new layout, at the agreed step."""
        assert self.resume is not None
        return replace(self, phase=move(self.phase, Phase.VERIFYING), parts=parts, completed=self.resume.step)

    def verified(self) -> RankState:
        """Every rank has filled and verified its state: the new world trains."""
        return replace(self, phase=move(self.phase, Phase.TRAINING), resume=None)
