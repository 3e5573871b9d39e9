"""Choosing the checkpoint that a run resumes from, and loading it into the live objects."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastipod.checkpoint.agent_report import report_checkpoint
from elastipod.checkpoint.communicator import Communicator, name_of_connections
from elastipod.checkpoint.file_source import FileSource
from elastipod.checkpoint.image_inventory import (
    ImageInfo,
    ImageInventory,
    NodeImages,
    list_local_images,
    merge_inventories,
)
from elastipod.checkpoint.image_source import ImageSource, ReadPlan
from elastipod.checkpoint.load_on_holders import LoadOnHolders, can_load_on_holders, load_on_holders
from elastipod.checkpoint.load_plan import LoadPlan
from elastipod.checkpoint.manifest import CheckpointId, DamagedCheckpoint, Manifest
from elastipod.checkpoint.open_images import open_images
from elastipod.checkpoint.reductions import first_message
from elastipod.checkpoint.restore import Restore
from elastipod.checkpoint.resume import Resume
from elastipod.checkpoint.resumed_state import ResumedState
from elastipod.checkpoint.staging import Staging
from elastipod.checkpoint.store import CheckpointStore
from elastipod.errors import CheckpointError
from elastipod.json_records import decode, encode, json_record
from elastipod.rank_in_world import RankInWorld
from elastipod.rank_ranges import format_ranks

log = logging.getLogger(__name__)


@json_record
@dataclass(frozen=True, slots=True)
class _RankCheckpoints:
    """What one rank finds. is_open: whether it is connected; has_memory: a directory there. durable: in storage, as rank 0 lists it."""

    is_open: bool
    has_memory: bool
    durable: tuple[CheckpointId, ...]
    memory: NodeImages


@json_record
@dataclass(frozen=True, slots=True)
class _KnownCheckpoints:
    """What all ranks find. connections: the name of new ones, empty if all are connected. have_memory: whether all have a directory."""

    connections: str
    have_memory: bool
    durable: tuple[CheckpointId, ...]
    memory: ImageInventory


class Resumer:
    """One search for the newest usable checkpoint. Methods are collective."""

    def __init__(
        self,
        directory: CheckpointStore,
        staging: Staging,
        comm: Communicator,
        generation: int,
        restore: Restore,
        *,
        step: int | None = None,
        on_holders: bool = False,
        writes: bool = False,
    ) -> None:
        """step: the only one that may be loaded; None: the newest. on_holders: it need not be loaded on all ranks.

        writes: whether the caller takes `unwritten`, which is None otherwise.
        """
        self._store, self._staging, self._comm = directory, staging, comm
        self._generation, self._restore, self._step = generation, restore, step
        self._on_holders, self._writes = on_holders, writes
        self._connections = ""  # the name with which the ranks are to connect; empty if they are connected
        self._is_half_filled = False
        self._skip_reason = ""  # why the newest memory checkpoint was not used, on every rank
        self.unwritten: ResumedState | None = None  # what was resumed is in memory only, but was to be durable
        self.durable: set[CheckpointId] = set()  # that were found
        self.damaged: set[CheckpointId] = set()
        self._damage = ""  # what is wrong with the first of them, on every rank
        self.unmap_threads: list[threading.Thread] = []  # they unmap images; training need not wait

    def resume(self) -> Resume | None:
        """Load it. Returns None when there is no checkpoint at all. Raises CheckpointError."""
        self.durable, inventory = self._find_checkpoints()
        durable = self.durable
        usable = self._usable_in_memory(inventory, durable)
        in_memory = {inventory.written_as(each): each for each in reversed(usable)}
        for chosen in self._in_order(durable | in_memory.keys()):
            if chosen in in_memory and (resume := self._from_memory(in_memory[chosen], inventory)) is not None:
                self._log_skipped(f"resuming from that of step {chosen.step} there")
                return self._with_differences(resume)
            if chosen in durable and (resume := self._from_files(chosen)) is not None:
                self._log_skipped(f"resuming from the durable one of step {chosen.step}")
                return self._with_differences(resume)
        if self._step is not None and (self.damaged or self._is_half_filled):
            raise CheckpointError(
                f"the checkpoint of step {self._step} in {self._store.name} is not intact; load another"
            )
        if self.damaged:
            raise CheckpointError(
                f"none of the {len(self.damaged)} checkpoints in {self._store.name} is intact (of the newest, {self._damage}); "
                "restore one, or name another directory to start from the beginning"
            )
        if self._is_half_filled:
            raise CheckpointError(
                f"{self._skip_reason}, and there is no other; pass memory=False to start from the beginning"
            )
        self._log_skipped("there is no durable one, and training starts from the beginning")
        return None

    def _in_order(self, known: set[CheckpointId]) -> list[CheckpointId]:
        """Return the checkpoints that may be loaded, the best first. Raises CheckpointError when the wanted step is not there."""
        newest_first = sorted(known, reverse=True)
        if self._step is None:
            return newest_first
        found = [each for each in newest_first if each.step == self._step]
        if not found:
            there = ", ".join(str(step) for step in sorted({each.step for each in known})) or "no step at all"
            raise CheckpointError(f"{self._store.name} has no checkpoint of step {self._step}; it has {there}")
        return found

    def _with_differences(self, resume: Resume) -> Resume:
        """Say what was not loaded."""
        if (told := self._restore.describe_differences()) and RankInWorld.current().rank == 0:
            log.warning("the checkpoint of step %d was loaded in part: %s", resume.step, told)
        restore = self._restore
        return replace(resume, missing=restore.missing, unexpected=restore.unexpected, has_changed=restore.has_changed)

    def _find_checkpoints(self) -> tuple[set[CheckpointId], ImageInventory]:
        """List the checkpoints: rank 0 in storage, every rank in its memory."""

        def own() -> Any:
            listed = tuple(self._store.list_complete()) if RankInWorld.current().rank == 0 else ()
            directory = self._staging.directory
            images = list_local_images(directory)
            return encode(_RankCheckpoints(self._comm.is_open, directory is not None, listed, images))

        def common(answers: list[Any]) -> Any:
            known = [decode(_RankCheckpoints, each) for each in answers]
            connections = name_of_connections(each.is_open for each in known)
            have_memory = all(each.has_memory for each in known)
            memory = merge_inventories([each.memory if have_memory else NodeImages() for each in known])
            return encode(_KnownCheckpoints(connections, have_memory, known[0].durable, memory))

        there = decode(_KnownCheckpoints, self._comm.training_all_reduce(own, common))
        self._connections = there.connections
        self._staging.all_have_memory(there.have_memory)
        return set(there.durable), there.memory

    def _connect(self) -> None:
        """Connect the ranks, unless they are: some may have lost contact, and what only reads its node's memory needs no connections."""
        name, self._connections = self._connections, ""
        if name:
            self._comm.connect(name)

    def _usable_in_memory(self, inventory: ImageInventory, durable: set[CheckpointId]) -> list[CheckpointId]:
        """List the memory checkpoints, except those that were rolled back by hand."""
        usable: list[CheckpointId] = []
        for each in inventory.candidates(before=self._generation):
            if inventory.durable_was_deleted(each, durable):
                known = inventory.durable_checkpoint_of(each)
                assert known is not None
                self._skip(each, f"is not used, because that of step {known.step} was deleted from {self._store.name}")
            else:
                usable.append(each)
        return usable

    def _from_memory(self, chosen: CheckpointId, inventory: ImageInventory) -> Resume | None:
        """Load from images; return None if they do not cover the state, or prove damaged while they are read."""
        if self._on_holders and (resume := self._on_holders_of(chosen, inventory)) is not None:
            return resume
        self._connect()
        bad: set[ImageInfo] = set()
        while (images := open_images(self._staging.directory, inventory.without(bad), chosen, self._comm)) is not None:
            found: set[ImageInfo] | None = None
            try:
                found = self._fill_from_images(chosen, images)
            finally:
                self._keep_or_close(images, chosen, inventory, is_loaded=found == set())
            if not found:
                return self._resumed(chosen, inventory, images.names(), images)
            bad |= found
        ranks = sorted({each.saved_rank for each in bad})
        self._skip(chosen, f"is damaged (rank {ranks[0]}'s part)" if ranks else "is not complete")
        return None

    def _keep_or_close(
        self, images: ImageSource, of: CheckpointId, inventory: ImageInventory, *, is_loaded: bool
    ) -> None:
        """Keep images of what is to be written to durable storage, and close others."""
        if is_loaded and self._writes and images.wants_durable and not inventory.is_durable(of):
            target = CheckpointId(of.step, self._generation)
            self.unwritten = ResumedState(target, of, images, images.plan_of_present_ranks())
        else:
            self.unmap_threads.append(images.close())

    def _on_holders_of(self, chosen: CheckpointId, inventory: ImageInventory) -> Resume | None:
        """Load on the ranks whose node holds everything; return None if there are none, or their replicas differ."""
        if not can_load_on_holders(self._restore, inventory, chosen):
            return None
        done = load_on_holders(
            self._staging.directory, inventory, chosen, self._restore, self._comm, self.unmap_threads
        )
        self._is_half_filled |= done.has_changed
        if not done.holders:
            return None
        names = [each.name for each in inventory.images(chosen)]
        return replace(self._resumed(chosen, inventory, names, done), holders=tuple(done.holders))

    def _resumed(
        self, chosen: CheckpointId, inventory: ImageInventory, names: list[str], loaded: ImageSource | LoadOnHolders
    ) -> Resume:
        """Note that images were loaded. names: of those that are still of use."""
        self._staging.durable = inventory.durable_checkpoint_of(chosen)
        self._staging.remove_stale_images(names, self._generation)
        path = self._staging.directory.path if self._staging.directory else Path()
        return Resume(chosen.step, chosen.generation, loaded.world_size, path, loaded.extra, "memory")

    def _from_files(self, chosen: CheckpointId) -> Resume | None:
        """Load from files; return None if they are damaged, or prove so while they are read."""
        self._connect()
        manifest = self._verified(chosen)
        if manifest is None:
            return None
        path = self._store.location(manifest.id)
        opened: list[FileSource] = []
        ready: list[LoadPlan] = []
        rank = RankInWorld.current().rank

        def open_source() -> list[str]:
            opened.append(FileSource(self._store, manifest, rank))
            return []

        if self._is_damaged(manifest.id, open_source):
            return None
        (source,) = opened
        nested = self._restore.nested(source)
        self._restore.learn_other_stages(nested, source, self._comm)
        self._comm.on_every_rank(lambda: ready.append(self._restore.fit(str(path), source, nested)))
        (filling,) = ready  # no rank changes anything unless all ranks can
        self._is_half_filled = self._restore.has_changed = True
        if self._is_damaged(manifest.id, lambda: source.fill(filling.targets())):
            return None
        self._comm.on_every_rank(lambda: self._restore.apply(manifest.id, source, filling, nested))
        if not self._restore.live.is_weights_only:
            self._staging.durable = manifest.id
            self._staging.remove_stale_images((), self._generation)
            report_checkpoint(manifest.id.step, str(path))
        return Resume(manifest.id.step, manifest.id.generation, manifest.world_size, path, manifest.extra)

    def _fill_from_images(self, chosen: CheckpointId, images: ImageSource) -> set[ImageInfo]:
        """Return the images that were damaged; then the state is half filled, and must be filled from elsewhere."""
        name = f"the checkpoint of step {chosen.step} in memory"
        nested = self._restore.nested(images)
        self._restore.learn_other_stages(nested, images, self._comm)
        ready: list[tuple[LoadPlan, ReadPlan]] = []

        answers = self._comm.all_reduce(
            lambda: images.digests(self._restore.replica_local),
            lambda digests: [encode(each) for each in images.disagreeing_images(digests)],
        )
        if disagreeing_images := {decode(ImageInfo, each) for each in answers}:
            if RankInWorld.current().rank == 0:
                log.warning(
                    "%s: what %s saved differs from the other replicas, and is not used; memory or hardware there may be faulty",
                    name,
                    format_ranks({each.saved_rank for each in disagreeing_images}),
                )
            return disagreeing_images

        def fit() -> dict[int, list[Any]]:
            filling = self._restore.fit(name, images, nested)
            ready.append((filling, images.plan_reads(filling.targets())))
            return ready[0][1].requested_ranges()

        requested = self._comm.all_to_all(fit)  # no rank changes anything unless all ranks can
        ((filling, read_plan),) = ready
        self._is_half_filled = self._restore.has_changed = True
        bad = images.fill(read_plan, requested, self._comm)
        if not bad:
            self._comm.on_every_rank(lambda: self._restore.apply(chosen, images, filling, nested))
        return bad

    def _verified(self, chosen: CheckpointId) -> Manifest | None:
        """Return the manifest if every file is as it says, else None. The ranks share the check."""
        place = RankInWorld.current()
        rank, world_size = place.rank, place.world_size
        manifests: list[Manifest] = []

        def found() -> list[str]:
            manifests.append(self._store.manifest(chosen))
            return self._store.find_problems(manifests[0], sorted(manifests[0].files)[rank::world_size])

        return None if self._is_damaged(chosen, found) else manifests[0]

    def _is_damaged(self, chosen: CheckpointId, find_damage: Callable[[], list[str]]) -> bool:
        """Have every rank check files of a checkpoint; damage that one rank finds counts for all."""

        def found() -> str | None:
            try:
                return next(iter(find_damage()), None)
            except DamagedCheckpoint as error:
                return str(error)
            except OSError as error:
                raise CheckpointError(
                    f"{self._store.location(chosen)} cannot be read at the moment: {error.strerror or error}; start again when "
                    "storage answers, or move it away to resume from the one before"
                ) from error

        problem = self._comm.all_reduce(found, first_message)
        if problem is None:
            return False
        if RankInWorld.current().rank == 0:
            log.warning("skipping a damaged checkpoint: %s", problem)
        self.damaged.add(chosen)
        self._damage = self._damage or problem
        return True

    def _skip(self, of: CheckpointId, why: str) -> None:
        self._skip_reason = self._skip_reason or f"the checkpoint of step {of.step} in memory {why}"

    def _log_skipped(self, instead: str) -> None:
        if self._skip_reason and RankInWorld.current().rank == 0:
            log.warning("%s; %s", self._skip_reason, instead)
