"""Where durable checkpoints are stored: names, claims of generations, pruning. No torch.

A checkpoint exists from the moment it is committed. Every generation writes a claim and cancels what older generations
are still writing, so a rank that lost contact with its job can neither overwrite the work of its successors nor add to
it (docs/design/contracts.md, 6). `CheckpointStore` holds what directories and object stores have in common.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from elastipod.checkpoint.manifest import (
    MANIFEST,
    CheckpointId,
    DamagedCheckpoint,
    FileRecord,
    Manifest,
    measure_stream,
)
from elastipod.errors import CheckpointError, FencedError

log = logging.getLogger(__name__)

CLAIMS = ".claims"
OWNER = f"{CLAIMS}/job"
IDENTITY = f"{CLAIMS}/id"
MAX_MANIFEST_BYTES = 1 << 30  # 33 bytes for each chunk

FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of storage that has no room

MAX_STEP = 10**10 - 1  # the digits of a step in COMPLETE
COMPLETE = re.compile(r"step-(\d{10})-gen-(\d{6})")
_CLAIM = re.compile(r"gen-(\d{6,})")
_RUN = re.compile(r"[A-Za-z0-9._-]{1,128}")

Progress = Callable[[], None]


def no_progress() -> None:
    """Nobody asks how it gets on."""


class CheckpointStore(ABC):
    """A place for checkpoints, as rank 0 of one generation reads and changes it. Any rank may read.

    name: of the place, for messages; it holds no credentials. Methods raise OSError when storage fails.
    """

    has_cheap_seeks = False  # whether random reads in a file cost next to nothing

    def __init__(self, name: str) -> None:
        self.name = name
        self._is_ours: dict[CheckpointId, bool] = {}
        self._torn: set[CheckpointId] = set()  # of those
        self._writers: dict[str, threading.Thread] = {}  # of drafts

    # -- what each kind of storage implements ---------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, target: CheckpointId) -> str | Path:
        """Create a draft, invisible to readers, in which a checkpoint is written; return its name. Raises FencedError."""

    @abstractmethod
    def create_file(self, draft: str | Path, name: str, size: int = 0) -> AbstractContextManager[BinaryIO]:
        """Open a new file in a draft; it is durable when the block ends. size: about how many bytes it will have. Any rank."""

    @abstractmethod
    def commit(self, draft: str | Path, manifest: Manifest) -> str | Path:
        """Make a written checkpoint visible, atomically. Raises FencedError, and CheckpointError when it cannot."""

    @abstractmethod
    def discard(self, draft: str | Path) -> None:
        """Delete a draft that will not be committed."""

    @abstractmethod
    def list_complete(self) -> list[CheckpointId]:
        """List the committed checkpoints, newest first."""

    @abstractmethod
    def open_file(self, of: CheckpointId, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a file of a complete checkpoint; it is seekable. Any rank."""

    def read_range(self, of: CheckpointId, name: str, start: int, length: int) -> bytes:
        """Return bytes of a file of a complete checkpoint, fewer where the file ends. Any rank, any thread."""
        with self.open_file(of, name) as file:
            file.seek(start)
            return file.read(length)

    @abstractmethod
    def size_of(self, of: CheckpointId, name: str) -> int:
        """Return the length of a file in bytes. Raises FileNotFoundError."""

    @abstractmethod
    def location(self, of: CheckpointId) -> str | Path:
        """Return where a complete checkpoint is: a path, or an address that fsspec understands."""

    @abstractmethod
    def _delete(self, old: Sequence[CheckpointId], generation: int, progress: Progress = no_progress) -> None:
        """Delete complete checkpoints, none of them half. generation: of this writer. progress: as for `prune`.

        Raises FencedError when a newer one has claimed the directory; then no further checkpoint is deleted.
        """

    @abstractmethod
    def _fence_off(self, generation: int) -> None:
        """Make sure that no draft of an older generation can still be committed."""

    @abstractmethod
    def _delete_unfinished(self, generation: int, progress: Progress = no_progress) -> None:
        """Delete the drafts of this and older generations, but for those in use. progress: as for `prune`."""

    def _note_writer(self, draft: str) -> None:
        """Record that this thread writes a draft."""
        others = {name: each for name, each in self._writers.items() if each.is_alive()}
        self._writers = {**others, draft: threading.current_thread()}

    def _is_in_use(self, draft: str) -> bool:
        """Return whether another thread of this process may still commit a draft, however long storage has held it up."""
        writer = self._writers.get(draft)
        return writer is not None and writer is not threading.current_thread() and writer.is_alive()

    @abstractmethod
    def _prepare(self) -> None:
        """Create the place if it does not exist. Raises CheckpointError when it is something else."""

    @abstractmethod
    def _canonical_name(self) -> str:
        """Return the one name of the place, however it was addressed."""

    @abstractmethod
    def _names(self, folder: str) -> list[str]: ...

    @abstractmethod
    def _read(self, name: str) -> str: ...

    @abstractmethod
    def _write(self, name: str, text: str) -> None: ...

    @abstractmethod
    def _create(self, name: str, text: str) -> bool:
        """Write a new file; return False if it exists. Exactly one of several concurrent callers gets True."""

    @abstractmethod
    def _remove(self, name: str) -> None: ...

    # -- claims ------------------------------------------------------------------------------------------------------

    def claim(self, generation: int | None, run: str = "", *, job: str = "", adopt: bool = False) -> int:
        """Claim the directory for a generation, by default the next free one, and return its number in this directory.

        run: identity of the job's present life. A job that was deleted and applied again counts its generations from 1 again; in
        this directory they continue after those of the former job. job: its name; the directory of another job is refused unless
        ``adopt``. Repeating the newest claim is harmless. When this returns, no older generation can commit any more.
        Raises FencedError when a newer generation or another job has claimed the directory since, and CheckpointError when it
        holds a checkpoint of somebody else.
        """
        try:
            self._prepare()
            self._take_ownership(job, adopt)
            number = self._claim_next() if generation is None else self._claim(generation, run)
            self._fence_off(number)
        except PermissionError as error:
            raise CheckpointError(
                f"this process, of user {os.geteuid()}, may not write in {self.name} ({error.strerror or error}); permit it, or "
                "name another directory"
            ) from error
        return number

    def _claim(self, generation: int, run: str) -> int:
        number = generation + self._offset(run) if run else generation
        self.check_fence(number)
        self._write(_claim_name(number), run)
        return number

    def _take_ownership(self, job: str, adopt: bool) -> None:
        """Record the job that owns the directory, or check that it is this one."""
        if not job or self._create(OWNER, job):
            return
        owner = self._read(OWNER)
        if owner == job:
            return
        if owner and not adopt:  # a crash may have come before it was written
            raise CheckpointError(
                f"{self.name} holds the checkpoints of job {owner}; give {job} a directory of its own, or pass adopt=True to take it over"
            )
        self._write(OWNER, job)

    def _offset(self, run: str) -> int:
        """Return what is added to the job's generations in this directory: the newest claim when the job first claimed it."""
        if not _RUN.fullmatch(run):
            raise CheckpointError(f"the job's identity {run!r} is not made of letters, digits, '.', '_' and '-'")
        marker = f"{CLAIMS}/run-{run}"
        newest = self.newest_claim()
        if self._create(marker, str(newest)):
            return newest
        start = self._read(marker)
        if not start:  # a crash came before it was written, and before any claim
            self._write(marker, str(newest))
            return newest
        # Claims up to that number are of former jobs, even if this one has not come to its own first claim yet.
        if newest > int(start) and self._read(_claim_name(newest)) not in (run, ""):
            raise FencedError(f"another job has taken over {self.name}; give each job a directory of its own")
        return int(start)

    def check_fence(self, generation: int) -> None:
        """Raise FencedError when a newer generation has claimed the directory."""
        newest = self.newest_claim()
        if newest > generation:
            raise FencedError(
                f"generation {newest} has taken over {self.name}; this process belongs to generation {generation} and must stop"
            )

    def newest_claim(self) -> int:
        """Return the highest generation that claimed the directory, 0 for none."""
        return max((int(found[1]) for found in map(_CLAIM.fullmatch, self._names(CLAIMS)) if found), default=0)

    def _claim_next(self) -> int:
        while True:
            generation = self.newest_claim() + 1
            if self._create(_claim_name(generation), ""):
                return generation  # else another job took this number: try the next

    def identity(self) -> str:
        """Return an identity of this directory that its copies and a former directory of the same name do not share.

        Call it after `claim`.
        """
        own = secrets.token_hex(16)
        self._create(IDENTITY, own)
        found = self._read(IDENTITY)
        if not found:  # a crash came before it was written
            self._write(IDENTITY, own)
        return f"{found or own} {self._canonical_name()}"

    # -- existing checkpoints -----------------------------------------------------------------------------------------------

    def prune(
        self,
        generation: int,
        keep: int,
        damaged: Iterable[CheckpointId] = (),
        *,
        keep_every: int | None = None,
        committed: CheckpointId | None = None,
        progress: Progress = no_progress,
    ) -> None:
        """Delete all but the ``keep`` newest checkpoints, the damaged ones, and the drafts of dead writers.

        Newest is by generation, then step, so the present run's checkpoints outlive those of a former one. keep_every: intact
        checkpoints of steps that are a multiple of it stay as well. committed: the checkpoint that has just been committed, which
        stays even if this generation went back and has newer ones. progress: is called when a checkpoint or draft is gone; an error of
        it ends the deleting. Checkpoints that another version of this library wrote are
        neither deleted nor counted, and are named once in the log; torn ones do not count either. A fenced generation deletes
        nothing (FencedError), not even if it was about to when it was fenced; only in an object store, a deletion that is under way
        may end after the claim.
        """
        self.check_fence(generation)
        damaged_ids = set(damaged)
        if committed is not None:  # a torn one of the same name may have made room
            self._torn.discard(committed)
        intact = sorted(
            set(self.list_complete()) - damaged_ids, key=lambda each: (each.generation, each.step), reverse=True
        )
        left = keep
        old: list[CheckpointId] = []
        for each in intact:
            if left:
                left -= self._may_delete(each) and each not in self._torn
            elif each != committed and (not keep_every or each.step % keep_every) and self._may_delete(each):
                old.append(each)
        self._delete([*old, *sorted(damaged_ids)], generation, progress)
        self._delete_unfinished(generation, progress)
        for name in self._names(CLAIMS):
            found = _CLAIM.fullmatch(name)
            if found and int(found[1]) < generation:
                self._remove(f"{CLAIMS}/{name}")

    def delete_damaged(self, of: CheckpointId, generation: int) -> None:
        """Delete a checkpoint that has proved damaged, to make room for one of the same step. Raises FencedError as `prune` does."""
        self._delete([of], generation)

    def _may_delete(self, of: CheckpointId) -> bool:
        """Return whether a checkpoint is in this library's format, or torn; the answer is cached."""
        if of not in self._is_ours:
            try:
                self.manifest(of)
                self._is_ours[of] = True
            except DamagedCheckpoint:
                self._torn.add(of)
                self._is_ours[of] = True
            except CheckpointError as error:
                log.warning("not deleted, however old: %s", error)
                self._is_ours[of] = False
        return self._is_ours[of]

    def manifest(self, of: CheckpointId) -> Manifest:
        """Read the manifest of a checkpoint.

        Raises DamagedCheckpoint for a torn one, CheckpointError for another version's and for one that is too large to be read.
        """
        path = f"{self.location(of)}/{MANIFEST}"
        try:
            size = self.size_of(of, MANIFEST)
            if size > MAX_MANIFEST_BYTES:
                raise CheckpointError(
                    f"it has {size} bytes, and this library reads at most {MAX_MANIFEST_BYTES}; use a version that reads more, or "
                    f"move {self.location(of)} away to resume from the one before"
                )
            manifest = Manifest.from_json(self._read(f"{of.name}/{MANIFEST}"))
        except FileNotFoundError:
            raise DamagedCheckpoint(
                f"{self.location(of)} has no {MANIFEST}: it is torn or was made by something else"
            ) from None
        except ValueError as error:
            raise DamagedCheckpoint(f"{path} cannot be used: {error}") from error
        except DamagedCheckpoint:
            raise
        except CheckpointError as error:
            raise CheckpointError(f"{path} cannot be used: {error}") from None
        if manifest.id != of:
            raise DamagedCheckpoint(f"{path} describes {manifest.id.name}: the directory was renamed")
        return manifest

    def manifest_text(self, manifest: Manifest) -> str:
        """Return what is written as a manifest. Raises CheckpointError when it would be too large to be read again."""
        text = manifest.to_json()  # of ASCII characters only
        if len(text) > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"cannot commit {self.location(manifest.id)}: its manifest would have {len(text)} bytes, of {MAX_MANIFEST_BYTES} "
                "that can be read; save smaller values in extra, or from fewer ranks, so that the state is cut into fewer pieces"
            )
        return text

    def find_problems(self, manifest: Manifest, names: Iterable[str]) -> list[str]:
        """Check the named files of a checkpoint against its manifest; return one sentence for each difference.

        Files whose parts have checksums are not read here: the reader verifies what it reads. Raises OSError when storage cannot
        read a file that may be intact.
        """
        return [text for name in names if (text := self._find_problem(manifest.id, name, manifest.files[name]))]

    def _find_problem(self, of: CheckpointId, name: str, wanted: FileRecord) -> str | None:
        path = f"{self.location(of)}/{name}"
        try:
            size = self.size_of(of, name)
            if size != wanted.size:
                return f"{path} has {size} bytes, its manifest says {wanted.size}"
            if wanted.checksums:
                return None
            with self.open_file(of, name) as file:
                found = measure_stream(file)
        except FileNotFoundError:
            return f"{path} is missing"
        except DamagedCheckpoint as error:
            return f"{path}: {error}"
        if found.crc32 != wanted.crc32:
            return f"{path} has checksum {found.crc32}, its manifest says {wanted.crc32}"
        return None


def _claim_name(generation: int) -> str:
    return f"{CLAIMS}/gen-{generation:06d}"
