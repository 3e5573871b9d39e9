"""One rank's training state in memory, over generations: what it offers, how it is filled, and that all replicas are equal.

`RankState` decides; here its decisions are carried out on tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from elastipod.errors import ElastipodError, StateDiffersError
from elastipod.in_memory.agent_link import Fate, Kind
from elastipod.in_memory.digests_at_rest import DigestsAtRest
from elastipod.in_memory.exchange import all_texts, text_of
from elastipod.in_memory.following import Following
from elastipod.in_memory.members import Content, Members, digest_of
from elastipod.in_memory.offer_wire import NO_DATA, RankData, RankOffer, decode_offer, encode_offer
from elastipod.in_memory.offers import Offer, ResumePlan
from elastipod.in_memory.phase_limit import PhaseLimit
from elastipod.in_memory.rank import RankState
from elastipod.in_memory.state_transfer import MAX_NAMED, put_back, transfer
from elastipod.rank_ranges import format_ranks
from elastipod.torch_compat import device_errors
from elastipod.value_words import first_of

WHOLE = frozenset({0})  # replicated state is one part


class WorldLost(ElastipodError):
    """A peer of this generation is gone, or the agent has ended the generation: this rank goes back to the barrier."""


@contextmanager
def lost_world(what: str) -> Any:
    """Raise what a collective of this library raises as WorldLost, but for failures of this rank's own device.

    Nothing of the script runs inside.
    """
    try:
        yield
    except device_errors():
        raise
    except RuntimeError as error:
        raise WorldLost(f"{what}: {(str(error).splitlines() or [type(error).__name__])[0]}") from error


class MemoryState:
    """The state of one rank, and its phase; here one that every rank has all of.

    origin: the generation whose sample logs end with the completed step.
    """

    kind: Kind = "replicated"

    def __init__(self, members: Members, limit: PhaseLimit, *, can_be_followed: bool = True) -> None:
        self.members = members
        self.rank = RankState()
        self.origin = 0
        self._is_as_built = True  # nothing has changed the tensors yet
        self._limit = limit
        self._images: dict[int, Content] = {}
        self._at_rest = DigestsAtRest(members, limit.progress)
        self._goes_on = True  # this process is likely to be in the next world
        is_possible = can_be_followed and self.kind == "replicated"
        self.following = Following(members, is_possible=is_possible, at_end=self._at_rest.begin)

    @property
    def completed(self) -> int:
        """The step whose state the tensors hold."""
        assert self.rank.completed is not None
        return self.rank.completed

    def move(self, rank: RankState) -> None:
        """Go to another phase, and drop the images that the protocol has dropped."""
        if rank.phase is not self.rank.phase:
            self._limit.enter(rank.phase)
        if rank.completed is None and self.rank.completed is not None:
            # The optimizer has run in part, or another step is about to overwrite this one.
            self._is_as_built = False
            self._at_rest.forget()
        self.rank = rank
        self._images = {step: image for step, image in self._images.items() if step in rank.images}

    def prepare(self, apply: Callable[[], None]) -> None:
        """The gradients are there and good; ``apply`` is about to run. Every replica's are the same, so each commits on its own."""
        self.following.at_step()

    def commit(self) -> None:
        """The gradients were good and have been applied."""
        self._is_as_built = False
        self._at_rest.forget()
        self.following.at_step(self.completed + 1)
        # Nothing is waited for between the two moves, so the clock needs to know of neither.
        self.rank = self.rank.reduced().committed()
        if self._images:
            # All of the new world is at this step; a rank that lacks it is filled from the others.
            self.rank, self._images = replace(self.rank, images={}), {}

    def copy(self) -> None:
        """Copy what this rank alone holds; nothing where every rank holds all of the state."""

    def finish_following(self) -> None:
        """The next generation begins: the state stands still."""
        self.following.finish()
        if self.following.step is not None and not self._at_rest.has_begun:
            self._at_rest.begin()

    def exchange_offers(self, data: RankData = NO_DATA) -> list[RankOffer]:
        """Give the offers of all ranks, by rank. data: what this rank tells of its data. Collective. Raises WorldLost, BadOffer."""
        own = encode_offer(RankOffer(self.rank.offer(), self.origin, self.following.step, data))
        with lost_world("the offers could not be exchanged"):
            return [decode_offer(text) for text in all_texts(own)]

    def begin_filling(self, offers: Sequence[RankOffer], rank: int) -> ResumePlan | None:
        """Agree on the step to resume at; None when memory holds no whole state. What will be overwritten is copied first."""
        found = self.rank.agreed(tuple(each.offer for each in offers), rank, WHOLE, WHOLE)
        if found is None:
            return None
        for step in found.images.keys() - self._images.keys():
            self._images[step] = self.members.content().copied(self._limit.progress)
        self.move(found)
        resume = found.resume
        assert resume is not None
        self.origin = max(each.origin for each in offers if 0 in each.offer.parts_at(resume.step))
        return resume

    def build_mesh(self, world_size: int) -> None:
        """Have the groups that the members need besides the default one: none."""

    def build(self) -> None:
        """Have members for the present world: those of the last one."""

    def begin_anew(
        self, step: int, rank: int, world_size: int, *, loaded_by: Collection[int] | None, has_changed: bool = True
    ) -> list[Offer]:
        """Give the offers of ranks some of which have loaded a checkpoint, or of which the first gives what it has built.

        loaded_by: the ranks that have loaded it, None where there is no checkpoint. has_changed: whether the load has changed this
        rank's members, which it may have begun on a rank that is not one of them. Raises ElastipodError on a rank that has trained or
        followed, when nothing was loaded: its process must end for a new one.
        """
        is_loaded = loaded_by is not None
        holders = range(1) if loaded_by is None else loaded_by
        if has_changed or not is_loaded:
            self._at_rest.forget()
        if is_loaded:
            self._is_as_built = False
        elif not self._is_as_built:
            raise ElastipodError(
                "no rank has a whole step in memory, and there is no checkpoint: new processes start from the beginning"
            )
        if rank in holders:
            if self.following.has_changed_state and not is_loaded:
                raise ElastipodError(
                    "all ranks that trained are gone, and this rank had only followed them: a new process starts from the beginning"
                )
            self.rank = replace(self.rank, parts=WHOLE, completed=step)
        return [Offer(WHOLE, step) if each in holders else Offer() for each in range(world_size)]

    def fill(self, resume: ResumePlan, offers: Sequence[RankOffer], progress: Callable[[], None]) -> None:
        """Hold the state of the agreed step afterwards. Collective. Raises WorldLost, BadManifest, StateDiffersError."""
        donors = resume.donors[0]
        receivers = [rank for rank in range(len(offers)) if rank not in donors]
        if self.rank.completed is None:
            self._is_as_built = False  # a transfer that is broken off leaves a mixture
            if resume.step in self._images:
                self._at_rest.forget()
                self.members.load(put_back(self.members, self._images[resume.step], progress))
        if receivers:
            followers = [rank for rank in receivers if offers[rank].followed == resume.step]
            with lost_world("the state could not be transferred"):
                content = transfer(self.members, donors, receivers, progress, self._at_rest, followers=followers)
            if content is not None:
                self.members.load(content)

    def finish_filling(self) -> None:
        """The tensors hold the agreed step."""
        self.move(self.rank.filled(WHOLE))

    def verify(self, donor: int) -> None:
        """Compare the digests of all replicas. Collective. Raises WorldLost, and StateDiffersError on ranks that differ."""
        self.compare(donor, f"after step {self.completed}")

    def compare(self, reference: int, when: str) -> None:
        """Compare the digests of all replicas with those of one rank. Collective. Raises as `verify`."""
        compare_replicas(self._at_rest.digests(), reference, when)

    def donor_of(self, resume: ResumePlan) -> int:
        """Give a rank that has what the agreed step is known by, such as its position in the data."""
        return resume.donors[0][0]

    def hand_over(self, fates: Sequence[Fate]) -> bool:
        """Before a planned change, let those who stay hold the whole state; False when that cannot be. Collective.

        fates: of all ranks. Raises WorldLost.
        """
        is_held = Fate.STAYS in fates or Fate.KEPT in fates
        own = fates[dist.get_rank() if dist.is_initialized() else 0]
        self._goes_on = is_held and own is not Fate.LEAVES
        return is_held

    def release(self) -> None:
        """The world ends: hold nothing that needs it. Members outlive it here."""
        self.following.close()

    def rest(self) -> None:
        """This rank waits for the next world: its digests are computed meanwhile.

        Not those of a rank that leaves. It may be taken back, and computes them then.
        """
        if self.rank.completed is not None and self._goes_on:
            self._at_rest.begin()
        else:
            self._at_rest.forget()  # the script may have changed a member since the last comparison
        self._goes_on = True


def compare_replicas(own: Mapping[str, str], reference: int, when: str) -> None:
    """Compare the digests of all replicas with those of one rank. own: this rank's. Collective.

    Raises StateDiffersError, which names ranks and tensors, on ranks that differ, and WorldLost on the others.
    """
    with lost_world("the digests could not be exchanged"):
        digests = all_texts(digest_of(own))
        differing = [rank for rank, digest in enumerate(digests) if digest != digests[reference]]
        if not differing:
            return
        expected: dict[str, str] = json.loads(
            text_of(reference, json.dumps(own) if dist.get_rank() == reference else None)
        )
    ranks = format_ranks(differing)
    if dist.get_rank() not in differing:
        raise WorldLost(f"{when} the state of {ranks} differs from that of rank {reference}")
    keys = sorted(key for key in {*own, *expected} if own.get(key) != expected.get(key))
    raise StateDiffersError(
        f"{when} the state of {ranks} differs from that of rank {reference}, in {first_of(keys, MAX_NAMED)}"
    )
