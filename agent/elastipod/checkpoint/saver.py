"""What is done with a copy of the state, in a thread, while training goes on: memory first, then durable storage."""

from __future__ import annotations

import errno
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastipod.checkpoint.agent_report import tell_agent
from elastipod.checkpoint.communicator import Exchange, RanksLost
from elastipod.checkpoint.dcp_format import METADATA, file_name, write_metadata, write_part
from elastipod.checkpoint.drain import watch
from elastipod.checkpoint.staging import Staged, Staging
from elastipod.checkpoint.store import CheckpointId, CheckpointStore, FileRecord, Manifest
from elastipod.errors import CheckpointError, FencedError
from elastipod.ranks import rank_and_world

if TYPE_CHECKING:
    from elastipod.sample_log import SampleLog

log = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Save:
    """One save under way. ``path`` and ``error`` are its thread's until that has ended.

    is_kept_in_memory: on all ranks; known once ``has_settled``. is_given_up: the process is to end and waits no more for it.
    """

    def __init__(self, staged: Staged, *, is_durable: bool, sample_log: SampleLog | None, norm: float | None) -> None:
        self.staged = staged
        self.is_durable = is_durable
        self.sample_log = sample_log
        self.norm = norm
        self.thread = threading.Thread()
        self.path: Path | str | None = None
        self.error: CheckpointError | None = None
        self.is_kept_in_memory = False
        self.has_settled = threading.Event()
        self.is_given_up = False

    def check_given_up(self) -> None:
        """Raise CheckpointError when the process waits no more for this save."""
        if self.is_given_up:
            raise CheckpointError("the process ends and does not wait for it")


class Saver:
    """Carries out one generation's saves, one at a time."""

    def __init__(
        self,
        directory: CheckpointStore,
        staging: Staging,
        exchange: Exchange,
        *,
        keep: int,
        keep_every: int | None,
    ) -> None:
        self._directory, self._staging, self._exchange = directory, staging, exchange
        self._keep, self._keep_every = keep, keep_every
        self.damaged: set[CheckpointId] = set()  # what the last load passed over; the next save deletes it

    def start(self, save: Save) -> None:
        """Begin; `Save.thread` ends when the save has."""
        name = f"elastipod-save-{save.staged.id.step}"
        # Daemon: a process that failed ends at once, and one that leaves in order waits for what `watch` has noted.
        save.thread = threading.Thread(target=self._run, args=(save,), name=name, daemon=True)
        watch(save)
        save.thread.start()

    def _run(self, save: Save) -> None:
        step, rank = save.staged.id.step, rank_and_world()[0]
        try:
            self._carry_out(save)
        except CheckpointError as error:
            save.error = error
        except Exception as error:  # the others must not wait for what does not come
            save.error = CheckpointError(f"the checkpoint of step {step} could not be finished: {error}")
            self._exchange.leave(str(error))
        finally:
            save.has_settled.set()
        if save.error is not None and (rank == 0 or isinstance(save.error, RanksLost)):  # rank 0 may be the lost one
            log.warning("step %d is not saved: %s", step, save.error)

    def _carry_out(self, save: Save) -> None:
        target = save.staged.id
        if save.sample_log is not None:
            self._exchange.every_rank(save.sample_log.sync)
        self._keep_in_memory(save)
        save.has_settled.set()
        if save.is_durable:
            begun = self._exchange.rank_zero(lambda: self._begin(target))
            if begun is not None:
                self._write(save, begun)
            self._staging.note_durable(target)
            save.path = self._directory.location(target)
            tell_agent(target.step, str(save.path))
        if save.sample_log is not None and save.is_durable:
            sample_log = save.sample_log
            self._exchange.every_rank(lambda: sample_log.saved(target.step, save.norm))

    def _keep_in_memory(self, save: Save) -> None:
        target = save.staged.id

        def check_fence() -> None:
            self._exchange.rank_zero(lambda: self._directory.check_fence(target.generation))

        problem = self._staging.keep_in_memory(save.staged, check_fence, wants_durable=save.is_durable)
        if problem is None:
            save.is_kept_in_memory = self._staging.directory is not None
            return
        if not save.is_durable:
            raise CheckpointError(f"it cannot be kept in memory: {problem}")
        if rank_and_world()[0] == 0:
            log.warning("step %d goes to durable storage alone, it cannot be kept in memory: %s", target.step, problem)

    def _begin(self, target: CheckpointId) -> str | None:
        try:
            return None if target in self._directory.complete() else str(self._directory.begin(target))
        except OSError as error:
            raise self._failed(target, error) from error

    def _write(self, save: Save, begun: str) -> None:
        staged = save.staged
        try:
            parts: list[dict[str, Any]] = []  # of all ranks, on rank 0, which alone needs them
            self._exchange.agree(lambda: self._write_part(save, begun), parts.extend)
            self._exchange.rank_zero(lambda: self._commit(staged, begun, parts))
        except (FencedError, RanksLost):  # what has begun stays: rank 0 may be committing it at this moment
            raise
        except CheckpointError:
            self._exchange.rank_zero(lambda: self._give_up(staged.id, begun))
            raise

    def _write_part(self, save: Save, begun: str) -> dict[str, Any]:
        staged, (rank, _) = save.staged, rank_and_world()
        try:
            with self._directory.create_file(begun, file_name(rank)) as file:
                record, chunks, values = write_part(
                    file, staged.tensors_to_write(), staged.values_to_write(), save.check_given_up
                )
        except OSError as error:
            raise self._failed(staged.id, error) from error
        return {"record": record.as_json(), "chunks": chunks, "values": values}

    def _commit(self, staged: Staged, begun: str, parts: list[dict[str, Any]]) -> None:
        try:
            with self._directory.create_file(begun, METADATA) as file:
                about = write_metadata(file, staged.plan, [(part["chunks"], part["values"]) for part in parts])
            files = {file_name(rank): FileRecord.from_json(part["record"]) for rank, part in enumerate(parts)}
            files[METADATA] = about
            self._directory.commit(begun, Manifest(staged.id, len(parts), files, staged.extra))
        except OSError as error:
            raise self._failed(staged.id, error) from error
        try:
            self._directory.prune(staged.id.generation, self._keep, self.damaged, keep_every=self._keep_every)
        except OSError as error:
            log.warning("old checkpoints in %s could not be deleted: %s", self._directory.name, error)
        self.damaged.clear()

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
