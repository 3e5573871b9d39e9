"""Copies of shards in another failure domain: who holds them, within which budget of memory and of the network, and which count."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

import torch.distributed as dist

from elastipod import chaos
from elastipod.checkpoint.collective_planning import DOMAIN_ENV
from elastipod.checkpoint.memory_directory import host_identity
from elastipod.checkpoint.save_plan import choose_copy_holders
from elastipod.in_memory.contiguous_image import contiguous_image
from elastipod.in_memory.exchange import all_texts
from elastipod.in_memory.members import Members
from elastipod.in_memory.parts import PartContent, ShardedShape, live_part, part_of, place_of
from elastipod.in_memory.rank import RankState
from elastipod.in_memory.shard_exchange import any_raised, exchange_images
from elastipod.in_memory.shard_plan import newest_copied, second_holders
from elastipod.in_memory.shard_transfer import Progress
from elastipod.rank_ranges import format_ranks

log = logging.getLogger(__name__)

GENERATIONS = 2  # of copies that exist at once: the newest complete one, and the one that is being made


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of every rank's shards in another failure domain, so that the loss of one costs no more than the steps since.

    memory_bytes: of host memory that a rank may use for them, its own former state and another's. every: steps between two copies.
    bytes_per_s: that a rank may send for copies, on average; a copy that would exceed it is left out, and the next one that is due
    within it is made. None: no limit. The first step of each world is copied in any case.
    """

    memory_bytes: int
    every: int = 1
    bytes_per_s: int | None = None

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "every", "bytes_per_s"):
            value = getattr(self, name)
            if not isinstance(value, Real) and (name != "bytes_per_s" or value is not None):
                raise TypeError(f"{name} is {value!r:.80}; it must be a number")
        if self.every < 1 or self.memory_bytes < 1 or (self.bytes_per_s is not None and self.bytes_per_s < 1):
            raise ValueError(
                f"{self}: every, memory_bytes and bytes_per_s must be at least 1; leave copies out for none, and bytes_per_s for no limit"
            )


class ShardCopies:
    """Makes the copies of one rank, in one world after the other."""

    def __init__(self, wanted: Copies | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._wanted, self._clock = wanted, clock
        self._holders: dict[int, int] | None = None  # by rank; None: not known in this world yet
        # Of the tensors when the budget was last compared in this world.
        self._shapes: tuple[ShardedShape, ...] | None = None
        self._bytes = 0  # of this rank's images of one step, with these shapes
        self._complete: set[int] = set()  # steps of which all ranks have good copies
        self._is_wrong = False  # the copy that this rank took last
        self._not_before = 0.0  # the next copy, by the clock
        self.is_postponed = False  # the copy of the step in work

    def forget_world(self) -> None:
        """The world has ended; another has other holders."""
        self._holders = self._shapes = None

    @property
    def comes_too_soon(self) -> bool:
        """Whether, by the clock of rank 0, a copy of the step in work would exceed what may be sent. All ranks hear what any says."""
        return dist.is_initialized() and dist.get_rank() == 0 and self._clock() < self._not_before

    def end(self, step: int) -> bool:
        """Return when all ranks have ended the copies of a step; give whether all are good, so that they count. Collective.

        No rank begins the next step before: else a rank that dies among the copies would cost a second one. Raises RuntimeError as `take`.
        """
        (is_wrong,) = any_raised(self._is_wrong)
        if not is_wrong:
            self._complete.add(step)
        return not is_wrong

    def newest(self, rank: RankState) -> int | None:
        """Give the step whose images must stay until a newer one is copied; None: those of the last step are enough."""
        self._complete &= rank.images.keys()
        if self._wanted is None or self._holders == {} or not rank.images:
            return None
        return newest_copied(rank.images, self._complete)

    def is_complete(self, step: int) -> bool:
        """Whether all ranks have ended the copies of a step, and all are good."""
        return step in self._complete

    def take(
        self, step: int, members: Members, part: int, progress: Progress, make_room: Callable[[int], None]
    ) -> list[PartContent]:
        """Give the images that this rank holds of a step; none if no copy is due. Collective. Raises RuntimeError when a peer is gone.

        Where there are images, all ranks call `end` next. There are none any more in this world, with a sentence, when a rank would exceed
        its budget: parts grow, as with the first step that a GradScaler does not leave out.

        make_room: is called before the first copy of a world and where parts have another size since the copy before, with how many bytes
        older images may take beside this one.
        """
        if self._wanted is None or self._holders == {}:
            return []
        if self._holders is None:
            self._holders = self._choose_holders(part)
            if not self._holders:
                return []
        elif step % self._wanted.every or self.is_postponed:
            return []
        began = self._clock()
        live = live_part(members, part)
        if not self._keeps_to_budget(live, self._holders, make_room):
            self._holders = {}
            return []
        own = contiguous_image(live)
        if self._wanted.bytes_per_s is not None:
            self._not_before = began + own.raw.numel() / self._wanted.bytes_per_s
        passing = chaos.passing(chaos.Moment.COPY, progress, rank=place_of(part)[1], step=step)
        taken, wrong = exchange_images(own, self._holders, passing)
        self._is_wrong = bool(wrong)
        if wrong:
            log.warning(
                "the copies of %s of step %d have arrived with other content than they were sent with; until the next copies are made, "
                "the loss of a rank costs the steps since the copies before",
                *(format_ranks(wrong), step),
            )
        return [own.content, *taken]

    def held_by_ranks(self, parts: Collection[int]) -> list[list[int]]:
        """Give, by rank, the parts of which it has images of one step; nothing without copies.

        parts: those of this rank. Collective. Raises RuntimeError when a peer is gone.
        """
        return [] if self._wanted is None else [json.loads(text) for text in all_texts(json.dumps(sorted(parts)))]

    def second_holders(
        self,
        holders: Sequence[tuple[int, int]],
        staying: Sequence[int],
        members: Members,
        part: int,
        older_bytes: int,
    ) -> dict[int, int]:
        """Give a second holder for each part that one rank alone will hold when others leave, the same on every rank.

        None without copies, or where one of those who stay would exceed its budget. holders, staying: as for `shard_plan.second_holders`;
        parts of other layouts among them take room. part: of this rank. older_bytes: of the images that this rank holds of former steps.
        Collective. Raises RuntimeError when a peer is gone.
        """
        if self._wanted is None:
            return {}
        num_shards, _ = place_of(part)
        chosen = second_holders([each for each in holders if place_of(each[0])[0] == num_shards], staying)
        shapes = live_part(members, part).shapes
        held = [*holders, *chosen.items()]
        told = [json.loads(text) for text in all_texts(json.dumps([older_bytes, self._wanted.memory_bytes]))]
        needs = {rank: told[rank][0] + _num_bytes(shapes, (one for one, at in held if at == rank)) for rank in staying}
        fullest = max(staying, key=lambda rank: needs[rank] - told[rank][1])
        if needs[fullest] <= told[fullest][1]:
            return chosen
        if dist.get_rank() == 0:
            log.warning(
                "until the new world has made copies, the loss of a rank costs the steps since the newest checkpoint: rank %d would hold "
                "%d bytes, and its memory_bytes is %d",
                *(fullest, needs[fullest], told[fullest][1]),
            )
        return {}

    def _choose_holders(self, part: int) -> dict[int, int]:
        """Give the holder of each rank's copy, the same on every rank; empty, with a sentence, where no other node can hold any."""
        num_shards, _ = place_of(part)
        if dist.get_world_size() > num_shards:
            return {}  # other shard groups hold each part
        domain = os.environ.get(DOMAIN_ENV, "")
        told = [json.loads(text) for text in all_texts(json.dumps([f"{host_identity()} {domain}", domain]))]
        holders = choose_copy_holders([str(node) for node, _ in told], [str(domain) for _, domain in told])
        if not holders and dist.get_rank() == 0:
            log.warning("there are no copies of shards in this world: all ranks are on one node")
        return holders

    def _keeps_to_budget(self, live: PartContent, holders: Mapping[int, int], make_room: Callable[[int], None]) -> bool:
        """Whether all ranks have room for copies of parts as large as they are now; else one says why not. Collective."""
        assert self._wanted is not None
        allowed, is_first = self._wanted.memory_bytes, self._shapes is None
        has_changed = live.shapes != self._shapes
        if has_changed:
            self._shapes, self._bytes = live.shapes, _num_bytes(live.shapes, _parts_held(live.part, holders))
        need = GENERATIONS * self._bytes
        # All ranks hear of one without room: it cannot know before the optimizer has run, and must not leave the exchange to the others.
        (is_exceeded,) = any_raised(need > allowed)
        if is_exceeded:
            told = [json.loads(text) for text in all_texts(json.dumps([need, allowed]))]
            where = max(range(len(told)), key=lambda rank: told[rank][0] - told[rank][1])
            if dist.get_rank() == 0:
                log.warning(
                    "there are no %s of shards in this world: they would take %d bytes on rank %d, and memory_bytes is %d",
                    *("copies" if is_first else "more copies", told[where][0], where, told[where][1]),
                )
        elif has_changed:
            make_room(allowed - self._bytes)
        return not is_exceeded


def _parts_held(part: int, holders: Mapping[int, int]) -> list[int]:
    """Give the parts that the rank with this one has images of in each generation of copies."""
    num_shards, rank = place_of(part)
    return [part, *(part_of(num_shards, giver) for giver, holder in holders.items() if holder == rank)]


def _num_bytes(shapes: Iterable[ShardedShape], parts: Iterable[int]) -> int:
    return sum(shape.stretch(part)[1] - shape.stretch(part)[0] for part in parts for shape in shapes)
