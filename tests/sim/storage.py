"""The shared storage of checkpoints: the library's own rules of claims, commits and pruning, over files that may fail."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

from tests.sim.invariant_state import Violation

from elastipod.checkpoint.manifest import MANIFEST, CheckpointId, Manifest
from elastipod.checkpoint.store import COMPLETE, CheckpointStore, Progress, no_progress

KEPT = 3
"""How many checkpoints a training keeps."""
AWAY, FULL, SLOW = STORAGE_TROUBLES = ("storage_away", "storage_full", "storage_slow")


class FileStore(CheckpointStore):
    """The files, as text by path. goes_on: whether a trouble is under way."""

    def __init__(self, goes_on: Callable[[str], bool]) -> None:
        super().__init__("the shared storage")
        self._goes_on = goes_on
        self._files: dict[str, str] = {}

    def begin(self, target: CheckpointId) -> str:
        draft = f".tmp-{target.name}"
        self._write(f"{draft}/part", "")
        self.check_fence(target.generation)
        return draft

    @contextmanager
    def create_file(self, draft: object, name: str, size: int = 0) -> Iterator[BinaryIO]:
        file = io.BytesIO()
        yield file
        self._write(f"{draft}/{name}", file.getvalue().decode())

    def commit(self, draft: object, manifest: Manifest) -> str:
        self._write(f"{draft}/{MANIFEST}", manifest.to_json())
        self.check_fence(manifest.id.generation)
        for path in self._below(f"{draft}/"):
            self._files[manifest.id.name + path.removeprefix(str(draft))] = self._files.pop(path)
        return manifest.id.name

    def discard(self, draft: object) -> None:
        for path in self._below(f"{draft}/"):
            del self._files[path]

    def list_complete(self) -> list[CheckpointId]:
        found = filter(None, map(COMPLETE.fullmatch, self._names("")))
        return sorted((CheckpointId(int(match[1]), int(match[2])) for match in found), reverse=True)

    @contextmanager
    def open_file(self, of: CheckpointId, name: str) -> Iterator[BinaryIO]:
        yield io.BytesIO(self._read(f"{of.name}/{name}").encode())

    def size_of(self, of: CheckpointId, name: str) -> int:
        return len(self._read(f"{of.name}/{name}"))

    def location(self, of: CheckpointId) -> str:
        return of.name

    def _delete(self, old: Sequence[CheckpointId], generation: int, progress: Progress = no_progress) -> None:
        for each in old:
            self.discard(each.name)
            progress()

    def _fence_off(self, generation: int) -> None:
        """A draft that is begun here is committed or given up before anything else happens."""

    def _delete_unfinished(self, generation: int, progress: Progress = no_progress) -> None:
        for name in self._names(""):
            if name.startswith(".tmp-"):
                self.discard(name)
                progress()

    def _prepare(self) -> None:
        self._require(is_write=False)

    def _canonical_name(self) -> str:
        return self.name

    def _names(self, folder: str) -> list[str]:
        self._require(is_write=False)
        start = f"{folder}/" if folder else ""
        return list(dict.fromkeys(path.removeprefix(start).partition("/")[0] for path in self._below(start)))

    def _read(self, name: str) -> str:
        self._require(is_write=False)
        if name not in self._files:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        return self._files[name]

    def _write(self, name: str, text: str) -> None:
        self._require(is_write=True)
        self._files[name] = text

    def _create(self, name: str, text: str) -> bool:
        if name in self._files:
            return False
        self._write(name, text)
        return True

    def _remove(self, name: str) -> None:
        self._files.pop(name, None)

    def _below(self, start: str) -> list[str]:
        return [path for path in self._files if path.startswith(start)]

    def _require(self, *, is_write: bool) -> None:
        if self._goes_on(AWAY):
            raise OSError(errno.EIO, "Input/output error")
        if is_write and self._goes_on(FULL):
            raise OSError(errno.ENOSPC, "No space left on device")


class Storage:
    """What generations do with the storage, and what must hold of it: by an account of its own.

    A generation that another one has followed commits and deletes nothing, and a resume finds the newest checkpoint.
    """

    def __init__(self, goes_on: Callable[[str], bool], uid: str) -> None:
        self._files = FileStore(goes_on)
        self._uid = uid
        self._claimed = 0
        self._newest = CheckpointId(0, 0)
        self._goes_on = goes_on

    @property
    def is_slow(self) -> bool:
        """Whether what is read and written takes long."""
        return self._goes_on(SLOW)

    def resume(self, generation: int) -> CheckpointId:
        """Claim the storage for a generation, and give the checkpoint that it loads. Raises OSError, FencedError, CheckpointError."""
        number = self._files.claim(generation, self._uid)
        if number < self._claimed:
            raise Violation(f"generation {generation} claims the storage after generation {self._claimed} did")
        self._claimed = number
        found = next(iter(self._files.list_complete()), CheckpointId(0, 0))
        if found != self._newest:
            raise Violation(f"generation {generation} resumes from {found}, but {self._newest} was saved")
        if found.step:
            self._files.manifest(found)
        return found

    def save(self, step: int, generation: int) -> None:
        """Save a checkpoint, and delete old ones. Raises OSError, FencedError, CheckpointError."""
        target, files = CheckpointId(step, generation), self._files
        if target not in files.list_complete():
            files.commit(files.begin(target), Manifest(target, 1, {}, {}))
            if generation < self._claimed:
                raise Violation(f"generation {generation} saves a checkpoint after generation {self._claimed} began")
            self._newest = max(self._newest, target)
        files.prune(generation, KEPT)
