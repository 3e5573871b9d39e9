"""Checkpoints of model, optimizer, schedule and random state that can be resumed on any number of ranks.

Training stands still only while the state is copied to host memory. From there a thread keeps it in memory (this node's
and, where a lost node would take something along, another's) and writes it to durable storage in the format of
torch.distributed.checkpoint. A checkpoint appears only when every rank has finished, is verified before a byte of it is
believed, and cannot be written by a generation that has been replaced. Plain modules, DDP, FSDP2 and HSDP work alike.
docs/design/checkpoints.md tells why.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist

from elastipod.checkpoint_directory import (
    CheckpointDirectory,
    CheckpointId,
    CheckpointStore,
    Damaged,
    FileRecord,
    Manifest,
)
from elastipod.checkpoints.files import METADATA, FileSource, Source, file_name, write_metadata, write_part
from elastipod.checkpoints.image import job_directory, memory_root
from elastipod.checkpoints.load import Filling
from elastipod.checkpoints.memory import ImageSource, look, open_images
from elastipod.checkpoints.progress import tell_agent
from elastipod.checkpoints.rng import restore_random_state, seed_newcomer
from elastipod.checkpoints.staging import Staged, Staging
from elastipod.checkpoints.state import RANDOM, SCHEDULER, Scheduler, State, apply_state, nested_state
from elastipod.checkpoints.values import unpacked
from elastipod.errors import CheckpointError, FencedError
from elastipod.local_worker import generation_from_env, job_from_env, run_from_env
from elastipod.moments import optimizer_norm
from elastipod.ranks import from_every_rank, from_rank_zero, rank_and_world

if TYPE_CHECKING:
    from elastipod.sample_log import SampleLog

log = logging.getLogger(__name__)

Tier = Literal["memory", "durable"]

_PATIENCE = timedelta(hours=2)  # for the slowest rank's part of a save; a rank that is lost is noticed at once
_FULL = (errno.ENOSPC, errno.EDQUOT)


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


class CheckpointManager:
    """Saves and resumes the training state in one directory that all ranks share.

    Every method and `generation` are collective: all ranks of the default process group call them in the same order, from
    one thread. A single process needs no process group. Make a new manager when the process group was made anew.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 2,
        keep_every: int | None = None,
        generation: int | None = None,
        memory: str | os.PathLike[str] | bool | None = None,
        adopt: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Store the arguments; nothing is read or written yet.

        directory: a path, or an address that fsspec understands such as s3://bucket/folder, with ``storage_options`` for
        it. keep: newest complete checkpoints to hold on to, at least 1; keep_every: those of steps that it divides stay
        for good. generation: of this run; by default what the launcher says, outside a pod one more than the directory
        has seen. memory: folder of a memory file system for the copies in memory, False for none; by default
        ``ELASTIPOD_MEMORY_DIR``, else /dev/shm in a pod and none elsewhere. adopt: take over another job's directory.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least one checkpoint must stay")
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"keep_every is {keep_every}; it is a number of steps, at least 1")
        self._directory = _open_store(directory, storage_options or {})
        self._keep, self._keep_every = keep, keep_every
        self._wanted_generation = generation
        self._adopt = adopt
        self._memory_root = memory_root(memory, is_in_pod=bool(run_from_env()))
        self._generation: int | None = None
        self._damaged: set[CheckpointId] = set()
        self._group: dist.ProcessGroup | None = None
        self._staging: Staging | None = None
        self._save: _Save | None = None

    @property
    def generation(self) -> int:
        """Give this run's generation; the first use claims the directory for it. Raises FencedError, CheckpointError."""
        if self._generation is None:
            if rank_and_world()[1] > 1:
                self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=_PATIENCE))
            wanted = self._wanted_generation or generation_from_env()
            self._generation, identity = from_rank_zero(lambda: self._claim(wanted), self._group)
            images = job_directory(self._memory_root, identity)
            has_memory = all(from_every_rank(lambda: images is not None, self._group))
            self._staging = Staging(images if has_memory else None, self._group)
        return self._generation

    # -- save ----------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None = None,
        extra: Mapping[str, Any] | None = None,
        sample_log: SampleLog | None = None,
    ) -> Path | str:
        """Write a checkpoint of ``step`` completed optimizer steps and give its path once it is complete and durable.

        extra: small JSON-able values of the whole job, the same on every rank. sample_log: is made durable before the
        checkpoint appears and notes it afterwards. A step that this generation saved before is not written again.
        Collective. Raises FencedError when a newer generation has taken over (nothing was committed, nothing deleted) and
        CheckpointError, on all ranks, when any rank fails; earlier checkpoints are as they were. Nothing needs to be
        removed by hand.
        """
        if not self._has_saved(step):
            norm = optimizer_norm(optimizer) if sample_log is not None else None
            self._start(step, model, optimizer, scheduler, extra, sample_log, norm, is_durable=True)
        path = self.wait()
        assert path is not None
        return path

    def save_async(
        self,
        step: int,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None = None,
        extra: Mapping[str, Any] | None = None,
        sample_log: SampleLog | None = None,
        durable: bool = True,
    ) -> None:
        """Begin a checkpoint and return as soon as the state has been copied to host memory; training may go on at once.

        As `save`; what is still being written from the last time is awaited first. durable: False keeps it in memory only,
        which takes no room in storage and can be done more often. Where storage fails (a full disk, say), rank 0 logs one
        sentence, training goes on, earlier checkpoints stay, and the next save tries again. Leave the training loop with
        `save`, or call `wait` before the process ends. Collective. Raises FencedError when a newer generation has taken over,
        and CheckpointError on all ranks when the state of any cannot be copied.
        """
        if durable and self._has_saved(step):
            return
        if not durable and not self._has_memory():
            log.warning("step %d is not saved: durable=False, and there is no memory for checkpoints", step)
            return
        self._start(step, model, optimizer, scheduler, extra, sample_log, None, is_durable=durable)

    def wait(self) -> Path | str | None:
        """Wait for the checkpoint that is being written and give the last one's path, None where it was kept in memory only.

        Raises what `save` would raise.
        """
        if self._save is None:
            return None
        self._save.thread.join()
        if self._save.error is not None:
            raise self._save.error
        return self._save.path

    def close(self) -> None:
        """Wait for what is being written, whatever comes of it, and let the memory go. What was kept in memory stays there."""
        if self._save is not None:
            self._save.thread.join()
        if self._staging is not None:
            self._staging.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- load ----------------------------------------------------------------------------------------------------

    def load_latest(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None = None,
    ) -> Resume | None:
        """Load the freshest complete and intact checkpoint into the given objects; None when there is none at all.

        It may be in memory or in durable storage, and the world size may differ from the one that saved. A damaged one is
        passed over, with a warning, for the one before it. The random state of this rank is restored too; a rank whose
        is not there (it is new, or its node's memory was lost) gets one that follows from the step and its rank. What is
        being written is awaited first. Collective. Raises CheckpointError on all ranks when checkpoints exist but none can
        be used (starting over silently would throw the work away), when storage does not give the freshest at the moment or
        another version wrote it, and when it does not fit the model and optimizer: then nothing was changed.
        """
        generation = self.generation  # claim first: from here on no former generation can commit
        assert self._staging is not None
        if self._save is not None:
            self._save.thread.join()  # it speaks over the same group
        self._damaged.clear()
        listed = from_rank_zero(
            lambda: [(each.step, each.generation) for each in self._directory.complete()], self._group
        )
        durable = {CheckpointId(*each) for each in listed}
        view = look(self._staging.directory, self._group)
        in_memory = set(view.candidates(before=generation))
        for chosen in sorted(durable | in_memory, reverse=True):
            if chosen in in_memory:
                images = open_images(self._staging.directory, view, chosen, self._group)
                if images is not None:
                    resume = self._load_images(chosen, images, model, optimizer, scheduler)
                    self._staging.forget_others(images.names(), generation)
                    return resume
            if chosen in durable and (manifest := self._verified(chosen)) is not None:
                resume = self._load_files(manifest, model, optimizer, scheduler)
                self._staging.forget_others((), generation)
                return resume
        if self._damaged:
            raise CheckpointError(
                f"none of the {len(self._damaged)} checkpoints in {self._directory.name} is intact; restore one, or name "
                "another directory to start from the beginning"
            )
        return None

    # -- save: in the training thread ----------------------------------------------------------------------------

    def _claim(self, wanted: int | None) -> tuple[int, str]:
        number = self._directory.claim(wanted, run_from_env(), job=job_from_env(), adopt=self._adopt)
        return number, self._directory.identity()

    def _has_saved(self, step: int) -> bool:
        """Tell whether the last save is a durable one of this step, still under way or well ended; the same on every rank."""
        last = self._save
        if last is None or last.staged.id.step != step or not last.is_durable:
            return False
        last.thread.join()
        return last.error is None

    def _has_memory(self) -> bool:
        _ = self.generation
        return self._staging is not None and self._staging.directory is not None

    def _start(
        self,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
        extra: Mapping[str, Any] | None,
        sample_log: SampleLog | None,
        norm: float | None,
        *,
        is_durable: bool,
    ) -> None:
        target = CheckpointId(step, self.generation)
        self._finish_last()
        assert self._staging is not None
        staged = self._staging.copy(
            lambda: State(model, optimizer, scheduler, rank_and_world()[0]), target, lambda: _plain(extra or {})
        )
        self._save = _Save(staged, is_durable=is_durable, sample_log=sample_log, norm=norm)
        self._save.thread = threading.Thread(target=self._run, args=(self._save,), name=f"elastipod-save-{step}")
        self._save.thread.start()

    def _finish_last(self) -> None:
        """Wait for the last save; storage trouble was told when it came and is tried again, but a fenced run ends here."""
        if self._save is None:
            return
        if self._save.thread.is_alive():
            began = time.monotonic()
            self._save.thread.join()
            if rank_and_world()[0] == 0:
                step, waited = self._save.staged.id.step, time.monotonic() - began
                log.info("training waited %.1f s for the checkpoint of step %d; save less often", waited, step)
        if isinstance(self._save.error, FencedError):
            raise self._save.error

    # -- save: in a thread of its own, while training goes on ------------------------------------------------------

    def _run(self, save: _Save) -> None:
        step, rank = save.staged.id.step, rank_and_world()[0]
        try:
            self._carry_out(save)
        except CheckpointError as error:
            save.error = error
        except Exception as error:  # a rank was lost in the middle of it; the training thread will meet the same
            save.error = CheckpointError(f"the checkpoint of step {step} could not be finished: {error}")
        if save.error is not None and rank == 0:
            log.warning("step %d is not saved: %s", step, save.error)

    def _carry_out(self, save: _Save) -> None:
        target = save.staged.id
        if save.sample_log is not None:
            from_every_rank(save.sample_log.sync, self._group)
        self._keep_in_memory(save)
        if save.is_durable:
            begun = from_rank_zero(lambda: self._begin(target), self._group)
            if begun is not None:
                self._write(save.staged, begun)
            save.path = self._directory.location(target)
            tell_agent(target.step, str(save.path))
        if save.sample_log is not None and save.is_durable:
            sample_log = save.sample_log
            from_every_rank(lambda: sample_log.saved(target.step, save.norm), self._group)

    def _keep_in_memory(self, save: _Save) -> None:
        assert self._staging is not None
        target = save.staged.id

        def check_fence() -> None:
            from_rank_zero(lambda: self._directory.check_fence(target.generation), self._group)

        problem = self._staging.keep_in_memory(save.staged, check_fence)
        if problem is None:
            return
        if not save.is_durable:
            raise CheckpointError(f"it cannot be kept in memory: {problem}")
        if rank_and_world()[0] == 0:
            log.warning("step %d goes to durable storage alone, it cannot be kept in memory: %s", target.step, problem)

    def _begin(self, target: CheckpointId) -> str | None:
        if target in self._directory.complete():
            return None
        return str(self._directory.begin(target))

    def _write(self, staged: Staged, begun: str) -> None:
        try:
            parts = from_every_rank(lambda: self._write_part(staged, begun), self._group)
            from_rank_zero(lambda: self._commit(staged, begun, parts), self._group)
        except FencedError:
            raise
        except CheckpointError:
            from_rank_zero(lambda: self._give_up(staged.id, begun), self._group)
            raise

    def _write_part(self, staged: Staged, begun: str) -> dict[str, Any]:
        rank, _ = rank_and_world()
        try:
            with self._directory.create_file(begun, file_name(rank)) as file:
                record, chunks, values = write_part(file, staged.tensors_to_write(), staged.values_to_write())
        except OSError as error:
            raise self._failed(staged.id, error) from error
        return {"record": [record.size, record.crc32], "chunks": chunks, "values": values}

    def _commit(self, staged: Staged, begun: str, parts: list[dict[str, Any]]) -> None:
        try:
            with self._directory.create_file(begun, METADATA) as file:
                about = write_metadata(file, staged.plan, [(part["chunks"], part["values"]) for part in parts])
            files = {file_name(rank): FileRecord(*part["record"]) for rank, part in enumerate(parts)}
            files[METADATA] = about
            self._directory.commit(begun, Manifest(staged.id, len(parts), files, staged.extra))
        except OSError as error:
            raise self._failed(staged.id, error) from error
        try:
            self._directory.prune(self.generation, self._keep, self._damaged, keep_every=self._keep_every)
        except OSError as error:
            log.warning("old checkpoints in %s could not be deleted: %s", self._directory.name, error)
        self._damaged.clear()

    def _failed(self, target: CheckpointId, error: OSError) -> CheckpointError:
        what = f"cannot write the checkpoint of step {target.step} in {self._directory.name}: {error.strerror or error}"
        if error.errno in _FULL:
            what += (
                "; make room there or keep fewer, the earlier checkpoints are untouched and the next save tries again"
            )
        return CheckpointError(what)

    def _give_up(self, target: CheckpointId, begun: str) -> None:
        self._directory.check_fence(target.generation)  # a successor may have taken our unfinished files away
        self._directory.abandon(begun)

    # -- load ----------------------------------------------------------------------------------------------------

    def _verified(self, chosen: CheckpointId) -> Manifest | None:
        """Give the manifest when every file is as it says, None when not. The ranks share the reading."""
        rank, world_size = rank_and_world()
        manifests: list[Manifest] = []

        def found() -> list[str]:
            try:
                manifests.append(self._directory.manifest(chosen))
                return self._directory.problems(manifests[0], sorted(manifests[0].files)[rank::world_size])
            except Damaged as error:
                return [str(error)]
            except OSError as error:
                raise CheckpointError(
                    f"{self._directory.location(chosen)} cannot be read at the moment: {error.strerror or error}; start again when "
                    "storage answers, or move it away to go on from the one before"
                ) from error

        problems = [text for part in from_every_rank(found, self._group) for text in part]
        if not problems:
            return manifests[0]
        if rank == 0:
            log.warning("passing over a damaged checkpoint: %s", problems[0])
        self._damaged.add(chosen)
        return None

    def _load_files(
        self, manifest: Manifest, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Scheduler | None
    ) -> Resume:
        path = self._directory.location(manifest.id)
        self._fill(
            str(path), lambda: FileSource(self._directory, manifest.id), manifest.id, model, optimizer, scheduler
        )
        tell_agent(manifest.id.step, str(path))
        return Resume(manifest.id.step, manifest.id.generation, manifest.world_size, path, manifest.extra)

    def _load_images(
        self,
        chosen: CheckpointId,
        images: ImageSource,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
    ) -> Resume:
        name = f"the checkpoint of step {chosen.step} in memory"
        self._fill(name, lambda: images, chosen, model, optimizer, scheduler)
        path = self._staging.directory.path if self._staging and self._staging.directory else Path()
        return Resume(chosen.step, chosen.generation, images.world_size, path, images.extra, "memory")

    def _fill(
        self,
        name: str,
        open_source: Callable[[], Source],
        of: CheckpointId,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None,
    ) -> None:
        nested = nested_state(model, optimizer)
        ready: list[tuple[Source, Filling]] = []

        def prepare() -> None:
            source = open_source()
            try:
                ready.append((source, Filling(nested, source)))
            except ValueError as error:
                raise CheckpointError(f"{name} does not fit this model and optimizer: {error}") from error
            if scheduler is not None and not source.has_value(SCHEDULER):
                raise CheckpointError(
                    f"{name} was saved without a scheduler; resume without one, or from another checkpoint"
                )

        from_every_rank(prepare, self._group)  # no rank changes anything unless all can
        ((source, filling),) = ready

        def fill() -> None:
            try:
                filling.copy()
                saved_schedule = source.value(SCHEDULER) if scheduler is not None else ""
            except OSError as error:
                raise CheckpointError(f"{name} cannot be read: {error.strerror or error}") from error
            apply_state(nested, model, optimizer)
            if scheduler is not None:
                scheduler.load_state_dict(unpacked(saved_schedule))
            key = f"{RANDOM}.{rank_and_world()[0]}"
            if source.has_value(key):
                restore_random_state(source.value(key))
            else:
                seed_newcomer(of.step, rank_and_world()[0])

        from_every_rank(fill, self._group)


class _Save:
    """One save under way. The fields after ``norm`` are its thread's until that has ended."""

    def __init__(self, staged: Staged, *, is_durable: bool, sample_log: SampleLog | None, norm: float | None) -> None:
        self.staged = staged
        self.is_durable = is_durable
        self.sample_log = sample_log
        self.norm = norm
        self.thread = threading.Thread()
        self.path: Path | str | None = None
        self.error: CheckpointError | None = None


def _open_store(directory: str | os.PathLike[str], options: Mapping[str, Any]) -> CheckpointStore:
    address = os.fspath(directory)
    if "://" not in address:
        return CheckpointDirectory(address)
    if address.startswith("file://") and not options:
        return CheckpointDirectory(address.removeprefix("file://"))
    from elastipod.checkpoints.bucket import CheckpointBucket

    return CheckpointBucket(address, options)


def _plain(extra: Mapping[str, Any]) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(json.dumps(dict(extra)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"extra must hold JSON values only (numbers, texts, lists, dictionaries): {error}"
        ) from error
    return values
