"""Where checkpoints are kept: names, claims, manifests, and which of its entries may be trusted. No torch.

A checkpoint exists from the moment it is committed, and never before. Every generation puts down a claim and takes away
what older ones are still writing, so a rank that lost touch with its job can neither overwrite the work of its successors
nor add to it (docs/design/contracts.md, 6). `CheckpointStore` is what is alike for directories and object stores.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable
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
MAX_MANIFEST_BYTES = 64 << 20

COMPLETE = re.compile(r"step-(\d{10})-gen-(\d{6})")
_CLAIM = re.compile(r"gen-(\d{6,})")
_RUN = re.compile(r"[A-Za-z0-9._-]{1,128}")


class CheckpointStore(ABC):
    """A place for checkpoints, as one generation's rank 0 sees and changes it. Reading is for any rank.

    name: of the place, for messages; it holds no credentials. Methods raise OSError where storage fails.
    """

    has_cheap_seeks = False  # whether going to and fro in a file costs next to nothing

    def __init__(self, name: str) -> None:
        self.name = name
        self._is_ours: dict[CheckpointId, bool] = {}

    # -- what a kind of storage does ---------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, target: CheckpointId) -> str | Path:
        """Make the place that a checkpoint is written in, unseen by readers, and name it. Raises FencedError."""

    @abstractmethod
    def create_file(self, draft: str | Path, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a new file in a place that was begun; it is durable when the block ends. Any rank."""

    @abstractmethod
    def commit(self, draft: str | Path, manifest: Manifest) -> str | Path:
        """Let a written checkpoint appear, all at once. Raises FencedError, and CheckpointError where it cannot."""

    @abstractmethod
    def discard(self, draft: str | Path) -> None:
        """Give back the room of what was begun and will not be committed."""

    @abstractmethod
    def list_complete(self) -> list[CheckpointId]:
        """List the checkpoints that were committed, freshest first."""

    @abstractmethod
    def open_file(self, of: CheckpointId, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a file of a complete checkpoint; it can be read from any position. Any rank."""

    def read_range(self, of: CheckpointId, name: str, start: int, length: int) -> bytes:
        """Give bytes of a file of a complete checkpoint, fewer where it ends before. Any rank, any thread."""
        with self.open_file(of, name) as file:
            file.seek(start)
            return file.read(length)

    @abstractmethod
    def size_of(self, of: CheckpointId, name: str) -> int:
        """Give a file's length in bytes. Raises FileNotFoundError."""

    @abstractmethod
    def location(self, of: CheckpointId) -> str | Path:
        """Say where a complete checkpoint is: a path, or an address that fsspec understands."""

    @abstractmethod
    def _delete(self, old: CheckpointId) -> None: ...

    @abstractmethod
    def _fence_off(self, generation: int) -> None:
        """See to it that nothing which an older generation has begun can still be committed."""

    @abstractmethod
    def _delete_unfinished(self, generation: int) -> None:
        """Delete what this and older generations left unfinished."""

    @abstractmethod
    def _prepare(self) -> None:
        """Make the place where it is not there. Raises CheckpointError when it is something else."""

    @abstractmethod
    def _canonical_name(self) -> str:
        """Give the one name that the place goes by."""

    @abstractmethod
    def _names(self, folder: str) -> list[str]: ...

    @abstractmethod
    def _read(self, name: str) -> str: ...

    @abstractmethod
    def _write(self, name: str, text: str) -> None: ...

    @abstractmethod
    def _create(self, name: str, text: str) -> bool:
        """Write a new file; False when it is there already. Exactly one of several callers gets True."""

    @abstractmethod
    def _remove(self, name: str) -> None: ...

    # -- claims ------------------------------------------------------------------------------------------------------

    def claim(self, generation: int | None, run: str = "", *, job: str = "", adopt: bool = False) -> int:
        """Take the directory for a generation, the next free one where None is given, and return its number here.

        run: identity of the job's present life. A job that was deleted and applied again counts its generations from 1
        anew: here they go on after those of the former job. job: its name; another job's directory is refused unless
        ``adopt``. Claiming the newest claim again is harmless. When this returns, no older generation can commit any more.
        Raises FencedError when a newer generation or another job has claimed since, and CheckpointError when the directory
        holds somebody else's checkpoint.
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
        """Write down whose directory it is, or see that it is this job's."""
        if not job or self._create(OWNER, job):
            return
        owner = self._read(OWNER)
        if owner == job:
            return
        if not adopt:
            raise CheckpointError(
                f"{self.name} holds the checkpoints of job {owner}; give {job} a directory of its own, or pass adopt=True to take it over"
            )
        self._write(OWNER, job)

    def _offset(self, run: str) -> int:
        """Give what is added to the generations of a job in this directory: what had been claimed when it first came."""
        if not _RUN.fullmatch(run):
            raise CheckpointError(f"the job's identity {run!r} is not made of letters, digits, '.', '_' and '-'")
        marker = f"{CLAIMS}/run-{run}"
        newest = self.newest_claim()
        if self._create(marker, str(newest)):
            return newest
        if newest and self._read(_claim_name(newest)) not in (run, ""):
            raise FencedError(f"another job has taken over {self.name}; give each job a directory of its own")
        return int(self._read(marker))

    def check_fence(self, generation: int) -> None:
        """Raise FencedError when a generation newer than this one has claimed the directory."""
        newest = self.newest_claim()
        if newest > generation:
            raise FencedError(
                f"generation {newest} has taken over {self.name}; this process belongs to generation {generation} and must stop"
            )

    def newest_claim(self) -> int:
        """Give the highest generation that claimed the directory, 0 for none."""
        return max((int(found[1]) for found in map(_CLAIM.fullmatch, self._names(CLAIMS)) if found), default=0)

    def _claim_next(self) -> int:
        while True:
            generation = self.newest_claim() + 1
            if self._create(_claim_name(generation), ""):
                return generation  # else another job began at the same moment: the next number is ours

    def identity(self) -> str:
        """Give what tells this directory from any other, also from its copies and from one that stood here before.

        After `claim`.
        """
        self._create(IDENTITY, secrets.token_hex(16))
        return f"{self._read(IDENTITY)} {self._canonical_name()}"

    # -- what is there -----------------------------------------------------------------------------------------------

    def prune(
        self, generation: int, keep: int, damaged: Iterable[CheckpointId] = (), *, keep_every: int | None = None
    ) -> None:
        """Delete all but the ``keep`` newest checkpoints, those known as damaged, and what dead writers left behind.

        Newest is by generation, then step: the present lineage outlives what a former one left. keep_every: intact
        checkpoints of steps that it divides stay as well. What another version of this library wrote is left alone, counts
        for nothing, and is named once in the log. A fenced generation deletes nothing (FencedError).
        """
        self.check_fence(generation)
        damaged_ids = set(damaged)
        intact = sorted(
            set(self.list_complete()) - damaged_ids, key=lambda each: (each.generation, each.step), reverse=True
        )
        left = keep
        for each in intact:
            if left:
                left -= self._may_delete(each)
            elif (not keep_every or each.step % keep_every) and self._may_delete(each):
                self._delete(each)
        for each in damaged_ids:
            self._delete(each)
        self._delete_unfinished(generation)
        for name in self._names(CLAIMS):
            found = _CLAIM.fullmatch(name)
            if found and int(found[1]) < generation:
                self._remove(f"{CLAIMS}/{name}")

    def _may_delete(self, of: CheckpointId) -> bool:
        """Tell whether a checkpoint was written in this library's format, or is a torn one; each is looked at once."""
        if of not in self._is_ours:
            try:
                self.manifest(of)
                self._is_ours[of] = True
            except DamagedCheckpoint:
                self._is_ours[of] = True
            except CheckpointError as error:
                log.warning("not deleted, however old: %s", error)
                self._is_ours[of] = False
        return self._is_ours[of]

    def manifest(self, of: CheckpointId) -> Manifest:
        """Read a checkpoint's manifest. Raises Damaged, saying what is wrong, for a torn one, CheckpointError for another version's."""
        path = f"{self.location(of)}/{MANIFEST}"
        try:
            if self.size_of(of, MANIFEST) > MAX_MANIFEST_BYTES:
                raise DamagedCheckpoint(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes; it is no manifest of ours")
            manifest = Manifest.from_json(self._read(f"{of.name}/{MANIFEST}"))
        except FileNotFoundError:
            raise DamagedCheckpoint(
                f"{self.location(of)} has no {MANIFEST}: it is torn or was made by something else"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint(f"{path} cannot be used: {error}") from error
        except DamagedCheckpoint:
            raise
        except CheckpointError as error:
            raise CheckpointError(f"{path} cannot be used: {error}") from None
        if manifest.id != of:
            raise DamagedCheckpoint(f"{path} describes {manifest.id.name}: the directory was renamed")
        return manifest

    def find_problems(self, manifest: Manifest, names: Iterable[str]) -> list[str]:
        """Look at the named files of a checkpoint and say, one sentence each, what is not as the manifest has it.

        Files whose parts have sums are not read: who reads them verifies them.

        Raises OSError where storage does not give one that may be intact.
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
