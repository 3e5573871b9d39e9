"""Which checkpoint a run goes on from, and giving it to the live objects."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from elastipod.checkpoint.agent_report import tell_agent
from elastipod.checkpoint.communicator import Exchange, first_of
from elastipod.checkpoint.file_source import FileSource
from elastipod.checkpoint.image_inventory import Found, MemoryView, look, open_images, view_of
from elastipod.checkpoint.image_source import Errands, Images
from elastipod.checkpoint.load_plan import Filling
from elastipod.checkpoint.optimizer_state import OPTIMIZER, other_optimizer, state_to_fill
from elastipod.checkpoint.rng import restore_random_state, seed_newcomer
from elastipod.checkpoint.staging import Staging
from elastipod.checkpoint.store import CheckpointId, CheckpointStore, Damaged, Manifest
from elastipod.checkpoint.training_state import RANDOM, SCHEDULER, Scheduler, apply_state, nested_state, own_of_replicas
from elastipod.checkpoint.value_codec import unpacked
from elastipod.errors import CheckpointError
from elastipod.rank_names import name_ranks
from elastipod.ranks import rank_and_world

log = logging.getLogger(__name__)

Tier = Literal["memory", "durable"]


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a run goes on. step: completed optimizer steps; generation and world_size: of the run that saved it.

    path: of the checkpoint; an address where it is in an object store. tier: where it was read from.
    """

    step: int
    generation: int
    world_size: int
    path: Path | str
    extra: Mapping[str, Any] = field(default_factory=dict)
    tier: Tier = "durable"


@dataclass(frozen=True, slots=True)
class Live:
    """What is loaded into."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler | None


class Resumer:
    """One search for the freshest checkpoint that can be used. Its methods are collective."""

    def __init__(
        self, directory: CheckpointStore, staging: Staging, exchange: Exchange, generation: int, live: Live
    ) -> None:
        self._directory, self._staging, self._exchange = directory, staging, exchange
        self._generation, self._live = generation, live
        self._is_half_filled = False
        self._passed_over = ""  # why the freshest one in memory was not used, on every rank
        self.is_unwritten = False  # what was resumed is in memory alone, though it was to be durable
        self.damaged: set[CheckpointId] = set()
        self.unmapping: list[threading.Thread] = []  # of images that were read; it may go on when training does

    def resume(self) -> Resume | None:
        """Load it. None when there is none at all. Raises CheckpointError."""
        durable, view = self._look()
        in_memory = set(self._usable(view, durable))
        for chosen in sorted(durable | in_memory, reverse=True):
            if chosen in in_memory and (resume := self._from_memory(chosen, view)) is not None:
                self._tell_passed_over(f"going on from that of step {chosen.step} there")
                return resume
            if chosen in durable and (resume := self._from_files(chosen)) is not None:
                self._tell_passed_over(f"going on from the durable one of step {chosen.step}")
                return resume
        if self.damaged:
            raise CheckpointError(
                f"none of the {len(self.damaged)} checkpoints in {self._directory.name} is intact; restore one, or name "
                "another directory to start from the beginning"
            )
        if self._is_half_filled:
            raise CheckpointError(
                f"{self._passed_over}, and there is no other; pass memory=False to start from the beginning"
            )
        self._tell_passed_over("there is no durable one, and training starts from the beginning")
        return None

    def _look(self) -> tuple[set[CheckpointId], MemoryView]:
        """Ask what there is: rank 0 the storage, every rank its memory. The ranks connect anew where they have lost touch."""

        def own() -> dict[str, Any]:
            listed = self._directory.complete() if rank_and_world()[0] == 0 else []
            durable = [[each.step, each.generation] for each in listed]
            return {"is_open": self._exchange.is_open, "durable": durable, **look(self._staging.directory)}

        def common(answers: list[dict[str, Any]]) -> dict[str, Any]:
            is_open = all(answer["is_open"] for answer in answers)
            return {"is_open": is_open, "durable": answers[0]["durable"], "memory": view_of(answers).as_json()}

        there = self._exchange.meet(own, common)
        if not there["is_open"]:
            self._exchange.open()
        return {CheckpointId(*each) for each in there["durable"]}, MemoryView.from_json(there["memory"])

    def _usable(self, view: MemoryView, durable: set[CheckpointId]) -> list[CheckpointId]:
        """List what is in memory, but for what was rolled back by hand."""
        usable: list[CheckpointId] = []
        for each in view.candidates(before=self._generation):
            if view.is_rolled_back(each, durable):
                known = view.durable_at(each)
                assert known is not None
                self._pass_over(
                    each, f"is not used, for that of step {known.step} was deleted from {self._directory.name}"
                )
            else:
                usable.append(each)
        return usable

    def _from_memory(self, chosen: CheckpointId, view: MemoryView) -> Resume | None:
        """Load from images; gives None where they are no whole, or prove to be none while they are read."""
        bad: set[Found] = set()
        while (images := open_images(self._staging.directory, view.without(bad), chosen, self._exchange)) is not None:
            try:
                found = self._fill_from_images(chosen, images)
            finally:
                self.unmapping.append(images.close())
            if not found:
                self.is_unwritten = images.wants_durable and view.durable_at(chosen) != chosen
                self._staging.durable = view.durable_at(chosen)
                self._staging.forget_others(images.names(), self._generation)
                path = self._staging.directory.path if self._staging.directory else Path()
                return Resume(chosen.step, chosen.generation, images.world_size, path, images.extra, "memory")
            bad |= found
        ranks = sorted({each.saved_rank for each in bad})
        self._pass_over(chosen, f"is damaged (rank {ranks[0]}'s part)" if ranks else "is not whole")
        return None

    def _from_files(self, chosen: CheckpointId) -> Resume | None:
        """Load from files; gives None where they are damaged, or prove so while they are read."""
        manifest = self._verified(chosen)
        if manifest is None:
            return None
        path = self._directory.location(manifest.id)
        opened: list[FileSource] = []
        ready: list[Filling] = []
        rank, _ = rank_and_world()

        def open_source() -> list[str]:
            opened.append(FileSource(self._directory, manifest, rank))
            return []

        if self._is_damaged(manifest.id, open_source):
            return None
        (source,) = opened
        nested = self._nested(source)
        self._exchange.every_rank(lambda: ready.append(self._fitting(str(path), source, nested)))
        (filling,) = ready  # no rank changes anything unless all can
        self._is_half_filled = True
        if self._is_damaged(manifest.id, lambda: source.fill(filling.parts())):
            return None
        self._exchange.every_rank(lambda: self._apply(manifest.id, source, filling, nested))
        self._staging.durable = manifest.id
        self._staging.forget_others((), self._generation)
        tell_agent(manifest.id.step, str(path))
        return Resume(manifest.id.step, manifest.id.generation, manifest.world_size, path, manifest.extra)

    def _fill_from_images(self, chosen: CheckpointId, images: Images) -> set[Found]:
        """Gives the images that were damaged; then the state is half filled, and must be filled from elsewhere."""
        name = f"the checkpoint of step {chosen.step} in memory"
        nested = self._nested(images)
        ready: list[tuple[Filling, Errands]] = []

        told = self._exchange.agree(
            lambda: images.digests(own_of_replicas(self._live.model)),
            lambda digests: [each.as_json() for each in images.differing(digests)],
        )
        if differing := set(map(Found.from_json, told)):
            if rank_and_world()[0] == 0:
                log.warning(
                    "%s: what %s saved differs from the other replicas, and is left out; memory or hardware there may be faulty",
                    name,
                    name_ranks({each.saved_rank for each in differing}),
                )
            return differing

        def fit() -> dict[int, list[Any]]:
            filling = self._fitting(name, images, nested)
            ready.append((filling, images.errands(filling.parts())))
            return ready[0][1].as_json()

        asked = self._exchange.deliver(fit)  # no rank changes anything unless all can
        ((filling, errands),) = ready
        self._is_half_filled = True
        bad = images.fill(errands, asked, self._exchange)
        if not bad:
            self._exchange.every_rank(lambda: self._apply(chosen, images, filling, nested))
        return bad

    def _nested(self, source: FileSource | Images) -> dict[str, Any]:
        """Give the live state to load into, with room for what was saved. On all ranks: optimizers may have collectives."""
        model, optimizer = self._live.model, self._live.optimizer
        nested = nested_state(model, optimizer)
        return {**nested, OPTIMIZER: state_to_fill(nested[OPTIMIZER], model, optimizer, source.metadata)}

    def _fitting(self, name: str, source: FileSource | Images, nested: dict[str, Any]) -> Filling:
        try:
            filling = Filling(nested, source)
            if problem := other_optimizer(nested[OPTIMIZER], source):
                raise ValueError(problem)
        except ValueError as error:
            raise CheckpointError(f"{name} does not fit this model and optimizer: {error}") from error
        if self._live.scheduler is not None and not source.has_value(SCHEDULER):
            raise CheckpointError(
                f"{name} was saved without a scheduler; resume without one, or from another checkpoint"
            )
        return filling

    def _apply(self, of: CheckpointId, source: FileSource | Images, filling: Filling, nested: dict[str, Any]) -> None:
        """Give what was filled, and the plain values, to the live objects."""
        filling.copy_values()
        saved_schedule = source.value(SCHEDULER) if self._live.scheduler is not None else ""
        apply_state(nested, self._live.model, self._live.optimizer)
        if self._live.scheduler is not None:
            self._live.scheduler.load_state_dict(unpacked(saved_schedule))
        rank, _ = rank_and_world()
        key = f"{RANDOM}.{rank}"
        if source.has_value(key):
            restore_random_state(source.value(key))
        else:
            seed_newcomer(of.step, rank)

    def _verified(self, chosen: CheckpointId) -> Manifest | None:
        """Give the manifest when every file is there as it says, None when not. The ranks share the looking."""
        rank, world_size = rank_and_world()
        manifests: list[Manifest] = []

        def found() -> list[str]:
            manifests.append(self._directory.manifest(chosen))
            return self._directory.problems(manifests[0], sorted(manifests[0].files)[rank::world_size])

        return None if self._is_damaged(chosen, found) else manifests[0]

    def _is_damaged(self, chosen: CheckpointId, look: Callable[[], list[str]]) -> bool:
        """Have every rank look at files of a checkpoint; what any finds, or raises as Damaged, makes it damaged for all."""

        def found() -> str | None:
            try:
                return next(iter(look()), None)
            except Damaged as error:
                return str(error)
            except OSError as error:
                raise CheckpointError(
                    f"{self._directory.location(chosen)} cannot be read at the moment: {error.strerror or error}; start again when "
                    "storage answers, or move it away to go on from the one before"
                ) from error

        problem = self._exchange.agree(found, first_of)
        if problem is None:
            return False
        if rank_and_world()[0] == 0:
            log.warning("passing over a damaged checkpoint: %s", problem)
        self.damaged.add(chosen)
        return True

    def _pass_over(self, of: CheckpointId, why: str) -> None:
        self._passed_over = self._passed_over or f"the checkpoint of step {of.step} in memory {why}"

    def _tell_passed_over(self, instead: str) -> None:
        if self._passed_over and rank_and_world()[0] == 0:
            log.warning("%s; %s", self._passed_over, instead)
