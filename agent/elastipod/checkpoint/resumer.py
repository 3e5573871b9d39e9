"""Choosing the checkpoint that a run resumes from, and loading it into the live objects."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastipod.checkpoint.agent_report import report_checkpoint
from elastipod.checkpoint.communicator import Communicator
from elastipod.checkpoint.file_source import FileSource
from elastipod.checkpoint.image_inventory import (
    ImageInfo,
    ImageInventory,
    NodeImages,
    list_local_images,
    merge_inventories,
)
from elastipod.checkpoint.image_source import ImageSource, ReadPlan
from elastipod.checkpoint.load_plan import LoadPlan
from elastipod.checkpoint.manifest import CheckpointId, DamagedCheckpoint, Manifest
from elastipod.checkpoint.open_images import open_images
from elastipod.checkpoint.optimizer_state import OPTIMIZER, describe_other_optimizer, state_to_fill
from elastipod.checkpoint.reductions import first_message
from elastipod.checkpoint.resume import Resume
from elastipod.checkpoint.rng import restore_random_state, seed_new_rank
from elastipod.checkpoint.staging import Staging
from elastipod.checkpoint.store import CheckpointStore
from elastipod.checkpoint.training_state import (
    RANDOM,
    SCHEDULER,
    Scheduler,
    apply_state,
    nested_state,
    replica_local_keys,
)
from elastipod.checkpoint.value_codec import decode_value
from elastipod.errors import CheckpointError
from elastipod.json_records import decode, encode
from elastipod.rank_in_world import RankInWorld
from elastipod.rank_ranges import format_ranks

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LiveObjects:
    """The objects that a checkpoint is loaded into."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler | None


@dataclass(frozen=True, slots=True)
class _RankCheckpoints:
    """What one rank finds. durable: in storage, as rank 0 lists it."""

    is_open: bool
    durable: tuple[CheckpointId, ...]
    memory: NodeImages


@dataclass(frozen=True, slots=True)
class _KnownCheckpoints:
    """What all ranks find. is_open: whether all ranks are connected."""

    is_open: bool
    durable: tuple[CheckpointId, ...]
    memory: ImageInventory


class Resumer:
    """One search for the newest usable checkpoint. Methods are collective."""

    def __init__(
        self, directory: CheckpointStore, staging: Staging, comm: Communicator, generation: int, live: LiveObjects
    ) -> None:
        self._store, self._staging, self._comm = directory, staging, comm
        self._generation, self._live = generation, live
        self._is_half_filled = False
        self._skip_reason = ""  # why the newest memory checkpoint was not used, on every rank
        self.needs_durable_write = False  # the resumed checkpoint is in memory only, but was to be durable
        self.damaged: set[CheckpointId] = set()
        self.unmap_threads: list[threading.Thread] = []  # they unmap images; training need not wait

    def resume(self) -> Resume | None:
        """Load it. Returns None when there is no checkpoint at all. Raises CheckpointError."""
        durable, inventory = self._find_checkpoints()
        in_memory = set(self._usable_in_memory(inventory, durable))
        for chosen in sorted(durable | in_memory, reverse=True):
            if chosen in in_memory and (resume := self._from_memory(chosen, inventory)) is not None:
                self._log_skipped(f"resuming from that of step {chosen.step} there")
                return resume
            if chosen in durable and (resume := self._from_files(chosen)) is not None:
                self._log_skipped(f"resuming from the durable one of step {chosen.step}")
                return resume
        if self.damaged:
            raise CheckpointError(
                f"none of the {len(self.damaged)} checkpoints in {self._store.name} is intact; restore one, or name "
                "another directory to start from the beginning"
            )
        if self._is_half_filled:
            raise CheckpointError(
                f"{self._skip_reason}, and there is no other; pass memory=False to start from the beginning"
            )
        self._log_skipped("there is no durable one, and training starts from the beginning")
        return None

    def _find_checkpoints(self) -> tuple[set[CheckpointId], ImageInventory]:
        """List the checkpoints: rank 0 in storage, every rank in its memory. Ranks that lost contact connect again."""

        def own() -> Any:
            listed = tuple(self._store.list_complete()) if RankInWorld.current().rank == 0 else ()
            return encode(_RankCheckpoints(self._comm.is_open, listed, list_local_images(self._staging.directory)))

        def common(answers: list[Any]) -> Any:
            known = [decode(_RankCheckpoints, each) for each in answers]
            memory = merge_inventories([each.memory for each in known])
            return encode(_KnownCheckpoints(all(each.is_open for each in known), known[0].durable, memory))

        there = decode(_KnownCheckpoints, self._comm.training_all_reduce(own, common))
        if not there.is_open:
            self._comm.connect()
        return set(there.durable), there.memory

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
        bad: set[ImageInfo] = set()
        while (images := open_images(self._staging.directory, inventory.without(bad), chosen, self._comm)) is not None:
            try:
                found = self._fill_from_images(chosen, images)
            finally:
                self.unmap_threads.append(images.close())
            if not found:
                self.needs_durable_write = images.wants_durable and inventory.durable_checkpoint_of(chosen) != chosen
                self._staging.durable = inventory.durable_checkpoint_of(chosen)
                self._staging.remove_stale_images(images.names(), self._generation)
                path = self._staging.directory.path if self._staging.directory else Path()
                return Resume(chosen.step, chosen.generation, images.world_size, path, images.extra, "memory")
            bad |= found
        ranks = sorted({each.saved_rank for each in bad})
        self._skip(chosen, f"is damaged (rank {ranks[0]}'s part)" if ranks else "is not complete")
        return None

    def _from_files(self, chosen: CheckpointId) -> Resume | None:
        """Load from files; return None if they are damaged, or prove so while they are read."""
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
        nested = self._nested(source)
        self._comm.on_every_rank(lambda: ready.append(self._fitting(str(path), source, nested)))
        (filling,) = ready  # no rank changes anything unless all ranks can
        self._is_half_filled = True
        if self._is_damaged(manifest.id, lambda: source.fill(filling.targets())):
            return None
        self._comm.on_every_rank(lambda: self._apply(manifest.id, source, filling, nested))
        self._staging.durable = manifest.id
        self._staging.remove_stale_images((), self._generation)
        report_checkpoint(manifest.id.step, str(path))
        return Resume(manifest.id.step, manifest.id.generation, manifest.world_size, path, manifest.extra)

    def _fill_from_images(self, chosen: CheckpointId, images: ImageSource) -> set[ImageInfo]:
        """Return the images that were damaged; then the state is half filled, and must be filled from elsewhere."""
        name = f"the checkpoint of step {chosen.step} in memory"
        nested = self._nested(images)
        ready: list[tuple[LoadPlan, ReadPlan]] = []

        answers = self._comm.all_reduce(
            lambda: images.digests(replica_local_keys(self._live.model)),
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
            filling = self._fitting(name, images, nested)
            ready.append((filling, images.plan_reads(filling.targets())))
            return ready[0][1].requested_ranges()

        requested = self._comm.all_to_all(fit)  # no rank changes anything unless all ranks can
        ((filling, read_plan),) = ready
        self._is_half_filled = True
        bad = images.fill(read_plan, requested, self._comm)
        if not bad:
            self._comm.on_every_rank(lambda: self._apply(chosen, images, filling, nested))
        return bad

    def _nested(self, source: FileSource | ImageSource) -> dict[str, Any]:
        """Return the live state to load into, with memory for what was saved. On all ranks: optimizers may run collectives."""
        model, optimizer = self._live.model, self._live.optimizer
        nested = nested_state(model, optimizer)
        return {**nested, OPTIMIZER: state_to_fill(nested[OPTIMIZER], model, optimizer, source.metadata)}

    def _fitting(self, name: str, source: FileSource | ImageSource, nested: dict[str, Any]) -> LoadPlan:
        try:
            filling = LoadPlan(nested, source)
            if problem := describe_other_optimizer(nested[OPTIMIZER], source):
                raise ValueError(problem)
        except ValueError as error:
            raise CheckpointError(f"{name} does not fit this model and optimizer: {error}") from error
        if self._live.scheduler is not None and not source.has_value(SCHEDULER):
            raise CheckpointError(
                f"{name} was saved without a scheduler; resume without one, or from another checkpoint"
            )
        return filling

    def _apply(
        self, of: CheckpointId, source: FileSource | ImageSource, filling: LoadPlan, nested: dict[str, Any]
    ) -> None:
        """Load the filled tensors and the plain values into the live objects."""
        filling.copy_values()
        saved_schedule = source.value(SCHEDULER) if self._live.scheduler is not None else ""
        apply_state(nested, self._live.model, self._live.optimizer)
        if self._live.scheduler is not None:
            self._live.scheduler.load_state_dict(decode_value(saved_schedule))
        rank = RankInWorld.current().rank
        key = f"{RANDOM}.{rank}"
        if source.has_value(key):
            restore_random_state(source.value(key))
        else:
            seed_new_rank(of.step, rank)

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
        return True

    def _skip(self, of: CheckpointId, why: str) -> None:
        self._skip_reason = self._skip_reason or f"the checkpoint of step {of.step} in memory {why}"

    def _log_skipped(self, instead: str) -> None:
        if self._skip_reason and RankInWorld.current().rank == 0:
            log.warning("%s; %s", self._skip_reason, instead)
