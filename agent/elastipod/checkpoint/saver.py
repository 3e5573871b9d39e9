"""Carrying out a save in a thread while training continues: memory first, then durable storage."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastipod.checkpoint.agent_report import report_checkpoint
from elastipod.checkpoint.communicator import Communicator, RanksLost
from elastipod.checkpoint.dcp_format import METADATA, rank_file_name, write_metadata, write_rank_file
from elastipod.checkpoint.manifest import CheckpointId, FileRecord, Manifest
from elastipod.checkpoint.process_exit import wait_at_exit
from elastipod.checkpoint.staged_state import StagedState
from elastipod.checkpoint.staging import Staging
from elastipod.checkpoint.store import FULL, CheckpointStore
from elastipod.errors import CheckpointError, FencedError
from elastipod.json_records import decode, encode
from elastipod.rank_in_world import RankInWorld

if TYPE_CHECKING:
    from elastipod.audit.sample_log import SampleLog

log = logging.getLogger(__name__)


class Save:
    """One save in progress. ``path`` and ``error`` belong to its thread until that has ended.

    is_kept_in_memory: whether all ranks have it in memory; memory_s: how long that took, in seconds; both valid once
    ``memory_settled``. goes_on: to durable storage;
    set once it is known whether the process exits with what is in memory. is_abandoned: the process exits and does not wait for it.
    """

    def __init__(self, staged: StagedState, *, is_durable: bool, sample_log: SampleLog | None) -> None:
        self.staged = staged
        self.is_durable = is_durable
        self.sample_log = sample_log
        self.norm: float | None = None
        self.norm_of_moments: Callable[[], float | None] = lambda: None
        self.goes_on: Future[bool] = Future()
        self.thread = threading.Thread()
        self.path: Path | str | None = None
        self.error: CheckpointError | None = None
        self.is_kept_in_memory = False
        self.memory_settled = threading.Event()
        self.memory_s = 0.0
        self._began = time.monotonic()
        self.is_abandoned = False

    def go_on(self, *, to_storage: bool = True) -> None:
        """Let it write to durable storage, or end in memory; the first word counts. While the state is what was staged."""
        if not self.goes_on.done():
            self.norm = self.norm_of_moments() if to_storage else None
            self.goes_on.set_result(to_storage)

    def settle_memory(self) -> None:
        """Memory holds the step, or does not and will not."""
        if not self.memory_settled.is_set():
            self.memory_s = time.monotonic() - self._began
            self.memory_settled.set()

    def check_abandoned(self) -> None:
        """Raise CheckpointError when the process no longer waits for this save."""
        if self.is_abandoned:
            raise CheckpointError("the process exits and does not wait for it")


def await_previous(save: Save) -> None:
    """Wait for a save before the next one. Its storage errors were logged and the next one retries; a fenced run ends here.

    Raises FencedError.
    """
    if save.thread.is_alive():
        began = time.monotonic()
        save.thread.join()
        if RankInWorld.current().rank == 0:
            step, waited = save.staged.id.step, time.monotonic() - began
            log.info("training waited %.1f s for the checkpoint of step %d; save less often", waited, step)
    if isinstance(save.error, FencedError):
        raise save.error


class Saver:
    """Carries out the saves of one generation, one at a time."""

    def __init__(
        self, directory: CheckpointStore, staging: Staging, comm: Communicator, *, keep: int, keep_every: int | None
    ) -> None:
        self._store, self._staging, self._comm = directory, staging, comm
        self._keep, self._keep_every = keep, keep_every
        self.damaged: set[CheckpointId] = set()  # skipped by the last load; the next save deletes them
        self._loaded_step = 0
        self._left_behind: set[CheckpointId] = set()  # durable ones of later steps than the loaded one

    def note_loaded(self, step: int, durable: Iterable[CheckpointId]) -> None:
        """Record the step that the run goes on from, and the checkpoints that were in durable storage then."""
        self._loaded_step = step
        self._left_behind = {each for each in durable if each.step > step}

    def start(self, save: Save) -> None:
        """Start the save; `Save.thread` ends with it."""
        name = f"elastipod-save-{save.staged.id.step}"
        # A daemon: a failed process ends at once; one that exits in order waits for it (`wait_at_exit`).
        save.thread = threading.Thread(target=self._run, args=(save,), name=name, daemon=True)
        wait_at_exit(save)
        save.thread.start()

    def _run(self, save: Save) -> None:
        step, rank = save.staged.id.step, RankInWorld.current().rank
        try:
            self._carry_out(save)
        except CheckpointError as error:
            save.error = error
        except Exception as error:  # other ranks must not wait for this one
            save.error = CheckpointError(f"the checkpoint of step {step} could not be finished: {error}")
            self._comm.abort(str(error))
        finally:
            save.settle_memory()
        if save.error is not None and (rank == 0 or isinstance(save.error, RanksLost)):  # rank 0 may be lost
            log.warning("step %d is not saved: %s", step, save.error)

    def _carry_out(self, save: Save) -> None:
        target = save.staged.id
        if save.sample_log is not None:
            self._comm.on_every_rank(save.sample_log.sync)
        self._keep_in_memory(save)
        save.settle_memory()
        if not save.goes_on.result():
            return
        if save.is_durable:
            draft = self._comm.broadcast(lambda: self._begin(target))
            if draft is not None:
                self._write(save, draft)
            self._staging.note_durable(target)
            save.path = self._store.location(target)
            report_checkpoint(target.step, str(save.path))
        if save.sample_log is not None and save.is_durable:
            sample_log = save.sample_log
            self._comm.on_every_rank(lambda: sample_log.saved(target.step, save.norm))

    def _keep_in_memory(self, save: Save) -> None:
        target = save.staged.id

        def check_fence() -> None:
            self._comm.broadcast(lambda: self._store.check_fence(target.generation))

        problem = self._staging.keep_in_memory(save.staged, check_fence, wants_durable=save.is_durable)
        if problem is None:
            save.is_kept_in_memory = self._staging.directory is not None
            return
        if not save.is_durable:
            raise CheckpointError(f"it cannot be kept in memory: {problem}")
        if RankInWorld.current().rank == 0:
            log.warning(
                "step %d goes to durable storage only, because it cannot be kept in memory: %s", target.step, problem
            )

    def _begin(self, target: CheckpointId) -> str | None:
        """Return a new draft, None if this generation has saved the same state already. Raises CheckpointError."""
        try:
            return None if self._is_saved(target) else str(self._store.begin(target))
        except OSError as error:
            raise self._failed(target, error) from error

    def _is_saved(self, target: CheckpointId) -> bool:
        """Return whether this generation has saved the same state. A damaged checkpoint of the step makes room."""
        if target not in self._store.list_complete():
            return False
        if target in self.damaged:
            self._store.delete_damaged(target, target.generation)
            return False
        if target in self._left_behind:
            raise CheckpointError(
                f"{self._store.location(target)} was saved before this run went back to step {self._loaded_step}, and holds other "
                f"weights; delete the checkpoints after step {self._loaded_step}, or save to another directory"
            )
        return True

    def _write(self, save: Save, draft: str) -> None:
        staged = save.staged
        try:
            parts: list[dict[str, Any]] = []  # of all ranks; filled on rank 0 only
            self._comm.all_reduce(lambda: self._write_rank_file(save, draft), parts.extend)
            self._comm.broadcast(lambda: self._commit(staged, draft, parts))
        except (FencedError, RanksLost):  # keep the draft: rank 0 may be committing it
            raise
        except CheckpointError:
            self._comm.broadcast(lambda: self._abandon(staged.id, draft))
            raise

    def _write_rank_file(self, save: Save, draft: str) -> dict[str, Any]:
        staged, rank = save.staged, RankInWorld.current().rank
        try:
            with self._store.create_file(draft, rank_file_name(rank), staged.bytes_to_write()) as file:
                record, chunks, values = write_rank_file(
                    file, staged.tensors_to_write(), staged.values_to_write(), save.check_abandoned
                )
        except OSError as error:
            raise self._failed(staged.id, error) from error
        return {"record": encode(record), "chunks": chunks, "values": values}

    def _commit(self, staged: StagedState, draft: str, parts: list[dict[str, Any]]) -> None:
        try:
            with self._store.create_file(draft, METADATA) as file:
                about = write_metadata(file, staged.plan, [(part["chunks"], part["values"]) for part in parts])
            files = {rank_file_name(rank): decode(FileRecord, part["record"]) for rank, part in enumerate(parts)}
            files[METADATA] = about
            self._store.commit(draft, Manifest(staged.id, len(parts), files, staged.extra))
        except OSError as error:
            raise self._failed(staged.id, error) from error
        for not_this in (self.damaged, self._left_behind):  # one of the same name had made room
            not_this.discard(staged.id)
        try:
            self._store.prune(
                staged.id.generation, self._keep, self.damaged, keep_every=self._keep_every, committed=staged.id
            )
        except OSError as error:
            log.warning("old checkpoints in %s could not be deleted: %s", self._store.name, error)
        self.damaged.clear()

    def _failed(self, target: CheckpointId, error: OSError) -> CheckpointError:
        what = f"cannot write the checkpoint of step {target.step} in {self._store.name}: {error.strerror or error}"
        if error.errno in FULL:
            what += (
                "; make room there or keep fewer, the earlier checkpoints are untouched and the next save tries again"
            )
        return CheckpointError(what)

    def _abandon(self, target: CheckpointId, draft: str) -> None:
        self._store.check_fence(target.generation)  # a successor may have deleted our draft
        self._store.discard(draft)
