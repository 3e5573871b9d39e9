"""Checkpoints in a directory of a local or shared POSIX file system. No torch.

A checkpoint is written in a hidden folder and committed by one rename, and deleted by way of another one. A claim renames the
hidden folders of older generations, so that their commits and deletions fail.
"""

from __future__ import annotations

import errno
import io
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from elastipod.checkpoint.manifest import MANIFEST, CheckpointId, Manifest
from elastipod.checkpoint.store import CLAIMS, COMPLETE, FULL, CheckpointStore, Progress, no_progress
from elastipod.errors import CheckpointError, FencedError
from elastipod.synced_files import create_synced, sync_directory

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FLOW = 8 << 20
# A host's memory may take hundreds of GB, which slow storage is silent over for longer than a save is given.
_SYNC_EVERY = 1 << 30
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)  # errors of file systems over object stores
_TEMPORARY = re.compile(r"\.(?:tmp|dead)-step-\d{10}-gen-(\d{6})-[0-9a-f]+")


class DirectoryStore(CheckpointStore):
    """Checkpoints in a directory of a local or shared POSIX file system."""

    has_cheap_seeks = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()  # the script may change its working directory
        super().__init__(str(self.path))

    def begin(self, target: CheckpointId) -> Path:
        path = self._hidden(target)
        self._note_writer(path.name)
        path.mkdir(parents=True)
        try:
            # Check after creating the folder: a later claim will see the folder.
            self.check_fence(target.generation)
        except FencedError:
            with suppress(OSError):
                path.rmdir()
            raise
        return path

    @contextmanager
    def create_file(self, draft: str | Path, name: str, size: int = 0) -> Iterator[BinaryIO]:
        with io.BufferedWriter(_WriteBehindFile(Path(draft) / name, "xb")) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def commit(self, draft: str | Path, manifest: Manifest) -> Path:
        draft = Path(draft)
        final = self.path / manifest.id.name
        text = self.manifest_text(manifest)
        try:
            with self.create_file(draft, MANIFEST) as file:
                file.write(text.encode())
            sync_directory(draft)
            self.check_fence(manifest.id.generation)
            os.rename(draft, final)
        except OSError as error:
            self.check_fence(manifest.id.generation)  # a successor may have renamed our draft
            raise CheckpointError(
                f"cannot commit {final}: {error.strerror}; move what is there out of the way, or make room"
            ) from error
        sync_directory(self.path)
        return final

    def discard(self, draft: str | Path) -> None:
        shutil.rmtree(draft, ignore_errors=True)

    def list_complete(self) -> list[CheckpointId]:
        found = [match for match in map(COMPLETE.fullmatch, self._names("")) if match]
        return sorted((CheckpointId(int(match[1]), int(match[2])) for match in found), reverse=True)

    @contextmanager
    def open_file(self, of: CheckpointId, name: str) -> Iterator[BinaryIO]:
        with open(self.path / of.name / name, "rb") as file:
            yield file

    def size_of(self, of: CheckpointId, name: str) -> int:
        return (self.path / of.name / name).stat().st_size

    def location(self, of: CheckpointId) -> Path:
        return self.path / of.name

    def _prepare(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"{self.path} is not a directory; name a directory for checkpoints")
        if (self.path / ".metadata").exists() or (self.path / MANIFEST).exists():
            raise CheckpointError(
                f"{self.path} is itself one checkpoint, not a directory of checkpoints; name an empty directory or its parent"
            )
        (self.path / CLAIMS).mkdir(parents=True, exist_ok=True)

    def _fence_off(self, generation: int) -> None:
        for name in self._names(""):
            found = _TEMPORARY.fullmatch(name)
            if found and int(found[1]) < generation and name.startswith(".tmp-"):
                with suppress(FileNotFoundError):  # just committed or discarded by its writer
                    os.rename(self.path / name, self.path / name.replace(".tmp-", ".dead-", 1))

    def _delete_unfinished(self, generation: int, progress: Progress = no_progress) -> None:
        for name in self._names(""):
            found = _TEMPORARY.fullmatch(name)
            if found and int(found[1]) <= generation and not self._is_in_use(name):
                shutil.rmtree(self.path / name, ignore_errors=True)
                progress()

    def _delete(self, old: Sequence[CheckpointId], generation: int, progress: Progress = no_progress) -> None:
        """Move them into a hidden folder first, so that a half-deleted one is never seen under its name.

        A claim renames that folder like a draft, and nothing can be moved into it any more.
        """
        if not old:
            return
        try:
            hidden = self.begin(CheckpointId(0, generation))
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._delete_without_room(old, generation, progress)
            return
        try:
            for each in old:
                try:
                    os.rename(self.path / each.name, hidden / each.name)
                except FileNotFoundError:  # it is gone, or the folder is
                    self.check_fence(generation)
        finally:
            for each in old:
                shutil.rmtree(hidden / each.name, ignore_errors=True)
                progress()
            shutil.rmtree(hidden, ignore_errors=True)

    def _delete_without_room(self, old: Sequence[CheckpointId], generation: int, progress: Progress) -> None:
        """Make room where there is none even for a folder; else no later save could."""
        for each in old:
            hidden = self._hidden(each)
            self.check_fence(generation)
            with suppress(FileNotFoundError):
                os.rename(self.path / each.name, hidden)
            shutil.rmtree(hidden, ignore_errors=True)
            progress()

    def _hidden(self, of: CheckpointId) -> Path:
        """Return a new name that readers do not see, and that a claim finds."""
        return self.path / f".tmp-{of.name}-{secrets.token_hex(4)}"

    def _canonical_name(self) -> str:
        return os.path.realpath(self.path)

    def _names(self, folder: str) -> list[str]:
        try:
            return os.listdir(self.path / folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _read(self, name: str) -> str:
        return (self.path / name).read_text(encoding="utf-8")

    def _write(self, name: str, text: str) -> None:
        temporary = self._draft(name, text)
        os.rename(temporary, self.path / name)
        sync_directory(temporary.parent)

    def _create(self, name: str, text: str) -> bool:
        temporary = self._draft(name, text)
        try:
            os.link(temporary, self.path / name)  # atomic, and for one caller only
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:
                create_synced(self.path / name, text)
            except FileExistsError:
                return False
        finally:
            temporary.unlink()
        sync_directory(temporary.parent)
        return True

    def _draft(self, name: str, text: str) -> Path:
        path = self.path / name
        temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
        create_synced(temporary, text)
        return temporary

    def _remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)


class _WriteBehindFile(io.FileIO):
    """A file that is written back to disk as it grows, so that no sync takes long."""

    _written_back = 0  # bytes that the kernel has been asked to write back
    _synced = 0  # bytes that storage has taken

    def write(self, data: Buffer, /) -> int:
        count = super().write(data)
        written = self.tell()
        if written - self._written_back >= _FLOW and hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # the file system may not support the advice
                # Linux starts to write back pages that are not needed any more, without waiting.
                os.posix_fadvise(
                    self.fileno(), self._written_back, written - self._written_back, os.POSIX_FADV_DONTNEED
                )
            self._written_back = written
        if written - self._synced >= _SYNC_EVERY:
            os.fdatasync(self.fileno())
            self._synced = written
        return count
