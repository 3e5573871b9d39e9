"""Save and resume model, optimizer, schedule and random state, on any number of ranks.

Training waits only while the state is copied to host memory. A thread then keeps the copy in memory, on this node and,
where the loss of a node would lose data, on another, and writes it to durable storage in the format of
torch.distributed.checkpoint. A checkpoint is committed only when every rank has finished, is verified before it is used,
and cannot be written by a generation that has been replaced. Plain modules, DDP, FSDP2 and HSDP are supported.
Design: docs/design/checkpoints.md.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from elastipod.audit.moments import optimizer_norm
from elastipod.checkpoint import drain
from elastipod.checkpoint.communicator import Communicator
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.memory_directory import memory_root, open_memory_directory
from elastipod.checkpoint.resume import Resume as Resume
from elastipod.checkpoint.resumer import LiveObjects, Resumer
from elastipod.checkpoint.save_arguments import open_store, plain_values, require_step
from elastipod.checkpoint.saver import Save, Saver
from elastipod.checkpoint.staging import Staging
from elastipod.checkpoint.training_state import Scheduler, TrainingState
from elastipod.errors import CheckpointError, FencedError
from elastipod.fsdp1 import refuse_fsdp1
from elastipod.json_records import decode, encode
from elastipod.local_worker import generation_from_env, job_from_env, run_id_from_env
from elastipod.rank_in_world import RankInWorld

if TYPE_CHECKING:
    from elastipod.audit.sample_log import SampleLog

log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves and resumes the training state in one directory that all ranks share.

    Every method is collective: all ranks of the default process group call it in the same order, from one thread. A single
    process needs no process group. Create a new manager after the process group was recreated.
    Models that are wrapped by FSDP1 are refused (FrameworkError).
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
        continues: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Store the arguments; nothing is read or written yet.

        directory: a path, or an address that fsspec understands such as s3://bucket/folder, with ``storage_options`` for it.
        keep: number of newest complete checkpoints to keep, at least 1. keep_every: checkpoints of steps that are a multiple of
        it are kept for good. generation: of this run; defaults to the agent's, and outside a pod to one more than the newest
        generation in the directory. memory: folder of a memory file system for memory checkpoints, False for none; defaults to
        ``ELASTIPOD_MEMORY_DIR``, else /dev/shm in a pod and none elsewhere. adopt: take over another job's directory.
        continues: the run has resumed without this directory, from memory, so newer checkpoints in it are its own.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least one checkpoint must stay")
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"keep_every is {keep_every}; it is a number of steps, at least 1")
        self._store = open_store(directory, storage_options or {})
        self._keep, self._keep_every = keep, keep_every
        self._wanted_generation = generation
        self._adopt = adopt
        self._memory_root = memory_root(memory, is_in_pod=bool(run_id_from_env()))
        self._running: _Running | None = None
        self._save: Save | None = None
        self._has_tried_to_load = continues  # else newer checkpoints may be another run's
        self._unmap_threads: list[threading.Thread] = []  # they hold memory that the next save may need

    @property
    def generation(self) -> int:
        """This run's generation. Raises CheckpointError before `claim`, `load_latest`, `save` or `save_async`."""
        if self._running is None:
            raise CheckpointError("the directory is not claimed yet; call claim() or load_latest() on all ranks first")
        return self._running.generation

    def claim(self) -> int:
        """Claim the directory for this run and return its generation; later calls return the same one.

        `load_latest`, `save` and `save_async` do it too. Collective. Raises FencedError when a newer generation has claimed
        the directory, and CheckpointError when it cannot be used.
        """
        return self._run().generation

    def _run(self) -> _Running:
        if self._running is None:
            wanted = self._wanted_generation or generation_from_env()
            comm = Communicator()
            generation, identity = comm.training_broadcast(lambda: self._claim_directory(wanted))
            images = open_memory_directory(self._memory_root, identity)
            has_memory = comm.training_all_reduce(lambda: images is not None, all)
            staging = Staging(images if has_memory else None, comm)
            saver = Saver(self._store, staging, comm, keep=self._keep, keep_every=self._keep_every)
            self._running = _Running(generation, comm, staging, saver)
        return self._running

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
        """Write a checkpoint of ``step`` completed optimizer steps and return its path once it is durable.

        extra: small JSON values of the whole job, the same on every rank. sample_log: is synced before the checkpoint is
        committed and records it afterwards. A step that this generation has already saved is not written again. Collective.
        Raises FencedError when a newer generation has taken over (nothing is committed or deleted), and CheckpointError on all
        ranks when any rank fails; earlier checkpoints are unchanged, and nothing needs to be cleaned up by hand.

        In a drain that is too short for durable storage, it returns as soon as the step is in memory, and returns the memory
        folder. The next generation resumes from there and writes the step to durable storage. If memory does not hold the step,
        it waits for durable storage as long as the agent lets the process live.
        """
        with drain.checkpoint_call():
            if self._is_last_save(step) and self._exits_with_memory():
                return self._memory_path()
            if not self._has_saved(step):
                self._abandon_previous_in_short_drain()
                norm = optimizer_norm(optimizer) if sample_log is not None else None
                self._start(step, model, optimizer, scheduler, extra, sample_log, norm, is_durable=True)
                if self._exits_with_memory():
                    return self._memory_path()
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
        """Start a checkpoint and return once the state is copied to host memory; training may continue at once.

        Arguments as for `save`. A previous save that is still being written is awaited first. durable: False keeps the
        checkpoint in memory only, which uses no storage and can be done more often. If storage fails (a full disk, for example),
        rank 0 logs one sentence, training continues, earlier checkpoints stay, and the next save tries again. End the training
        loop with `save`, or call `wait` before the process ends. Collective. Raises FencedError when a newer generation has
        taken over, and CheckpointError on all ranks when the state of any rank cannot be copied.
        """
        if durable and self._has_saved(step):
            return
        if not durable and not self._has_memory():
            log.warning("step %d is not saved: durable=False, and there is no memory for checkpoints", step)
            return
        with drain.checkpoint_call():
            self._start(step, model, optimizer, scheduler, extra, sample_log, None, is_durable=durable)

    def wait(self) -> Path | str | None:
        """Wait for the save in progress and return its path, or None if it was kept in memory only.

        Raises what `save` would raise.
        """
        if self._save is None:
            return None
        with drain.checkpoint_call():
            self._save.thread.join()
        if self._save.error is not None:
            raise self._save.error
        return self._save.path

    def close(self) -> None:
        """Wait for the save in progress, whatever its outcome, and release the memory. Memory checkpoints stay.

        After a `save` that did not wait for durable storage there is nothing to wait for; the memory is released with the process.
        """
        if self._save is not None:
            if self._save.is_abandoned and self._save.thread.is_alive():
                return
            with drain.checkpoint_call():
                self._save.thread.join()
        while self._unmap_threads:
            self._unmap_threads.pop().join()
        if self._running is not None:
            self._running.staging.close()
            self._running.comm.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close. After an exception, do not wait for the save in progress: the agent must learn of the failure at once."""
        if value is not None and self._save is not None and self._save.thread.is_alive():
            self._abandon(self._save, f"{type(value).__name__}: {value}")
        else:
            self.close()

    # -- load ----------------------------------------------------------------------------------------------------

    def load_latest(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None = None,
    ) -> Resume | None:
        """Load the newest complete and intact checkpoint into the given objects; return None when there is none.

        It may be in memory or in durable storage, and the world size may differ from that of the run that saved it. A damaged
        checkpoint is skipped, with a warning, for the one before it. The random state of this rank is restored too; a rank
        without one (it is new, or the memory of its node was lost) gets one derived from the step and its rank. A save in
        progress is awaited first. Collective. Raises CheckpointError on all ranks when checkpoints exist but none can be used,
        when storage cannot read the newest one at the moment or another version wrote it, and when it does not fit the model and
        optimizer; in the last case nothing was changed.
        """
        refuse_fsdp1(model)
        with drain.checkpoint_call():
            run = self._run()  # claim first: no older generation can commit afterwards
            self._has_tried_to_load = True
            if self._save is not None:
                self._save.thread.join()  # it uses the same connections
            live = LiveObjects(model, optimizer, scheduler)
            resumer = Resumer(self._store, run.staging, run.comm, run.generation, live)
            try:
                resume = resumer.resume()
            finally:
                run.saver.damaged = resumer.damaged
                self._unmap_threads += resumer.unmap_threads
            if resume is not None and resumer.needs_durable_write:
                self._write_resumed(resume, live)
            return resume

    # -- internals ---------------------------------------------------------------------------------------------

    def _claim_directory(self, wanted: int | None) -> tuple[int, str]:
        number = self._store.claim(wanted, run_id_from_env(), job=job_from_env(), adopt=self._adopt)
        return number, self._store.identity()

    def _has_saved(self, step: int) -> bool:
        """Return whether the last save is a durable one of this step, in progress or successful; the same on every rank."""
        last = self._save
        if last is None or not self._is_last_save(step):
            return False
        last.thread.join()
        return self._run().comm.training_all_reduce(
            lambda: last.error is None, all
        )  # ranks may have lost contact at its very end

    def _is_last_save(self, step: int) -> bool:
        """Return whether the last save is a durable one of this step, whatever its outcome; the same on every rank."""
        return self._save is not None and self._save.staged.id.step == step and self._save.is_durable

    def _drain_notices(self) -> list[drain.DrainNotice | None]:
        """Return the drain as each rank knows it, by rank."""

        def known() -> Any:
            found = drain.current_drain()
            return encode(found) if found else None

        answers = self._run().comm.training_all_reduce(known, lambda of_ranks: of_ranks)
        return [decode(drain.DrainNotice, each) if each else None for each in answers]

    def _abandon_previous_in_short_drain(self) -> None:
        """In a short drain, abandon the durable part of the last save, where memory can hold the next one."""
        if self._save is None or not self._has_memory():
            return
        if any(each.left_s < drain.SHORT_DRAIN_S for each in self._drain_notices() if each):
            self._save.is_abandoned = True

    def _exits_with_memory(self) -> bool:
        """In a drain, return whether to exit without waiting for durable storage any longer; the same on every rank."""
        run, save = self._run(), self._save
        assert save is not None
        notices = self._drain_notices()
        if not any(notices):
            return False
        save.memory_settled.wait()
        leaves = [each.leaves if each else None for each in notices]
        survives_drain = save.is_kept_in_memory and run.staging.survives_drain(save.staged.plan, leaves)
        save.thread.join(drain.storage_wait_s([each.left_s for each in notices if each], survives_drain=survives_drain))
        is_written, is_kept = run.comm.training_all_reduce(
            lambda: [not save.thread.is_alive(), save.is_kept_in_memory],
            lambda answers: [*map(all, zip(*answers, strict=True))],
        )
        if is_written or not is_kept:
            return False
        if RankInWorld.current().rank == 0:
            log.info(
                "exiting with step %d in memory: there is no time to wait for durable storage; the next generation writes it",
                save.staged.id.step,
            )
        self._abandon(save, "the job leaves")
        return True

    def _abandon(self, save: Save, why: str) -> None:
        """Stop waiting for a save, on this rank and on ranks that wait for this one."""
        save.is_abandoned = True
        self._run().comm.abort(why)

    def _write_resumed(self, resume: Resume, live: LiveObjects) -> None:
        """Start writing to durable storage what a drain had no time to write. Training continues meanwhile."""
        try:
            self._start(
                resume.step, live.model, live.optimizer, live.scheduler, resume.extra, None, None, is_durable=True
            )
        except FencedError:
            raise
        except CheckpointError as error:
            log.warning("step %d stays in memory only: %s", resume.step, error)

    def _memory_path(self) -> Path:
        directory = self._run().staging.directory
        assert directory is not None
        return directory.path

    def _has_memory(self) -> bool:
        return self._run().staging.directory is not None

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
        require_step(step)
        refuse_fsdp1(model)
        run = self._run()
        self._wait_for_previous()
        if self._save is None and not self._has_tried_to_load:
            self._warn_if_other_run_is_ahead(step)
        staged = run.staging.copy(
            lambda: TrainingState(model, optimizer, scheduler, RankInWorld.current().rank),
            CheckpointId(step, run.generation),
            lambda: plain_values(extra or {}),
        )
        self._save = Save(staged, is_durable=is_durable, sample_log=sample_log, norm=norm)
        run.saver.start(self._save)

    def _warn_if_other_run_is_ahead(self, step: int) -> None:
        """Warn a run that started from the beginning where another run got further: a resume takes the newest step of any run."""
        if RankInWorld.current().rank != 0:
            return
        with suppress(OSError, CheckpointError):
            ahead = next((each for each in self._store.list_complete() if each.step >= step), None)
            if ahead is not None:
                log.warning(
                    "%s holds the checkpoint of step %d, which this run did not resume from: until %d saves of this run have replaced "
                    "it, a resume would return to it; call load_latest first, or name another directory",
                    self._store.name, ahead.step, self._keep,
                )  # fmt: skip

    def _wait_for_previous(self) -> None:
        """Wait for the last save. Its storage errors were logged and the next save retries; a fenced run ends here."""
        while self._unmap_threads:
            self._unmap_threads.pop().join()
        if self._save is None:
            return
        if self._save.thread.is_alive():
            began = time.monotonic()
            self._save.thread.join()
            if RankInWorld.current().rank == 0:
                step, waited = self._save.staged.id.step, time.monotonic() - began
                log.info("training waited %.1f s for the checkpoint of step %d; save less often", waited, step)
        if isinstance(self._save.error, FencedError):
            raise self._save.error


@dataclass(frozen=True, slots=True)
class _Running:
    """The parts that exist once the directory has been claimed."""

    generation: int
    comm: Communicator
    staging: Staging
    saver: Saver
