"""One rank's part of a sharded training state in memory, over generations (FSDP2, HSDP).

The modules of a world hold its process groups, and torch has no public way to replace them. When a world ends, this rank therefore
keeps its shards as plain tensors in host memory and drops the modules. In the next world the script builds the modules again, and
they are filled from the parts that this rank and its peers have kept.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elastipod import chaos
from elastipod.errors import ElastipodError, StateDiffersError
from elastipod.in_memory.agent_link import Fate, Kind
from elastipod.in_memory.contiguous_image import contiguous_image
from elastipod.in_memory.exchange import text_of
from elastipod.in_memory.members import Content, Members, digests_by_key
from elastipod.in_memory.memory_state import MemoryState, lost_world
from elastipod.in_memory.mesh_plan import MeshPlan
from elastipod.in_memory.offer_wire import RankOffer
from elastipod.in_memory.offers import Offer, ResumePlan
from elastipod.in_memory.parts import (
    PartContent,
    UnknownSharding,
    can_move,
    check_meshes,
    live_part,
    local_of,
    part_content,
    part_of,
    parts_of,
    place_of,
    room_for,
)
from elastipod.in_memory.phase_limit import PhaseLimit
from elastipod.in_memory.phases import Phase
from elastipod.in_memory.rank import RankState
from elastipod.in_memory.shard_checks import compare_layouts, compare_shards
from elastipod.in_memory.shard_copies import Copies, ShardCopies
from elastipod.in_memory.shard_exchange import PartsDiffer, any_raised, exchange_parts
from elastipod.in_memory.shard_meetings import Meetings
from elastipod.in_memory.shard_plan import (
    Need,
    concerned_messages,
    first_holders,
    local_spans,
    newest_layout,
    receivers_of_parts,
)
from elastipod.in_memory.shard_transfer import PartSources, PartTarget, copy_own, exchange
from elastipod.in_memory.shard_wire import decode_shapes, encode_shapes
from elastipod.in_memory.state_transfer import MAX_IN_FLIGHT, check_received
from elastipod.torch_compat import drop_sharding_caches, release_shard_groups

log = logging.getLogger(__name__)


class ShardedMemory(MemoryState):
    """This rank's part, as live members while a world trains and as `PartContent` in between."""

    kind: Kind = "sharded"

    def __init__(
        self, members: Members, limit: PhaseLimit, build: Callable[..., object], plan: MeshPlan, copies: Copies | None
    ) -> None:
        """build: takes the mesh of the present world and gives the members, sharded."""
        super().__init__(members, limit)
        self._build, self._plan = build, plan
        self._mesh: Any = None
        self._part = part_of(1, 0)  # that this rank has in the present world
        self._held: PartContent | None = (
            None  # what `rank.parts` and `rank.completed` say, while the members do not hold it
        )
        self._kept: dict[int, dict[int, PartContent]] = {}  # the images, by step and part
        self._is_live = False  # whether the members hold what `rank` says
        self._apply: Callable[[], None] = lambda: None
        self._copies = ShardCopies(copies)
        self._is_frozen = False
        # By index of the parts of the present world: the rank that the others with a part are compared with.
        self._holders = [0]
        self._num_checked = 0  # parameters of which the optimizers' states were looked at in this world
        self._built_groups: dict[
            str, list[int]
        ] = {}  # of each optimizer as it was built: the number of parameters in each group

    def move(self, rank: RankState) -> None:
        begins = rank.phase is Phase.TRAINING and self.rank.phase is Phase.VERIFYING
        super().move(rank)
        self._drop_images()
        if begins:
            self._held = None

    # -- one step ------------------------------------------------------------------------------------------------

    def prepare(self, apply: Callable[[], None]) -> None:
        """Commit only when every rank is prepared: then a rank that fails to hear so can complete the step alone. Raises WorldLost."""
        self._apply = apply
        self.rank = self.rank.reduced()
        with lost_world("the ranks could not agree that all gradients are good"):
            (self._copies.is_postponed,) = any_raised(self._copies.comes_too_soon)

    def commit(self) -> None:
        """The gradients were good on every rank and have been applied. Raises UnknownSharding, on every rank, as `live_part`."""
        self.rank = self.rank.committed(self._copies.newest(self.rank))
        self._drop_images()
        # Usually those that the first step of a world has made; later ones after steps that a GradScaler left out, or with new parameters.
        num_states = sum(len(each.state) for each in self.members.of_type(torch.optim.Optimizer))
        if num_states != self._num_checked or self._parameter_groups() != self._built_groups:
            self._check_optimizers()
            self._num_checked = num_states

    def _parameter_groups(self) -> dict[str, list[int]]:
        """Give how many parameters each group of each optimizer has."""
        return {
            name: [len(group["params"]) for group in member.param_groups]
            for name, member in self.members.items()
            if isinstance(member, torch.optim.Optimizer)
        }

    def _check_optimizers(self) -> None:
        """Raise UnknownSharding where an optimizer has what cannot move: it would cost the state when the world changes."""
        for name, sizes in self._parameter_groups().items():
            if sizes != (built := self._built_groups.get(name, sizes)):
                raise UnknownSharding(
                    f"{name} has parameter groups of {_joined(sizes)} parameters, and build() gives it groups of {_joined(built)}; the "
                    "next change would lose what the script has added: have build() make all groups, with lr=0 for later ones"
                )
        optimizers = self.members.of_type(torch.optim.Optimizer)
        kept = (each for optimizer in optimizers for state in optimizer.state.values() for each in state.values())
        if not all(can_move(each) for each in kept if isinstance(each, torch.Tensor)):
            live_part(self.members, self._part)  # which names it; in the usual case names take too long

    def copy(self) -> None:
        """Give this rank's part to the holder of its copy, when that is due. Collective. Raises WorldLost."""
        step = self.completed
        with lost_world(f"the shards of step {step} could not be copied"):
            images = self._copies.take(step, self.members, self._part, self._limit.progress, self._make_room)
            for image in images:
                self._keep(step, image)
            if images and not self._copies.end(step):
                self._drop_steps({step})

    # -- leaving a world -----------------------------------------------------------------------------------------

    def hand_over(self, fates: Sequence[Fate]) -> bool:
        staying = [rank for rank, fate in enumerate(fates) if fate is Fate.STAYS]
        size = len(fates)
        kept = {self._plan.part(rank, size) for rank in staying}
        givers = {self._plan.part(rank, size): rank for rank, fate in enumerate(fates) if fate is Fate.LEAVES}
        orphans = {part: rank for part, rank in givers.items() if part not in kept}
        if not staying or len(kept) + len(orphans) < self._plan.num_shards(size):
            return False  # nobody knows what becomes of some part
        try:
            self._check_optimizers()
        except UnknownSharding as error:
            log.error("%s; the ranks save a checkpoint, unless they have no place for it, and end", error)
            return False  # they raise it when they leave their world, after the checkpoint
        newest = self._copies.newest(self.rank)
        if newest is not None:  # all ranks have stopped, so all have ended the copies of that step
            self._drop_steps({step for step in self._kept if step < newest})
        try:
            taken = self._hand_over(fates, orphans)
        except PartsDiffer as error:
            if _rank() == 0:
                log.warning("%s; the ranks save a checkpoint, unless they have no place for it", error)
            return False
        for image in taken:
            self._keep(self.completed, image)
        return True

    def _hand_over(self, fates: Sequence[Fate], orphans: Mapping[int, int]) -> list[PartContent]:
        """Give and take what leavers alone hold, once or twice. Collective. Raises WorldLost, PartsDiffer."""
        size = len(fates)
        staying = [rank for rank, fate in enumerate(fates) if fate is Fate.STAYS]
        passing = chaos.passing(chaos.Moment.HAND_OVER, self._limit.progress, rank=_rank(), step=self.completed + 1)
        with lost_world("the shards of those who leave could not be handed over"):
            own = [(self._plan.part(rank, size), rank) for rank in staying]
            held = self._copies.held_by_ranks(self._kept.get(self.completed, {}))
            copied = [(part, rank) for one, rank in own if held for part in held[rank] if part != one]
            known = {part for part, _ in copied}
            lacking = {part: rank for part, rank in orphans.items() if part not in known}
            takers = receivers_of_parts(lacking, staying, self._plan.num_shards(size))
            taken = exchange_parts(self.members, self._part, takers, orphans, passing)
            if Fate.LEAVES in fates:
                # The new world makes its first copies after a step; a rank that dies before must not take its part with it.
                holders = [*own, *copied, *takers.items()]
                older = self._image_bytes(before=self.completed)
                seconds = self._copies.second_holders(holders, staying, self.members, self._part, older)
                taken += exchange_parts(self.members, self._part, seconds, {**dict(own), **orphans}, passing)
            any_raised(False)
        return taken

    def release(self) -> None:
        """Keep this rank's part as plain tensors, and let the modules go, with the groups that they hold."""
        if self._is_live and self.rank.completed is not None:
            (part,) = self.rank.parts
            if self.rank.is_prepared:
                self._complete_alone(part)
            else:
                self._held = part_content(self.members, part, self._limit.progress)
        self._is_live, self._mesh, self._num_checked = False, None, 0
        for module in self.members.of_type(nn.Module):
            release_shard_groups(module)
        self._copies.forget_world()
        with (
            self._limit.paused()
        ):  # what the script has built may wait for worker processes of its own, some seconds for each
            self.members.clear()
            drop_sharding_caches()
            gc.collect()

    def rest(self) -> None:
        """Nothing: which digests the next world needs depends on its mesh."""

    def _complete_alone(self, part: int) -> None:
        """All ranks may have been prepared, and some may have committed: hold the state before the step and after it."""
        before = contiguous_image(live_part(self.members, part), self._limit.progress).content
        try:
            # All survivors run it at the same moment, and it takes as long as the part is large. A collective in it does not hang: those
            # of an accelerator have been aborted, and the agent's word that the generation is over closes the connections of gloo. For
            # anything else that hangs the agent has its own limit, after which it ends processes that are not back at its barrier.
            with self._limit.paused():
                self._apply()
        except (RuntimeError, ElastipodError) as error:  # an `apply` of the script that needs its peers
            log.info("the step that was prepared cannot be completed alone: %s", error)
            self._held, self.rank = before, replace(self.rank, is_prepared=False)
            return
        self._keep(self.completed, before)
        self.rank = self.rank.completed_alone()
        self._held = part_content(self.members, part, self._limit.progress)

    # -- joining the next one ------------------------------------------------------------------------------------

    def begin_filling(self, offers: Sequence[RankOffer], rank: int) -> ResumePlan | None:
        own = [each.offer for each in offers]
        self._part = self._plan.part(rank, len(offers))
        layout = newest_layout(own, prefer=self._plan.num_shards(len(offers)))
        found = layout and self.rank.agreed(tuple(own), rank, frozenset({self._part}), parts_of(layout))
        if not found:
            return None
        for step, parts in found.images.items():
            if self._held is not None and self._held.part in parts - self._kept.get(step, {}).keys():
                self._kept.setdefault(step, {})[self._held.part] = self._held
        self.move(found)
        resume = found.resume
        assert resume is not None
        self.origin = max(each.origin for each in offers if each.offer.parts_at(resume.step))
        return resume

    def build_mesh(self, world_size: int) -> None:
        """Have the mesh of the present world. Collective. Raises WorldLost."""
        if self._mesh is None:
            # A mesh of two dimensions has groups of its own. They wait for each other's members as long as torch's default says, and there
            # is no public way to have it otherwise. The agent's word frees this rank from a member that hangs, and the limit would end it.
            with lost_world("the mesh could not be built"), self._limit.paused():
                self._mesh = self._plan.build(world_size)

    def build(self) -> None:
        """Have the script build the members for the present world, unless it has. Raises TypeError, UnknownSharding."""
        if self.members:
            return
        with self._limit.paused():  # the script's own code, and a look through all that it has loaded
            if not self._is_frozen:
                # Members of a former world are garbage in cycles, so gc.collect() follows each world. It need not look through what
                # the script has imported and loaded so far.
                gc.collect()
                gc.freeze()
                self._is_frozen = True
            self.members.take(self._build(self._mesh))
            self._built_groups = self._parameter_groups()
        check_meshes(self.members, self._mesh)

    def begin_anew(
        self, step: int, rank: int, world_size: int, *, loaded_by: Collection[int] | None, has_changed: bool = True
    ) -> list[Offer]:
        if loaded_by is None and self.rank.completed is not None:
            log.warning(
                "the ranks of this world hold no step whole, this one its part of step %d, and there is no checkpoint: the training starts "
                "from the beginning; State(checkpoints=...) keeps it",
                self.rank.completed,
            )
        holders = range(self._plan.num_shards(world_size)) if loaded_by is None else loaded_by
        parts = [self._plan.part(each, world_size) for each in range(world_size)]
        if rank in holders:
            self.rank = replace(self.rank, parts=frozenset({parts[rank]}), completed=step)
            self._held = part_content(self.members, parts[rank], self._limit.progress)
        return [Offer(frozenset({part}), step) if each in holders else Offer() for each, part in enumerate(parts)]

    def fill(self, resume: ResumePlan, offers: Sequence[RankOffer], progress: Callable[[], None]) -> None:
        """Hold this rank's part of the agreed step afterwards. Collective. Raises WorldLost, BadManifest, StateDiffersError."""
        num_shards = place_of(next(iter(resume.donors)))[0]
        parts = self._parts_at(resume.step)
        rank, first = _rank(), resume.donors[part_of(num_shards, 0)][0]
        with lost_world("the state could not be described"):
            text = text_of(first, self._described(parts[part_of(num_shards, 0)]) if rank == first else None)
        told = decode_shapes(text)
        shapes = told.shapes
        content = room_for(shapes, self._part, self.members, self._mesh)
        target = PartTarget(self._part, shapes, {key: local_of(tensor) for key, tensor in content.tensors.items()})
        # The plain values are those of the first rank, and a member's tensors belong to its values.
        of_first = self.members.own_keys(shape.key for shape in shapes if shape.dim is None)
        needs = [
            need if need.receiver == first else replace(need, of_first=of_first)
            for need in self._needs(resume, len(offers))
        ]
        self._holders = first_holders(resume.donors, [need.part for need in needs])
        sources = PartSources(parts)
        meetings = Meetings(progress)  # ranks have very unequal amounts to copy, to send and to sum
        copy_own(target, sources, list(local_spans(shapes, needs[rank], num_shards)), meetings.progress)
        concerned = concerned_messages(shapes, needs, rank, num_shards, resume.donors, meetings.progress)
        meetings.finish()
        # The fewer ranks give, the more of them wait for each of these.
        num_donors = len({each for holders in resume.donors.values() for each in holders})
        meet_after = max(1, MAX_IN_FLIGHT * num_donors // len(offers))
        with lost_world("the state could not be transferred"):
            exchange(concerned, {self._part: target}, sources, progress, meetings.meet, meet_after=meet_after)
            target.finish(meetings.progress)
            given = [part for part, donors in resume.donors.items() if donors[0] == rank]
            is_counted = rank in self._holders  # one of each part, where there are replicas
            counted = self._part if is_counted else None
            differing = compare_layouts(
                shapes, sources, given, target, counted, meetings.progress, await_all=meetings.finish
            )
        if differing:
            raise StateDiffersError(
                f"after the change to {len(offers)} ranks the state of step {resume.step} is not what it was, in {differing}"
            )
        received = {
            key: each for key, each in told.uncompared.items() if not needs[rank].own or key in needs[rank].of_first
        }
        check_received({key: content.tensors[key] for key in received}, received, first)
        self.members.load(Content(content.tensors, told.values))

    def _described(self, held: PartContent) -> str:
        whole = {shape.key: held.tensors[shape.key] for shape in held.shapes if shape.dim is None}
        return encode_shapes(held, digests_by_key(self.members.uncompared(whole)))

    def finish_filling(self) -> None:
        self.move(self.rank.filled(frozenset({self._part})))
        self._is_live = True

    def compare(self, reference: int, when: str) -> None:
        """Compare what ranks have in common with one rank's, and the parts of replicas. Collective. Raises as `compare_shards`."""
        compare_shards(self.members, self._holders, reference, when, self._limit.progress)

    def donor_of(self, resume: ResumePlan) -> int:
        return min(donors[0] for donors in resume.donors.values())

    # -- images --------------------------------------------------------------------------------------------------

    def _parts_at(self, step: int) -> dict[int, PartContent]:
        """Give what this rank holds of a step."""
        parts = dict(self._kept.get(step, {}))
        if self._held is not None and self.rank.completed == step:
            parts[self._held.part] = self._held
        return parts

    def _needs(self, resume: ResumePlan, world_size: int) -> list[Need]:
        own: list[set[int]] = [set() for _ in range(world_size)]
        for part, donors in resume.donors.items():
            for rank in donors:
                own[rank].add(part)
        return [Need(rank, self._plan.part(rank, world_size), frozenset(parts)) for rank, parts in enumerate(own)]

    def _keep(self, step: int, image: PartContent) -> None:
        self._kept.setdefault(step, {})[image.part] = image
        images = {**self.rank.images, step: frozenset(self._kept[step])}
        self.rank = replace(self.rank, images=images)

    def _make_room(self, limit: int) -> None:
        """Let the images take at most so many bytes: those of steps that were not copied go first, and older ones before newer ones.

        All ranks have completed a step since. They are needed only by those who lose a rank before the copy that they make room for is
        complete.
        """
        for step in sorted(self._kept, key=lambda step: (self._copies.is_complete(step), step)):
            held = self._image_bytes()
            if held <= limit:
                return
            log.warning(
                "what is kept of step %d goes before the next copies are made: images may take %d bytes beside them, and "
                "take %d; until then the loss of a rank costs the steps since an older copy or a checkpoint",
                *(step, limit, held),
            )
            self._drop_steps({step})

    def _drop_steps(self, steps: Collection[int]) -> None:
        self.rank = replace(self.rank, images={at: of for at, of in self.rank.images.items() if at not in steps})
        self._drop_images()

    def _image_bytes(self, before: int | None = None) -> int:
        """Give how much memory the images take; before: those of steps before this one."""
        return sum(
            image.num_bytes
            for step, images in self._kept.items()
            if before is None or step < before
            for image in images.values()
        )

    def _drop_images(self) -> None:
        self._kept = {step: kept for step, kept in self._kept.items() if step in self.rank.images}


def _joined(sizes: Sequence[int]) -> str:
    return " and ".join(map(str, sizes)) or "no"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
