"""Save and resume models, optimizers, schedules and random state, on any number of ranks.

Training waits only while the state is copied to host memory. A thread then keeps the copy in memory, on this node and,
where the loss of a node would lose data, on another, and writes it to durable storage in the format of
torch.distributed.checkpoint. A checkpoint is committed only when every rank has finished, is verified before it is used,
and cannot be written by a generation that has been replaced. Plain modules, DDP, FSDP2 and HSDP are supported, and pipelines of them.
Design: docs/design/checkpoints.md.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from elastipod.checkpoint import drain
from elastipod.checkpoint.drain_exit import exits_with_memory, is_given_up_for_newer
from elastipod.checkpoint.live_objects import (
    LiveObjects,
    ModelOrModels,
    OptimizerOrOptimizers,
    SchedulerOrSchedulers,
    Stateful,
)
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.memory_directory import memory_root
from elastipod.checkpoint.other_runs import warn_if_other_run_is_ahead
from elastipod.checkpoint.pipeline_stages import PipelineStage
from elastipod.checkpoint.resume import Resume as Resume
from elastipod.checkpoint.resumed_state import ResumedState
from elastipod.checkpoint.running import ManagerOptions, Running, load_weights
from elastipod.checkpoint.save_arguments import check_keep, norm_of_moments, open_store, plain_values, require_step
from elastipod.checkpoint.saver import Save, await_previous
from elastipod.checkpoint.training_state import TrainingState
from elastipod.errors import CheckpointError, FencedError
from elastipod.local_worker import run_id_from_env
from elastipod.process_restarts import tell_of_process_restarts
from elastipod.rank_in_world import RankInWorld
from elastipod.uncaught import note_exit_status

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

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
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Store the arguments; nothing is read or written yet.

        directory: a path, or an address that fsspec understands such as s3://bucket/folder, with ``storage_options`` for it.
        keep: number of newest complete checkpoints to keep, at least 1. keep_every: checkpoints of steps that are a multiple of
        it are kept for good. generation: of this run; defaults to the agent's, and outside a pod to one more than the newest
        generation in the directory. memory: folder of a memory file system for memory checkpoints, False for none; defaults to
        ``ELASTIPOD_MEMORY_DIR``, else /dev/shm in a pod and none elsewhere. adopt: take over another job's directory.
        continues: the run has resumed without this directory, from memory, so newer checkpoints in it are its own.
        mesh: needed for pipeline stages only, whose ranks hold different tensors: as `build_mesh` makes it, or any mesh with a dimension
        named `pp`. Other dimensions need nothing.
        """
        check_keep(keep, keep_every)
        self._stage = PipelineStage.of(mesh)
        self._store = open_store(directory, storage_options or {})
        root = memory_root(memory, is_in_pod=bool(run_id_from_env()))
        self._options = ManagerOptions(keep, keep_every, generation, root, adopt)
        self._running: Running | None = None
        self._save: Save | None = None
        self._has_loaded_since = False  # since the last save, whose step may now have another state
        self._has_tried_to_load = continues  # else newer checkpoints may be another run's
        self._unmap_threads: list[threading.Thread] = []  # they hold memory that the next save may need
        self.writes_resumed = True  # what a load finds in memory only, though it was to be durable
        self.uses_default_group = False  # of torch, for what the training thread says to the others

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

    def _run(self) -> Running:
        if self._running is None:
            self._running = Running.claim(self._store, self._options, on_default_group=self.uses_default_group)
        return self._running

    # -- save ----------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        *,
        model: ModelOrModels,
        optimizer: OptimizerOrOptimizers,
        scheduler: SchedulerOrSchedulers = None,
        stateful: Mapping[str, Stateful] | None = None,
        extra: Mapping[str, Any] | None = None,
        sample_log: SampleLog | None = None,
    ) -> Path | str:
        """Write a checkpoint of ``step`` completed optimizer steps and return its path once it is durable.

        model, optimizer, scheduler: one, a sequence, or a mapping by name, which must have the same names when they are loaded. Each
        parameter belongs to one optimizer. stateful: other members by name, whose state is the same on every rank.
        extra: small JSON values of the whole job, the same on every rank. sample_log: is synced before the checkpoint is
        committed and records it afterwards; where only some ranks pass one, all raise CheckpointError. A step that this
        generation has already saved is not written again; after a `load` of an earlier step it is refused. Collective.
        Raises FencedError when a newer generation has taken over (nothing is committed or deleted), and CheckpointError on all
        ranks when any rank fails; earlier checkpoints are unchanged, and nothing needs to be cleaned up by hand.

        In a drain that is too short for durable storage, it returns the memory folder as soon as the step is in memory; the next
        generation resumes from there and writes the step. If memory does not hold it, it waits as long as the process may live.
        """
        require_step(step)
        with drain.checkpoint_call():
            self._run().agree_on_step(step)
            if self._is_last_save(step) and self._exits_with_memory():
                return self._run().memory_path()
            if not self._has_saved(step):
                self._abandon_previous_in_drain()
                live = LiveObjects.of(model, optimizer, scheduler, stateful, self._stage)
                save = self._start(step, live, extra, sample_log, is_durable=True)
                try:
                    if sample_log is not None:
                        save.norm_of_moments = norm_of_moments(live)
                    if self._exits_with_memory():
                        return self._run().memory_path()
                finally:
                    save.go_on()
            path = self.wait()
        assert path is not None
        return path

    def save_async(
        self,
        step: int,
        *,
        model: ModelOrModels,
        optimizer: OptimizerOrOptimizers,
        scheduler: SchedulerOrSchedulers = None,
        stateful: Mapping[str, Stateful] | None = None,
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
        require_step(step)
        with drain.checkpoint_call():
            self._run().agree_on_step(step)
            if durable and self._has_saved(step):
                return
            if not durable and not self._run().has_memory:
                log.warning("step %d is not saved: durable=False, and there is no memory for checkpoints", step)
                return
            live = LiveObjects.of(model, optimizer, scheduler, stateful, self._stage)
            self._start(step, live, extra, sample_log, is_durable=durable).go_on()

    def wait(self) -> Path | str | None:
        """Wait for the save in progress and return its path, or None if it was kept in memory only.

        Raises what `save` would raise.
        """
        if self._save is None:
            return None
        with drain.checkpoint_call():
            self._run().await_save(self._save)
        if self._save.failure is not None:
            raise self._save.failure
        return self._save.path

    def is_saving(self, wait_s: float) -> bool:
        """Return whether this rank still writes the last save, after waiting for it at most ``wait_s`` seconds. Not collective.

        A save that was abandoned, or whose storage has not answered for half an hour, is not awaited and does not count.
        """
        if self._save is None or not self._save.is_awaited:
            return False
        self._save.go_on()
        self._save.thread.join(wait_s)
        self._save.give_up_if_silent()
        return self._save.is_awaited

    def close(self) -> None:
        """Wait for the save in progress, whatever its outcome, and release the memory. Memory checkpoints stay.

        After a `save` that did not wait for durable storage there is nothing to wait for; the memory is released with the process.
        """
        if self._save is not None:
            if self._save.is_abandoned and self._save.thread.is_alive():
                return
            with drain.checkpoint_call():
                self._run().await_save(self._save)
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
        """Close. After an exception, do not wait for the save in progress: the agent must learn of the failure at once.

        A script that ends by `sys.exit`, whatever its code, ends in order, as it does outside of ``with``.
        """
        if isinstance(value, SystemExit):
            note_exit_status(value.code)
            self.close()
        elif value is not None and self._save is not None and self._save.thread.is_alive():
            self._abandon(self._save, f"{type(value).__name__}: {value}")
        else:
            self.close()

    # -- load ----------------------------------------------------------------------------------------------------

    def load_latest(
        self,
        *,
        model: ModelOrModels,
        optimizer: OptimizerOrOptimizers,
        scheduler: SchedulerOrSchedulers = None,
        stateful: Mapping[str, Stateful] | None = None,
        strict: bool = True,
    ) -> Resume | None:
        """Load the newest complete and intact checkpoint into the given objects; return None when there is none.

        Objects as for `save`. It may be in memory or in durable storage, and of another world size. A damaged checkpoint is skipped,
        with a warning, for the one before it. The random state of this rank is restored too; a rank without one (it is new, or the
        memory of its node was lost) gets one derived from the step and its rank. A save in progress is awaited first. strict: False
        loads what both sides have, in equal shapes; a warning and `Resume.missing` and ``unexpected`` name the rest.
        Collective. Raises CheckpointError on all ranks when checkpoints exist but none can be used, when storage cannot read the
        newest at the moment or another version wrote it, and when it does not fit; in the last case nothing was changed.
        """
        self._has_tried_to_load = True
        return self._load(LiveObjects.of(model, optimizer, scheduler, stateful, self._stage), None, strict=strict)

    def load_on_holders(
        self, *, model: ModelOrModels, optimizer: OptimizerOrOptimizers, scheduler: SchedulerOrSchedulers = None
    ) -> Resume | None:
        """As `load_latest`, but for a caller who can fill ranks from others: only those in the result's ``holders`` have loaded it.

        The objects of other ranks may be as they were, or filled in part. They are the same on every rank, as with DDP. What a drain
        had no time to write to durable storage is not written then: not all ranks hold it yet.
        """
        self._has_tried_to_load = True
        live = LiveObjects.of(model, optimizer, scheduler, None, self._stage)
        return self._load(live, None, strict=True, on_holders=True)

    def load(
        self,
        step: int,
        *,
        model: ModelOrModels,
        optimizer: OptimizerOrOptimizers,
        scheduler: SchedulerOrSchedulers = None,
        stateful: Mapping[str, Stateful] | None = None,
        strict: bool = True,
    ) -> Resume:
        """Load the checkpoint of one step, as `load_latest` does with the newest.

        Newer durable checkpoints stay, and `load_latest` of a later run takes the newest: delete them, or save to another directory,
        to go on from here. Collective. Raises CheckpointError as `load_latest` does, and when there is no checkpoint of this step.
        """
        require_step(step)
        resume = self._load(LiveObjects.of(model, optimizer, scheduler, stateful, self._stage), step, strict=strict)
        assert resume is not None
        return resume

    def load_weights(self, *, model: ModelOrModels, step: int | None = None, strict: bool = True) -> Resume | None:
        """Load weights and buffers only, of the newest durable checkpoint or that of ``step``; return None when there is none.

        For evaluation and fine-tuning. It claims nothing, so a job that trains in the directory is not disturbed, and leaves
        random states alone. strict: as for `load_latest`. Collective. Raises CheckpointError as `load` does.
        """
        with drain.checkpoint_call():
            if self._save is not None:
                self._run().await_save(self._save)  # it uses the same connections
            comm = self._running.comm if self._running else None
            return load_weights(self._store, comm, LiveObjects.of_models(model, self._stage), step, strict=strict)

    # -- internals ---------------------------------------------------------------------------------------------

    def _load(self, live: LiveObjects, step: int | None, *, strict: bool, on_holders: bool = False) -> Resume | None:
        with drain.checkpoint_call():
            run = self._run()  # claim first: no older generation can commit afterwards
            if self._save is not None:
                run.await_save(self._save)  # it uses the same connections
            self._has_loaded_since = True
            began = time.monotonic()
            resume, unwritten = run.load(
                live, self._unmap_threads, step, strict=strict, on_holders=on_holders, writes=self.writes_resumed
            )
            if unwritten is not None:
                self._write_resumed(unwritten, live, began)
            return resume

    def _has_saved(self, step: int) -> bool:
        """Return whether the last save is a durable one of this step, in progress or successful; the same on every rank."""
        save = self._save
        return save is not None and not save.is_abandoned and self._is_last_save(step) and self._run().succeeded(save)

    def _is_last_save(self, step: int) -> bool:
        """Return whether the last save is a durable one of this step and state, whatever its outcome; the same on every rank."""
        save = self._save
        return save is not None and not self._has_loaded_since and save.staged.id.step == step and save.is_durable

    def _abandon_previous_in_drain(self) -> None:
        """In a drain, abandon the durable part of the last save where that is of use for the next one."""
        if self._save is None:
            return
        run = self._run()
        if run.has_memory and is_given_up_for_newer(run.comm, run.staging, self._save):
            self._save.is_abandoned = True

    def _exits_with_memory(self) -> bool:
        """In a drain, return whether to exit without waiting for durable storage any longer; the same on every rank."""
        run, save = self._run(), self._save
        assert save is not None
        if not exits_with_memory(run.comm, run.staging, save):
            return False
        save.go_on(to_storage=False)
        if save.goes_on.result():  # it has begun to write, so other ranks may wait for this one
            self._abandon(save, "the job leaves")
        else:
            save.is_abandoned = True
        return True

    def _abandon(self, save: Save, why: str) -> None:
        """Stop waiting for a save, on this rank and on ranks that wait for this one."""
        save.is_abandoned = True
        save.comm.abort(why)

    def _write_resumed(self, resumed: ResumedState, live: LiveObjects, began: float) -> None:
        """Start writing to durable storage what a drain had no time to write. Training continues meanwhile.

        It is read from the images that were resumed. Where a part of it is on one node only, whose loss would lose it before storage has
        it, it is copied as any save is, to other nodes too. began: when it began to be loaded (monotonic).
        """
        if not resumed.plan.unreplicated_ranks():
            run = self._run()
            self._save = Save(resumed, run.comm, is_durable=True, began=began)
            self._has_loaded_since = False
            run.saver.start(self._save)
            return
        self._unmap_threads.append(resumed.images.close())
        try:
            self._start(resumed.id.step, live, resumed.extra, is_durable=True).go_on()
        except FencedError:
            raise
        except CheckpointError as error:
            log.warning("step %d stays in memory only: %s", resumed.id.step, error)

    def _start(
        self,
        step: int,
        live: LiveObjects,
        extra: Mapping[str, Any] | None,
        sample_log: SampleLog | None = None,
        *,
        is_durable: bool,
    ) -> Save:
        """Start a save, which writes to durable storage once `go_on` is called."""
        tell_of_process_restarts()
        run = self._run()
        self._wait_for_previous()
        if self._save is None and not self._has_tried_to_load:
            warn_if_other_run_is_ahead(self._store, step, self._options.keep)
        staged = run.staging.copy(
            lambda: TrainingState(live, RankInWorld.current().rank),
            CheckpointId(step, run.generation),
            lambda: plain_values(extra or {}),
            has_log=sample_log is not None,
        )
        self._save = Save(staged, run.comm, is_durable=is_durable, sample_log=sample_log)
        self._has_loaded_since = False
        run.saver.start(self._save)
        return self._save

    def _wait_for_previous(self) -> None:
        """Wait for the last save. Its storage errors were logged and the next save retries; a fenced run ends here."""
        while self._unmap_threads:
            self._unmap_threads.pop().join()
        if self._save is not None:
            await_previous(self._save, self._run().await_save)
