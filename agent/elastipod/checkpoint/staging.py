"""Copying the state to host memory: the only part of a save that training waits for, and the source of all tiers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from elastipod.checkpoint.collective_planning import plan_across_ranks
from elastipod.checkpoint.communicator import Communicator, RanksLost, name_of_connections
from elastipod.checkpoint.image_copies import ImageCopies
from elastipod.checkpoint.image_header import ImageHeader, image_name
from elastipod.checkpoint.image_slots import ImageSlots
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.memory_directory import SLOTS, MemoryDirectory
from elastipod.checkpoint.memory_limits import MemoryDemand, MemoryLimit, find_shortage, memory_limits_of
from elastipod.checkpoint.reductions import first_message, no_result
from elastipod.checkpoint.resumed_state import ResumedState
from elastipod.checkpoint.save_arguments import check_logs
from elastipod.checkpoint.save_plan import SavePlan
from elastipod.checkpoint.staged_state import StagedState
from elastipod.checkpoint.state_keys import check_same_keys
from elastipod.checkpoint.training_state import TrainingState
from elastipod.errors import CheckpointError
from elastipod.json_records import decode, encode
from elastipod.rank_in_world import RankInWorld

log = logging.getLogger(__name__)


class Staging:
    """This rank's memory for copies. One save is in progress at a time; two slots, so that the last complete image stays."""

    def __init__(self, directory: MemoryDirectory | None, comm: Communicator) -> None:
        """directory: where images outlive this process; None for memory of the processes only (see `all_have_memory`)."""
        self.directory = directory
        self.durable: CheckpointId | None = None  # newest that is known: resumed, or saved since
        self._comm = comm
        self._plan: SavePlan | None = None
        self._domains: list[str] = []
        self._signature: tuple[object, ...] = ()
        self._slots = ImageSlots()
        self._headers: dict[str, ImageHeader] = {}  # of published images of this rank
        self._saves = 0  # of this generation; the same on every rank
        self._newest_complete: tuple[int, int] | None = (
            None  # number and slot of the newest save that is complete on all ranks
        )
        self._copies: ImageCopies | None = None
        self._readers: list[threading.Thread] = []  # of saves that were given up: they may still read images

    def go_on_with(self, comm: Communicator, reader: threading.Thread) -> None:
        """Use other connections, because a thread hangs that used the former ones; it may still read the images."""
        self._comm = comm
        self._readers.append(reader)

    def all_have_memory(self, all_have: bool) -> None:
        """Take note of whether every rank has a directory. Before the first copy; without one on every rank, none is used."""
        if not all_have:
            self.directory = None

    def copy(
        self,
        capture: Callable[[], TrainingState],
        target: CheckpointId,
        extra: Callable[[], Mapping[str, Any]],
        *,
        has_log: bool = False,
    ) -> StagedState:
        """Copy the state that ``capture`` returns into host memory. Collective, from the training thread.

        Before the copy the ranks agree whether the form of their states is that of the last save (a new form needs a new plan),
        all are still connected, and all or none have a sample log; after it, whether all have a copy. An
        error on one rank is raised as CheckpointError on all, also when the state cannot be saved or memory is too small.
        """
        seen: list[tuple[TrainingState, Mapping[str, Any]]] = []

        def report() -> list[Any]:
            seen.append((capture(), extra()))
            is_same = seen[0][0].signature() == self._signature
            saves = self._saves or self._saves_before(target.generation)
            return [is_same, self._comm.is_open, self._newest_complete, has_log, saves]

        is_same, connections, whole, saves = self._comm.training_all_reduce(report, _common)
        ((state, plain),) = seen
        self._saves = saves + 1
        self._newest_complete = tuple(whole) if whole else None
        if connections:
            self._comm.connect(connections)
        if not is_same:
            check_same_keys(state, self._comm)
            self._slots.close(in_use=self._has_other_readers())
            self._make_plan(state, self.directory)
            self._signature = state.signature()
        self._allocate(state, target.generation)
        plan, slot = self._plan, self._next_slot()
        assert plan is not None
        values: dict[str, str] = {}

        def fill() -> None:
            if self.directory is not None:
                name = image_name(target.generation, RankInWorld.current().rank, slot)
                self._headers.pop(name, None)
                self.directory.withdraw(name)
            values.update(state.values())
            self._slots.fill(slot, lambda number: state.tensor(plan.chunks[number]))

        self._comm.training_all_reduce(fill, no_result)
        image, boxes = self._slots.images[slot], self._slots.boxes[slot]
        return StagedState(target, plan, self._saves, slot, image, boxes, values, plain)

    def keep_in_memory(
        self, staged: StagedState, comm: Communicator, check_fence: Callable[[], None], *, wants_durable: bool = False
    ) -> str | None:
        """Publish the copy as an image that outlives this process, here and on the node that holds its copy. Collective.

        check_fence: collective; raises FencedError on all ranks when a newer generation has taken over. That one may have listed the
        images before ours were there, so the fence is checked again afterwards, and the images are withdrawn. Returns the reason if a
        rank could not publish its image: then no rank has one of this copy. wants_durable: as in `ImageHeader`.
        """
        if self.directory is None:
            return None
        check_fence()
        is_last = False
        try:
            problem = self._publish(staged, self.directory, comm, wants_durable)
            is_last = True
            if problem is None:
                check_fence()
        except CheckpointError as error:
            # Another rank may already have reported success; and if this save was given up, a newer one may use its place.
            if not (is_last and isinstance(error, RanksLost)) and not comm.is_retired:
                self._withdraw(staged)
            raise
        if problem is not None:
            self._withdraw(staged)
            return problem
        self._newest_complete = staged.save, staged.slot
        self._withdraw_where(lambda header: header.id == staged.id and header.save < staged.save)
        self.remove_stale_images((), staged.id.generation)  # all ranks have their images now
        return None

    def _publish(
        self, staged: StagedState, directory: MemoryDirectory, comm: Communicator, wants_durable: bool
    ) -> str | None:
        place = RankInWorld.current()
        rank, world_size = place.rank, place.world_size
        positions, _ = staged.plan.layout(rank)

        made: list[ImageHeader] = []

        def publish() -> str | None:
            header = ImageHeader(
                staged.id,
                rank,
                staged.slot,
                world_size,
                staged.plan.digest,
                staged.image.size,
                staged.image.sums((staged.plan.chunks[number], at) for number, at in positions.items()),
                self.durable,
                staged.values,
                staged.extra,
                wants_durable,
                staged.save,
            )
            comm.check_retired()  # summing takes long, and a newer save may be using this place by now
            try:
                directory.store_plan(staged.plan)
                directory.publish(header)
                self._headers[header.name] = header
            except OSError as error:
                return f"rank {rank}: {error}"
            made.append(header)
            return None

        self._copies = self._copies or ImageCopies(directory)
        self._copies.held_by = {}
        sent = self._copies.holders(staged.plan, self._domains)
        problem = comm.all_reduce(publish, first_message)
        if problem is None and sent:
            self._copies.exchange_images(staged.plan, sent, staged.image, made[0], comm)
        return problem

    def _withdraw(self, staged: StagedState) -> None:
        """Withdraw all images of this copy on this node; an earlier one of the same step stays."""
        if self.directory is None:
            return
        if self._copies is not None:
            self._copies.forget(staged.id, staged.save)
        with suppress(OSError):  # without the folder there is nothing to withdraw
            for header in self.directory.headers():
                if header.id == staged.id and header.slot == staged.slot:
                    self._headers.pop(header.name, None)
                    self.directory.withdraw(header.name)

    def survives_drain(self, plan: SavePlan, leaving: Sequence[bool | None]) -> bool:
        """Return whether the memory of the nodes that surely stay holds the whole newest copy. leaving: by rank, None if unknown."""
        staying = {plan.nodes[rank] for rank, leaves in enumerate(leaving) if leaves is False}
        kept = self._copies.held_by if self._copies is not None else {}
        ranks = {rank for rank, node in enumerate(plan.nodes) if node in staying}
        return plan.is_covered_by(ranks | {source for source, holder in kept.items() if plan.nodes[holder] in staying})

    def note_durable(self, of: CheckpointId) -> None:
        """Record, here and in the images that this rank created or holds, that a checkpoint is durable now."""
        self.durable = of
        if self.directory is not None:
            self.directory.note_durable(self._headers, of)
            if self._copies is not None:
                self._copies.note_durable(of)

    def note_written(self, state: ResumedState) -> None:
        """Record in the images of a resumed checkpoint that it is durable now, as one of this generation. One rank of a node does it."""
        nodes, rank = state.plan.nodes, RankInWorld.current().rank
        if self.directory is None or nodes.index(nodes[rank]) != rank:
            return
        names = set(state.images.names())
        with suppress(OSError):  # a folder that cannot be read has no images to resume from
            there = (header for header in self.directory.headers() if header.id == state.resumed)
            self.directory.note_durable({header.name: header for header in there if header.name in names}, state.id)

    def withdraw_later(self, step: int) -> None:
        """Withdraw this generation's images of later steps, which the run has left to go on from this one."""
        self._withdraw_where(lambda header: header.id.step > step)

    def _withdraw_where(self, is_meant: Callable[[ImageHeader], bool]) -> None:
        """Withdraw images that this rank has published, and copies that it holds."""
        if self.directory is None:
            return
        for name in [name for name, header in self._headers.items() if is_meant(header)]:
            del self._headers[name]
            with suppress(OSError):
                self.directory.withdraw(name)
        if self._copies is not None:
            self._copies.withdraw_where(is_meant)

    def remove_stale_images(self, keep: Iterable[str], generation: int) -> None:
        """Delete images of generations before this one, except those named: only what was resumed is still of use."""
        if self.directory is not None:
            self.directory.remove_stale_images(keep, older_than=generation)

    def close(self) -> None:
        """Unmap the memory; images stay."""
        in_use = self._has_other_readers()  # what they read is unmapped with its last reader
        self._slots.close(in_use=in_use)
        copies, self._copies = self._copies, None
        self._headers.clear()
        self._signature = ()
        if copies is not None and not in_use:
            copies.close()

    def _has_other_readers(self) -> bool:
        self._readers = [each for each in self._readers if each.is_alive()]
        return bool(self._readers)

    def _saves_before(self, generation: int) -> int:
        """Return the number of the newest save that another manager has made in this generation."""
        headers: list[ImageHeader] = []
        if self.directory is not None:
            with suppress(OSError):  # a folder that cannot be read has no images to tell apart
                headers = self.directory.headers()
        return max((header.save for header in headers if header.id.generation == generation), default=0)

    def _next_slot(self) -> int:
        """Return the slot of the next copy: not that of the newest complete image."""
        return 0 if self.directory is None or self._newest_complete is None else 1 - self._newest_complete[1]

    def _make_plan(self, state: TrainingState, directory: MemoryDirectory | None) -> None:
        """Plan the images, or the memory of this process if there is no directory. Collective."""
        node = directory.node if directory else lambda: f"rank {RankInWorld.current().rank}"
        text, self._domains = plan_across_ranks(
            self._comm, lambda: state.local_state(node()), is_in_memory=directory is not None
        )
        self._plan = SavePlan.from_json(text)

    def _allocate(self, state: TrainingState, generation: int) -> None:
        """Make the memory of the next copy, unless it is there; do without images where a rank has too little for them. Collective."""
        if self._next_slot() in self._slots.images:
            return
        if self.directory is not None:
            refused = self._memory_shortage(generation, self.directory) or self._make_images(generation)
            if refused is None:
                return
            self._give_up_images(refused, generation, self.directory)
            self._make_plan(state, None)
            self._signature = state.signature()
        refused = self._make_images(generation)
        if refused is not None:
            self.close()
            raise CheckpointError(f"the host does not have enough memory for a copy of the state: {refused}")

    def _give_up_images(self, refused: str, generation: int, directory: MemoryDirectory) -> None:
        self.close()
        directory.remove_unfinished(self._names(generation))
        self.directory = None  # on all ranks
        if RankInWorld.current().rank == 0:
            log.warning(
                "no checkpoints are kept in memory, because there is not enough memory for %d of them: %s; provide more (in a pod, "
                "an emptyDir of medium Memory at /dev/shm, and the container's memory limit), or pass memory=False",
                SLOTS,
                refused,
            )

    def _memory_shortage(self, generation: int, directory: MemoryDirectory) -> str | None:
        """Return which limit the images and copies would exceed; checked first, because the kernel kills at some limits."""
        plan = self._plan
        assert plan is not None
        self._copies = self._copies or ImageCopies(directory)
        names = [*self._names(generation), *self._copies.names()]

        def report() -> list[Any]:
            limits = memory_limits_of(directory.path, directory.node())
            return [[encode(each) for each in limits], 0 if self._has_other_readers() else directory.size_of(names)]

        holders = self._copies.holders(plan, self._domains)

        def short(answers: list[list[Any]]) -> str | None:
            sizes = plan.image_sizes()
            needed = list(sizes)
            for source, holder in holders.items():
                needed[holder] += sizes[source]
            return find_shortage(
                MemoryDemand([decode(MemoryLimit, each) for each in limits], SLOTS * size, replaced)
                for size, (limits, replaced) in zip(needed, answers, strict=True)
            )

        return self._comm.training_all_reduce(report, short)

    def _names(self, generation: int) -> list[str]:
        return [image_name(generation, RankInWorld.current().rank, slot) for slot in range(SLOTS)]

    def _make_images(self, generation: int) -> str | None:
        """Make all slots but that of the newest complete image, which stays until the next one is complete. Collective.

        Returns the reason if a rank has not enough memory.
        """
        plan, directory = self._plan, self.directory
        assert plan is not None
        newest = self._newest_complete[1] if self._newest_complete is not None and directory is not None else None
        missing = {*range(SLOTS if directory else 1)} - {*self._slots.images, newest}

        def make() -> str | None:
            try:
                for slot in sorted(missing):
                    path = None
                    if directory is not None:
                        name = image_name(generation, RankInWorld.current().rank, slot)
                        self._headers.pop(name, None)
                        directory.withdraw(name)
                        path = directory.path / f"{name}.bin"
                    self._slots.make(slot, path, plan)
            except OSError as error:
                return str(error)
            return None

        refused: str | None = self._comm.training_all_reduce(make, first_message)
        return refused


def _common(answers: Sequence[Sequence[Any]]) -> list[Any]:
    """Combine the answers of all ranks before a copy: same form everywhere? name of new connections? newest complete save? number of saves?

    If ranks lost contact at the end of a save, some may know that it is complete and others not. Raises CheckpointError where
    only some have a sample log.
    """
    same, opened, whole, logs, saves = zip(*answers, strict=True)
    check_logs(logs)
    return [
        all(same),
        name_of_connections(opened),
        max((each for each in whole if each), default=None),
        max(saves),
    ]
