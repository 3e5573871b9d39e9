"""Copying the state to host memory: the only part of a save that training waits for, and the source of all tiers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from elastipod.checkpoint.collective_planning import plan_across_ranks
from elastipod.checkpoint.communicator import Communicator, RanksLost, name_of_connections
from elastipod.checkpoint.image import MappedImage
from elastipod.checkpoint.image_copies import ImageCopies
from elastipod.checkpoint.image_header import ImageHeader, image_name
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.memory_directory import SLOTS, MemoryDirectory
from elastipod.checkpoint.memory_limits import MemoryDemand, MemoryLimit, find_shortage, memory_limits_of
from elastipod.checkpoint.reductions import first_message, no_result
from elastipod.checkpoint.resumed_state import ResumedState
from elastipod.checkpoint.save_arguments import check_logs
from elastipod.checkpoint.save_plan import Chunk, SavePlan
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
        self._images: list[MappedImage] = []
        self._boxes: list[dict[int, torch.Tensor]] = []
        self._headers: dict[str, ImageHeader] = {}  # of published images of this rank
        self._saves = 0
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
            return [is_same, self._comm.is_open, self._newest_complete, has_log]

        is_same, connections, whole = self._comm.training_all_reduce(report, _common)
        ((state, plain),) = seen
        self._saves += 1
        self._newest_complete = tuple(whole) if whole else None
        if connections:
            self._comm.connect(connections)
        if not is_same:
            self._make_plan(state, target.generation)
            self._signature = state.signature()
        plan = self._plan
        assert plan is not None
        slot = 0 if self._newest_complete is None or len(self._images) == 1 else 1 - self._newest_complete[1]
        values: dict[str, str] = {}

        def fill() -> None:
            if self.directory is not None:
                name = image_name(target.generation, RankInWorld.current().rank, slot)
                self._headers.pop(name, None)
                self.directory.withdraw(name)
            values.update(state.values())
            self._copy_tensors(state, slot)

        self._comm.training_all_reduce(fill, no_result)
        return StagedState(target, plan, slot, self._images[slot], self._boxes[slot], values, plain)

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
        self._newest_complete = self._saves, staged.slot
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
            self._copies.forget(staged.id)
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
        with suppress(OSError):  # a folder that cannot be read has no images to resume from
            headers = {header.name: header for header in self.directory.headers() if header.id == state.resumed}
            self.directory.note_durable(headers, state.id)

    def remove_stale_images(self, keep: Iterable[str], generation: int) -> None:
        """Delete images of generations before this one, except those named: only what was resumed is still of use."""
        if self.directory is not None:
            self.directory.remove_stale_images(keep, older_than=generation)

    def close(self) -> None:
        """Unmap the memory; images stay."""
        self._boxes = []
        images, self._images = self._images, []
        copies, self._copies = self._copies, None
        self._headers.clear()
        self._signature = ()
        if self._has_other_readers():
            return  # what they read is unmapped with its last reader
        for image in images:
            image.close()
        if copies is not None:
            copies.close()

    def _has_other_readers(self) -> bool:
        self._readers = [each for each in self._readers if each.is_alive()]
        return bool(self._readers)

    def _make_plan(self, state: TrainingState, generation: int) -> None:
        check_same_keys(state, self._comm)
        if self.directory is not None and not self._plan_with(state, generation, self.directory):
            self.directory = None  # on all ranks
        if self.directory is None:
            self._plan_with(state, generation, None)

    def _plan_with(self, state: TrainingState, generation: int, directory: MemoryDirectory | None) -> bool:
        """Plan, and allocate the memory that the plan needs. Return False if a rank has not enough memory for images."""
        rank = RankInWorld.current().rank

        node = directory.node if directory else lambda: f"rank {rank}"
        text, self._domains = plan_across_ranks(
            self._comm, lambda: state.local_state(node()), is_in_memory=directory is not None
        )
        self._plan = SavePlan.from_json(text)
        refused = self._memory_shortage(generation, directory) if directory is not None else None
        if refused is None:
            refused = self._comm.training_all_reduce(lambda: self._make_images(generation, directory), first_message)
        if refused is None:
            return True
        self.close()
        if directory is not None:
            directory.remove_unfinished(self._names(generation))
        if directory is None:
            raise CheckpointError(f"the host does not have enough memory for a copy of the state: {refused}")
        if rank == 0:
            log.warning(
                "no checkpoints are kept in memory, because there is not enough memory for %d of them: %s; provide more (in a pod, "
                "an emptyDir of medium Memory at /dev/shm, and the container's memory limit), or pass memory=False",
                SLOTS,
                refused,
            )
        return False

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

    def _make_images(self, generation: int, directory: MemoryDirectory | None) -> str | None:
        """Allocate the slots; return the reason if there is not enough memory."""
        assert self._plan is not None
        rank = RankInWorld.current().rank
        self.close()
        self._newest_complete = None
        positions, size = self._plan.layout(rank)
        chunks: dict[int, Chunk] = {number: self._plan.chunks[number] for number in positions}
        try:
            for slot in range(SLOTS if directory else 1):
                path = None
                if directory is not None:
                    name = image_name(generation, rank, slot)
                    directory.withdraw(name)
                    path = directory.path / f"{name}.bin"
                self._images.append(MappedImage.create(path, size))
        except OSError as error:
            return str(error)
        self._boxes = [
            {number: image.chunk_tensor(chunk, positions[number]) for number, chunk in chunks.items()}
            for image in self._images
        ]
        return None

    def _copy_tensors(self, state: TrainingState, slot: int) -> None:
        """Copy every chunk of this rank. No device writes into the image any more when this returns or raises."""
        assert self._plan is not None
        devices: set[torch.device] = set()
        try:
            for number, box in self._boxes[slot].items():
                tensor = state.tensor(self._plan.chunks[number])
                if tensor.is_cuda and tensor.device not in devices:
                    self._images[slot].pin(tensor.device)
                    devices.add(tensor.device)
                box.copy_(tensor, non_blocking=tensor.is_cuda)
        finally:
            for device in devices:  # the copies were queued on each device's current stream
                torch.cuda.current_stream(device).synchronize()


def _common(answers: Sequence[Sequence[Any]]) -> list[Any]:
    """Combine the answers of all ranks before a copy: same form everywhere? name of new connections? newest complete save?

    If ranks lost contact at the end of a save, some may know that it is complete and others not. Raises CheckpointError where
    only some have a sample log.
    """
    same, opened, whole, logs = zip(*answers, strict=True)
    check_logs(logs)
    return [
        all(same),
        name_of_connections(opened),
        max((each for each in whole if each), default=None),
    ]
