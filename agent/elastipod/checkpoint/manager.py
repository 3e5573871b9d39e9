"""Checkpoints of model, optimizer, schedule and random state that can be resumed on any number of ranks.

Training stands still only while the state is copied to host memory. From there a thread keeps it in memory (this node's
and, where a lost node would take something along, another's) and writes it to durable storage in the format of
torch.distributed.checkpoint. A checkpoint appears only when every rank has finished, is verified before a byte of it is
believed, and cannot be written by a generation that has been replaced. Plain modules, DDP, FSDP2 and HSDP work alike.
docs/design/checkpoints.md tells why.
"""

from __future__ import annotations

import json
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
from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.memory_directory import memory_root, open_memory_directory
from elastipod.checkpoint.resume import Resume as Resume
from elastipod.checkpoint.resumer import LiveObjects, Resumer
from elastipod.checkpoint.saver import Save, Saver
from elastipod.checkpoint.staging import Staging
from elastipod.checkpoint.store import CheckpointStore
from elastipod.checkpoint.training_state import Scheduler, TrainingState
from elastipod.collectives import rank_and_world
from elastipod.errors import CheckpointError, FencedError
from elastipod.local_worker import generation_from_env, job_from_env, run_id_from_env

if TYPE_CHECKING:
    from elastipod.audit.sample_log import SampleLog

log = logging.getLogger(__name__)


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
        self._store = _open_store(directory, storage_options or {})
        self._keep, self._keep_every = keep, keep_every
        self._wanted_generation = generation
        self._adopt = adopt
        self._memory_root = memory_root(memory, is_in_pod=bool(run_id_from_env()))
        self._running: _Running | None = None
        self._save: Save | None = None
        self._has_tried_to_load = False  # for a checkpoint to go on from
        self._unmap_threads: list[threading.Thread] = []  # that hold memory which the next save may need

    @property
    def generation(self) -> int:
        """Give this run's generation; the first use claims the directory for it. Raises FencedError, CheckpointError."""
        return self._run().generation

    def _run(self) -> _Running:
        if self._running is None:
            wanted = self._wanted_generation or generation_from_env()
            comm = Communicator()
            generation, identity = comm.training_broadcast(lambda: self._claim(wanted))
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
        """Write a checkpoint of ``step`` completed optimizer steps and give its path once it is complete and durable.

        extra: small JSON-able values of the whole job, the same on every rank. sample_log: is made durable before the
        checkpoint appears and notes it afterwards. A step that this generation saved before is not written again.
        Collective. Raises FencedError when a newer generation has taken over (nothing was committed, nothing deleted) and
        CheckpointError, on all ranks, when any rank fails; earlier checkpoints are as they were. Nothing needs to be
        removed by hand.

        In a drain whose time does not allow that, it returns when the step is in memory, which the next generation goes on
        from and writes to durable storage, and gives the folder there. Where memory does not hold it, durable storage is
        waited for as long as the agent lets the process live.
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
        with drain.checkpoint_call():
            self._start(step, model, optimizer, scheduler, extra, sample_log, None, is_durable=durable)

    def wait(self) -> Path | str | None:
        """Wait for the checkpoint that is being written and give the last one's path, None where it was kept in memory only.

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
        """Wait for what is being written, whatever comes of it, and let the memory go. What was kept in memory stays there.

        After a `save` that did not wait for durable storage there is nothing to wait for, and the memory goes with the process.
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
        """Close; but a failure does not wait for what is being written: whoever learns of it late restarts the job late."""
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
        """Load the freshest complete and intact checkpoint into the given objects; None when there is none at all.

        It may be in memory or in durable storage, and the world size may differ from the one that saved. A damaged one is
        passed over, with a warning, for the one before it. The random state of this rank is restored too; a rank whose
        is not there (it is new, or its node's memory was lost) gets one that follows from the step and its rank. What is
        being written is awaited first. Collective. Raises CheckpointError on all ranks when checkpoints exist but none can
        be used (starting over silently would throw the work away), when storage does not give the freshest at the moment or
        another version wrote it, and when it does not fit the model and optimizer: then nothing was changed.
        """
        with drain.checkpoint_call():
            run = self._run()  # claim first: from here on no former generation can commit
            self._has_tried_to_load = True
            if self._save is not None:
                self._save.thread.join()  # it speaks over the same connections
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

    # -- parts of it ---------------------------------------------------------------------------------------------

    def _claim(self, wanted: int | None) -> tuple[int, str]:
        number = self._store.claim(wanted, run_id_from_env(), job=job_from_env(), adopt=self._adopt)
        return number, self._store.identity()

    def _has_saved(self, step: int) -> bool:
        """Tell whether the last save is a durable one of this step, still under way or well ended; the same on every rank."""
        last = self._save
        if last is None or not self._is_last_save(step):
            return False
        last.thread.join()
        return self._run().comm.training_all_reduce(
            lambda: last.error is None, all
        )  # they may have lost touch at its very end

    def _is_last_save(self, step: int) -> bool:
        """Tell whether the last save is a durable one of this step, whatever comes of it; the same on every rank."""
        return self._save is not None and self._save.staged.id.step == step and self._save.is_durable

    def _drain_notices(self) -> list[drain.DrainNotice | None]:
        """Give the drain as each rank knows it."""

        def known() -> list[Any] | None:
            found = drain.current_drain()
            return [*found.as_json()] if found else None

        told = self._run().comm.training_all_reduce(known, lambda of_ranks: of_ranks)
        return [drain.DrainNotice(*each) if each else None for each in told]

    def _abandon_previous_in_short_drain(self) -> None:
        """In a drain with little time, have the last save end without being durable, where memory can hold the next one."""
        if self._save is None or not self._has_memory():
            return
        if any(each.left_s < drain.SHORT_DRAIN_S for each in self._drain_notices() if each):
            self._save.is_abandoned = True

    def _exits_with_memory(self) -> bool:
        """In a drain, tell whether to leave without waiting for durable storage any longer; the same on every rank."""
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
            lambda told: [*map(all, zip(*told, strict=True))],
        )
        if is_written or not is_kept:
            return False
        if rank_and_world()[0] == 0:
            log.info(
                "leaving with step %d in memory, for there is no time to wait for durable storage; who goes on from there writes it",
                save.staged.id.step,
            )
        self._abandon(save, "the job leaves")
        return True

    def _abandon(self, save: Save, why: str) -> None:
        """Wait no more for a save, here and where others wait for this rank."""
        save.is_abandoned = True
        self._run().comm.abort(why)

    def _write_resumed(self, resume: Resume, live: LiveObjects) -> None:
        """Begin to write to durable storage what a drain had no time for. Training goes on meanwhile."""
        try:
            self._start(
                resume.step, live.model, live.optimizer, live.scheduler, resume.extra, None, None, is_durable=True
            )
        except FencedError:
            raise
        except CheckpointError as error:
            log.warning("step %d stays in memory alone: %s", resume.step, error)

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
        _require_step(step)
        run = self._run()
        self._wait_for_previous()
        if self._save is None and not self._has_tried_to_load:
            self._warn_if_other_run_is_ahead(step)
        staged = run.staging.copy(
            lambda: TrainingState(model, optimizer, scheduler, rank_and_world()[0]),
            CheckpointId(step, run.generation),
            lambda: _plain(extra or {}),
        )
        self._save = Save(staged, is_durable=is_durable, sample_log=sample_log, norm=norm)
        run.saver.start(self._save)

    def _warn_if_other_run_is_ahead(self, step: int) -> None:
        """Warn a run that began anew where another one got further: a resume takes the newest step, whoever made it."""
        if rank_and_world()[0] != 0:
            return
        with suppress(OSError, CheckpointError):
            ahead = next((each for each in self._store.list_complete() if each.step >= step), None)
            if ahead is not None:
                log.warning(
                    "%s holds the checkpoint of step %d, from which this run did not go on: until %d saves of this run have taken its "
                    "place, a resume would go back to it; call load_latest first, or name another directory",
                    self._store.name, ahead.step, self._keep,
                )  # fmt: skip

    def _wait_for_previous(self) -> None:
        """Wait for the last save; storage trouble was told when it came and is capture_outcome again, but a fenced run ends here."""
        while self._unmap_threads:
            self._unmap_threads.pop().join()
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


@dataclass(frozen=True, slots=True)
class _Running:
    """What there is once the directory has been claimed."""

    generation: int
    comm: Communicator
    staging: Staging
    saver: Saver


def _open_store(directory: str | os.PathLike[str], options: Mapping[str, Any]) -> CheckpointStore:
    address = os.fspath(directory)
    if "://" not in address:
        return DirectoryStore(address)
    if address.startswith("file://") and not options:
        return DirectoryStore(address.removeprefix("file://"))
    from elastipod.checkpoint.bucket_store import BucketStore

    return BucketStore(address, options)


def _require_step(step: int) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(
            f"step is {step!r}; it is the number of completed optimizer steps, a whole number of at least 0"
        )


def _plain(extra: Mapping[str, Any]) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(json.dumps(dict(extra)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"extra must hold JSON values only (numbers, texts, lists, dictionaries): {error}"
        ) from error
    return values
