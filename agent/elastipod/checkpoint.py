"""Checkpoints of model, optimizer and schedule that can be resumed on any number of ranks.

Built on torch.distributed.checkpoint: each rank writes and reads its part, and a change of world size reshards on load.
Around it stands what a resize needs: a checkpoint appears only when every rank has finished, is verified before a byte
of it is believed, and cannot be written by a generation that has been replaced. Plain modules, DDP and FSDP2 work alike.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from elastipod.checkpoint_directory import CheckpointDirectory, CheckpointId, FileRecord, Manifest, record_file
from elastipod.errors import CheckpointError
from elastipod.local_worker import generation_from_env, run_from_env
from elastipod.moments import optimizer_norm
from elastipod.ranks import from_every_rank, from_rank_zero, rank_and_world
from elastipod.shards import own_files, read_shards, write_shards

if TYPE_CHECKING:
    from elastipod.sample_log import SampleLog

log = logging.getLogger(__name__)

SCHEDULER_FILE = "scheduler.pt"


class Scheduler(Protocol):
    """Anything that gives and takes its state as a dictionary of plain values, as torch's LR schedulers do."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a run goes on. step: completed optimizer steps; generation and world_size: of the run that saved it."""

    step: int
    generation: int
    world_size: int
    path: Path
    extra: Mapping[str, Any] = field(default_factory=dict)


class CheckpointManager:
    """Saves and resumes the training state in one directory that all ranks share.

    Every method and `generation` are collective on first use: all ranks of the default process group call them in the
    same order. A single process needs no process group.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 2, generation: int | None = None) -> None:
        """Store the arguments; nothing is read or written yet.

        keep: complete checkpoints to hold on to, at least 1. generation: of this run; by default what the launcher says,
        outside a pod one more than the directory has seen.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least one checkpoint must stay")
        self._directory = CheckpointDirectory(directory)
        self._keep = keep
        self._wanted_generation = generation
        self._generation: int | None = None
        self._damaged: set[CheckpointId] = set()

    @property
    def generation(self) -> int:
        """Give this run's generation; the first use claims the directory for it. Raises FencedError, CheckpointError."""
        if self._generation is None:
            wanted = self._wanted_generation or generation_from_env()
            self._generation = from_rank_zero(lambda: self._directory.claim(wanted, run_from_env()))
        return self._generation

    def save(
        self,
        step: int,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None = None,
        extra: Mapping[str, Any] | None = None,
        sample_log: SampleLog | None = None,
    ) -> Path:
        """Write a checkpoint of ``step`` completed optimizer steps and give its path once it is complete and durable.

        extra: small JSON-able values of the whole job, the same on every rank. sample_log: is made durable before the
        checkpoint appears and notes it afterwards. A step that this generation saved before is not written again.
        Collective. Raises FencedError when a newer generation has taken over (nothing was committed, nothing deleted) and
        CheckpointError, on all ranks, when any rank fails. Then remove nothing by hand: what was left is cleaned up later.
        """
        target = CheckpointId(step, self.generation)
        values = _plain(extra or {})
        temporary = from_rank_zero(lambda: self._begin(target))
        if temporary is None:
            return self._directory.path / target.name
        self._write_state(Path(temporary), model, optimizer)
        records = from_every_rank(lambda: _finish_own_files(Path(temporary), scheduler, sample_log))
        files = {name: FileRecord(*record) for part in records for name, record in part.items()}
        manifest = Manifest(target, rank_and_world()[1], files, values)
        path = Path(from_rank_zero(lambda: self._commit(Path(temporary), manifest)))
        if sample_log is not None:
            sample_log.saved(step, optimizer_norm(optimizer))
        return path

    def load_latest(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None = None,
    ) -> Resume | None:
        """Load the freshest complete and intact checkpoint into the given objects; None when there is none at all.

        The world size may differ from the one that saved. A damaged checkpoint is passed over, with a warning, for the one
        before it. Collective. Raises CheckpointError when checkpoints exist but none can be used: starting over silently
        would throw the work away.
        """
        _ = self.generation  # claim first: from here on no former generation can commit
        for candidate in from_rank_zero(lambda: [(each.step, each.generation) for each in self._directory.complete()]):
            chosen = CheckpointId(*candidate)
            manifest = self._verified(chosen)
            if manifest is not None:
                return self._load(manifest, model, optimizer, scheduler)
        if self._damaged:
            raise CheckpointError(
                f"none of the {len(self._damaged)} checkpoints in {self._directory.path} is intact; restore one, or name "
                "another directory to start from the beginning"
            )
        return None

    # -- save ----------------------------------------------------------------------------------------------------

    def _begin(self, target: CheckpointId) -> str | None:
        if target in self._directory.complete():
            return None
        return str(self._directory.begin(target))

    def _write_state(self, path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        weights, moments = get_state_dict(model, optimizer)
        try:
            write_shards(path, {"model": weights, "optimizer": moments})
        except CheckpointError:
            self._directory.check_fence(self.generation)  # a successor may have cleared our unfinished files away
            raise

    def _commit(self, temporary: Path, manifest: Manifest) -> str:
        final = self._directory.commit(temporary, manifest)
        try:
            self._directory.prune(self.generation, self._keep, self._damaged)
        except OSError as error:
            log.warning("old checkpoints in %s could not be deleted: %s", self._directory.path, error)
        self._damaged.clear()
        return str(final)

    # -- load ----------------------------------------------------------------------------------------------------

    def _verified(self, chosen: CheckpointId) -> Manifest | None:
        """Give the manifest when every file is as it says. The ranks share the reading."""
        rank, world_size = rank_and_world()
        manifest: Manifest | None = None
        try:
            manifest = self._directory.manifest(chosen)
            found = self._directory.problems(manifest, sorted(manifest.files)[rank::world_size])
        except CheckpointError as error:
            found = [str(error)]
        problems = [text for part in from_every_rank(lambda: found) for text in part]
        if not problems:
            return manifest
        if rank == 0:
            log.warning("passing over a damaged checkpoint: %s", problems[0])
        self._damaged.add(chosen)
        return None

    def _load(
        self, manifest: Manifest, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Scheduler | None
    ) -> Resume:
        path = self._directory.path / manifest.id.name
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        read_shards(path, state)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        if scheduler is not None:
            if SCHEDULER_FILE not in manifest.files:
                raise CheckpointError(
                    f"{path} was saved without a scheduler; resume without one, or from another checkpoint"
                )
            scheduler.load_state_dict(torch.load(path / SCHEDULER_FILE, weights_only=True))
        return Resume(manifest.id.step, manifest.id.generation, manifest.world_size, path, manifest.extra)


def _finish_own_files(
    temporary: Path, scheduler: Scheduler | None, sample_log: SampleLog | None
) -> dict[str, tuple[int, str]]:
    """Write what is left of this rank's part, make its sample log durable, and measure the files that it wrote."""
    rank, _ = rank_and_world()
    if sample_log is not None:
        sample_log.sync()
    names = own_files(temporary)
    if rank == 0 and scheduler is not None:
        with open(temporary / SCHEDULER_FILE, "xb") as file:
            torch.save(scheduler.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        names.append(SCHEDULER_FILE)
    records = {name: record_file(temporary / name) for name in names}
    return {name: (record.size, record.crc32) for name, record in records.items()}


def _plain(extra: Mapping[str, Any]) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(json.dumps(dict(extra)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"extra must hold JSON values only (numbers, texts, lists, dictionaries): {error}"
        ) from error
    return values
