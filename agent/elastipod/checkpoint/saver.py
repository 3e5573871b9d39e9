"""Carrying out a save in a thread while training continues: memory first, then durable storage."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastipod.checkpoint import drain
from elastipod.checkpoint.agent_report import report_checkpoint
from elastipod.checkpoint.communicator import Communicator, RanksLost
from elastipod.checkpoint.dcp_format import METADATA, rank_file_name, write_metadata, write_rank_file
from elastipod.checkpoint.manifest import CheckpointId, FileRecord, Manifest
from elastipod.checkpoint.process_exit import wait_at_exit
from elastipod.checkpoint.resumed_state import ResumedState
from elastipod.checkpoint.staged_state import StagedState
from elastipod.checkpoint.staging import Staging
from elastipod.checkpoint.store import FULL, CheckpointStore
from elastipod.errors import CheckpointError, FencedError
from elastipod.json_records import decode, encode
from elastipod.local_worker import local_worker
from elastipod.rank_in_world import RankInWorld

if TYPE_CHECKING:
    from elastipod.audit.sample_log import SampleLog

log = logging.getLogger(__name__)

STORAGE_SILENCE_S = 1800.0  # no part of a file was written, and no other call ended: storage will not answer any more
_LOST_SILENCE_S = 60.0  # the same, once the other ranks have given the save up and may be waiting for this one
_ABANDONED_WAIT_S = 2.0  # for a save that nobody wants any more to notice
_LONG_WAIT_S = 1.0  # of the training, which its user ought to know of
_FIRST_STEP_S = 5.0  # for a script to report a step, which it need not
_FIRST_STEP_POLL_S = 0.1
_POLL_S = 1.0  # how often a rank that waits asks whether there is a drain


class Save:
    """One save in progress. ``path`` and ``error`` belong to its thread until that has ended.

    comm: the connections that its thread uses. is_kept_in_memory: whether all ranks have it in memory; memory_s: how long that took,
    in seconds; both valid once ``memory_settled``. goes_on: to durable storage;
    set once it is known whether the process exits with what is in memory. is_abandoned: the process exits and does not wait for it.
    given_up: why this rank waits no longer for its storage; None while it does. Its thread may hang for as long as the process lives.
    """

    def __init__(
        self,
        staged: StagedState | ResumedState,
        comm: Communicator,
        *,
        is_durable: bool,
        sample_log: SampleLog | None = None,
        began: float | None = None,
    ) -> None:
        """began: when the copying to memory began (monotonic), which `memory_s` counts from; None for now."""
        self.staged, self.comm = staged, comm
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
        self._began = time.monotonic() if began is None else began
        self.is_abandoned = False
        self.given_up: CheckpointError | None = None
        self.place = ""  # where it is written, for messages

    @property
    def failure(self) -> CheckpointError | None:
        """Why it failed, None if it did not, or has not yet."""
        return self.given_up or self.error

    @property
    def is_awaited(self) -> bool:
        """Whether it is still in progress and somebody waits for it."""
        return self.thread.is_alive() and self.is_wanted

    @property
    def is_wanted(self) -> bool:
        return not self.is_abandoned and self.given_up is None

    def go_on(self, *, to_storage: bool = True) -> None:
        """Let it write to durable storage, or end in memory; the first word counts. While the state is what was staged."""
        if not self.goes_on.done():
            self.norm = self.norm_of_moments() if to_storage else None
            with suppress(InvalidStateError):  # another thread was first
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
        if self.given_up is not None:
            raise CheckpointError(str(self.given_up))

    def begin_part(self) -> None:
        """Record that storage has taken all before this part. Raises CheckpointError when this rank or another has given the save up."""
        self.check_abandoned()
        if self.comm.has_lost_ranks:
            raise CheckpointError("the other ranks have given it up")
        self.comm.note_progress()

    def await_end(self) -> None:
        """Wait until it has ended; give it up where storage on this rank does not answer, or nobody wants it any more.

        The ranks wait for their own parts only: one that gives up breaks the connections, so that the saves of the others end.
        """
        self.go_on()
        has_told = False
        abandoned_until = time.monotonic() + _ABANDONED_WAIT_S if self.is_abandoned else None
        while self.thread.is_alive() and self.given_up is None:
            left_s = self._longest_silence_s() - self.comm.silent_s()
            if abandoned_until is not None:
                left_s = min(left_s, abandoned_until - time.monotonic())
            if left_s <= 0:
                self._give_up()
            else:
                self.thread.join(min(left_s, _POLL_S))
                has_told = has_told or self._tell_of_end_of_drain()

    def give_up_if_silent(self) -> None:
        """Give it up where storage on this rank does not answer any more; do not wait."""
        if self.is_awaited and self.comm.silent_s() >= self._longest_silence_s():
            self._give_up()

    def _longest_silence_s(self) -> float:
        return _LOST_SILENCE_S if self.comm.has_lost_ranks else STORAGE_SILENCE_S

    def _give_up(self) -> None:
        step = self.staged.id.step
        if self.is_abandoned:
            self.given_up = CheckpointError(f"the checkpoint of step {step} is given up for a newer one")
        else:
            self.given_up = CheckpointError(
                f"cannot write the checkpoint of step {step} in {self.place}: storage has not answered for "
                f"{self._longest_silence_s():g} s; the earlier checkpoints are untouched and the next save tries again"
            )
            log.warning("%s", self.given_up)
        self.comm.retire(str(self.given_up))
        self.settle_memory()

    def _tell_of_end_of_drain(self) -> bool:
        """Say, when the time of a drain is nearly over, what is lost; return whether that was said."""
        notice = drain.current_drain() if self.thread.is_alive() else None
        if notice is None or notice.left_s > drain.EXIT_MARGIN_S or RankInWorld.current().rank != 0:
            return False
        log.warning(
            "the time of the drain is nearly over, and %s has not taken the checkpoint of step %d yet; if it does not by then, the "
            "job resumes from the newest complete checkpoint",
            self.place,
            self.staged.id.step,
        )
        return True


def await_previous(save: Save, await_save: Callable[[Save], None] = Save.await_end) -> None:
    """Wait for a save before the next one. Its storage errors were logged and the next one retries; a fenced run ends here.

    await_save: `Running.await_save` where a next one follows. Raises FencedError.
    """
    was_under_way, began = save.is_awaited, time.monotonic()
    await_save(save)
    if was_under_way and save.given_up is None and RankInWorld.current().rank == 0:
        step, waited = save.staged.id.step, time.monotonic() - began
        level = logging.WARNING if waited >= _LONG_WAIT_S else logging.INFO
        log.log(level, "training waited %.1f s for the checkpoint of step %d; save less often", waited, step)
    if isinstance(save.error, FencedError):
        raise save.error


def _await_first_step(save: Save) -> None:
    """Let training make a step before storage is written, unless somebody waits for the save.

    The first step of a world is the slowest, and all ranks wait for it.
    """
    worker = local_worker()
    if worker is None:
        return save.go_on()
    before, deadline = worker.file.num_reports(worker.local_rank), time.monotonic() + _FIRST_STEP_S
    while worker.file.num_reports(worker.local_rank) == before and time.monotonic() < deadline and save.is_wanted:
        if wait([save.goes_on], timeout=_FIRST_STEP_POLL_S).done:
            return None
    return save.go_on()  # also if this rank wants it no longer: others may wait for its answer


class Saver:
    """Carries out the saves of one generation, one at a time."""

    def __init__(self, directory: CheckpointStore, staging: Staging, *, keep: int, keep_every: int | None) -> None:
        self._store, self._staging = directory, staging
        self._hanging: list[Save] = []  # were given up, and their threads may still be in a call of the store
        self._keep, self._keep_every = keep, keep_every
        self.damaged: set[CheckpointId] = set()  # skipped by the last load; the next save deletes them
        self._loaded_step = 0
        self._left_behind: set[CheckpointId] = set()  # durable ones of later steps than the loaded one

    def note_loaded(self, step: int, durable: Iterable[CheckpointId]) -> None:
        """Record the step that the run goes on from, and the checkpoints that were in durable storage then."""
        self._loaded_step = step
        self._left_behind = {each for each in durable if each.step > step}

    def note_given_up(self, save: Save) -> None:
        """Record a save whose thread may still write to its draft."""
        self._hanging = [each for each in self._hanging if each.thread.is_alive()] + [save]

    def start(self, save: Save) -> None:
        """Start the save; `Save.thread` ends with it."""
        save.place = self._store.name
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
            save.comm.abort(str(error))
        finally:
            save.settle_memory()
            if isinstance(save.staged, ResumedState):
                save.staged.close()
        is_told = rank == 0 or isinstance(save.error, RanksLost)  # rank 0 may be lost
        if save.error is not None and save.given_up is None and is_told:
            log.warning("step %d is not saved: %s", step, save.error)

    def _carry_out(self, save: Save) -> None:
        target = save.staged.id
        if save.sample_log is not None:
            save.comm.on_every_rank(save.sample_log.sync)
        self._keep_in_memory(save)
        save.settle_memory()
        if isinstance(save.staged, ResumedState):
            _await_first_step(save)
        if not save.goes_on.result():
            return
        if save.is_durable:
            draft = save.comm.broadcast(lambda: self._begin(save))
            if draft is not None:
                self._write(save, draft)
            self._staging.note_durable(target)
            if isinstance(save.staged, ResumedState):
                self._staging.note_written(save.staged)
            save.path = self._store.location(target)
            report_checkpoint(target.step, str(save.path))
        if save.sample_log is not None and save.is_durable:
            sample_log = save.sample_log
            save.comm.on_every_rank(lambda: sample_log.saved(target.step, save.norm))

    def _keep_in_memory(self, save: Save) -> None:
        target = save.staged.id

        def check_fence() -> None:
            save.comm.broadcast(lambda: self._store.check_fence(target.generation))

        if isinstance(save.staged, ResumedState):
            save.is_kept_in_memory = True  # it was read from there
            return
        problem = self._staging.keep_in_memory(save.staged, save.comm, check_fence, wants_durable=save.is_durable)
        if problem is None:
            save.is_kept_in_memory = self._staging.directory is not None
            return
        if not save.is_durable:
            raise CheckpointError(f"it cannot be kept in memory: {problem}")
        if RankInWorld.current().rank == 0:
            log.warning(
                "step %d goes to durable storage only, because it cannot be kept in memory: %s", target.step, problem
            )

    def _begin(self, save: Save) -> str | None:
        """Return a new draft, None if this generation has saved the same state already. Raises CheckpointError."""
        target = save.staged.id
        self._check_not_hanging(target)
        try:
            if self._is_saved(target):
                return None
            save.check_abandoned()
            return str(self._store.begin(target))
        except OSError as error:
            raise self._failed(target, error) from error

    def _check_not_hanging(self, target: CheckpointId) -> None:
        """Raise CheckpointError where a thread of this process may still write to the files of the same checkpoint."""
        if any(each.staged.id == target and each.thread.is_alive() for each in self._hanging):
            raise CheckpointError(
                f"cannot write the checkpoint of step {target.step} in {self._store.name}: storage has still not answered an earlier save "
                "of this step; save a later step, or start again when storage answers"
            )

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
            save.comm.all_reduce(lambda: self._write_rank_file(save, draft), parts.extend)
            save.comm.broadcast(lambda: self._commit(save, draft, parts))
        except (FencedError, RanksLost):  # keep the draft: rank 0 may be committing it
            raise
        except CheckpointError:
            save.comm.broadcast(lambda: self._abandon(staged.id, draft))
            raise

    def _write_rank_file(self, save: Save, draft: str) -> dict[str, Any]:
        """Write this rank's file and return what the metadata say of it; nothing where it has none to write."""
        staged, rank = save.staged, RankInWorld.current().rank
        self._check_not_hanging(staged.id)
        if not staged.plan.written_by(rank) and not staged.plan.values_of(rank):
            return {}
        try:
            with self._store.create_file(draft, rank_file_name(rank), staged.bytes_to_write()) as file:
                record, chunks, values = write_rank_file(
                    file, staged.tensors_to_write(), staged.values_to_write(), save.begin_part
                )
        except OSError as error:
            raise self._failed(staged.id, error) from error
        return {"record": encode(record), "chunks": chunks, "values": values}

    def _commit(self, save: Save, draft: str, parts: list[dict[str, Any]]) -> None:
        staged, written = save.staged, {rank: part for rank, part in enumerate(parts) if part}
        locations = {rank: (part["chunks"], part["values"]) for rank, part in written.items()}
        try:
            with self._store.create_file(draft, METADATA) as file:
                about = write_metadata(file, staged.plan, locations)
            files = {rank_file_name(rank): decode(FileRecord, part["record"]) for rank, part in written.items()}
            files[METADATA] = about
            save.begin_part()
            self._store.commit(draft, Manifest(staged.id, len(parts), files, staged.extra))
        except OSError as error:
            raise self._failed(staged.id, error) from error
        for not_this in (self.damaged, self._left_behind):  # one of the same name had made room
            not_this.discard(staged.id)
        if save.is_wanted:  # else deleting is left to a later one: this one is committed and must not fail any more
            self._prune(save)

    def _prune(self, save: Save) -> None:
        of, damaged = save.staged.id, self.damaged  # a load may put others there while storage hangs
        save.comm.note_progress()
        try:
            self._store.prune(
                of.generation,
                self._keep,
                damaged,
                keep_every=self._keep_every,
                committed=of,
                progress=save.comm.note_progress,
            )
        except OSError as error:
            log.warning("old checkpoints in %s could not be deleted: %s", self._store.name, error)
        damaged.clear()

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
