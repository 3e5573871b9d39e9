"""Checkpoints in an object store (S3 and similar), through fsspec.

There is no rename, so files are written in their final place. The manifest commits the checkpoint: it is written last, and
only if there is none. A newer generation writes a barrier in place of the manifest wherever an older generation is still
writing. The store accepts only one of the two, so a replaced generation cannot commit.
"""

from __future__ import annotations

import errno
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit, urlunsplit

from elastipod.checkpoint.manifest import MANIFEST, CheckpointId, DamagedCheckpoint, Manifest
from elastipod.checkpoint.store import CLAIMS, COMPLETE, CheckpointStore, Progress, no_progress
from elastipod.checkpoint.threaded_map import map_in_threads
from elastipod.errors import CheckpointError

BEGUN = "begun"
_BARRIER = b'{"barrier": '
_MAX_BARRIER_BYTES = 64  # a manifest names at least two files and is longer
_MIB = 1 << 20
_PART_BYTES = 16 * _MIB
_MAX_PARTS = 9000  # S3 takes 10,000 of a file; the size that a file will have is estimated
_LOOKS_AT_ONCE = 16
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}


class BucketStore(CheckpointStore):
    """Checkpoints below an address that fsspec understands. Raises OSError when the store fails."""

    def __init__(self, address: str, options: Mapping[str, Any]) -> None:
        """Open the file system. options: its arguments, including credentials; they go nowhere else.

        Raises CheckpointError when the package for this kind of address is missing, or the address contains credentials.
        """
        import fsspec  # type: ignore[import-untyped]

        super().__init__(_without_credentials(address))
        if "@" in urlsplit(address).netloc:
            raise CheckpointError(f"give the credentials for {self.name} in storage_options, not in its address")
        try:
            self._fs, path = fsspec.core.url_to_fs(address, **options)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{self.name} cannot be used: {error}") from None
        self._root = str(path).rstrip("/")

    def begin(self, target: CheckpointId) -> str:
        self._note_writer(target.name)
        self._put(f"{target.name}/{BEGUN}", b"")
        # Check after writing the mark: a later claim will see the mark.
        self.check_fence(target.generation)
        return target.name

    @contextmanager
    def create_file(self, draft: Any, name: str, size: int = 0) -> Iterator[BinaryIO]:
        part = max(_PART_BYTES, math.ceil(size / _MAX_PARTS / _MIB) * _MIB)
        with _as_os_error(), self._fs.open(self._path(f"{draft}/{name}"), "wb", block_size=part) as file:
            yield cast(BinaryIO, file)

    def commit(self, draft: Any, manifest: Manifest) -> str:
        text = self.manifest_text(manifest)
        self.check_fence(manifest.id.generation)
        name = f"{draft}/{MANIFEST}"
        # The manifest may be our own: a client may have retried a write that had succeeded.
        if not self._create(name, text) and self._read(name) != text:
            self.check_fence(manifest.id.generation)
            raise CheckpointError(f"cannot commit {self.location(manifest.id)}: another writer was there first")
        return self.location(manifest.id)

    def discard(self, draft: Any) -> None:
        self._delete_from_manifest_on(str(draft))  # there is one if a commit succeeded whose response was lost

    def list_complete(self) -> list[CheckpointId]:
        return sorted((of for of, is_complete in self._written() if is_complete), reverse=True)

    @contextmanager
    def open_file(self, of: CheckpointId, name: str) -> Iterator[BinaryIO]:
        with _as_os_error(), self._fs.open(self._path(f"{of.name}/{name}"), "rb", block_size=_PART_BYTES) as file:
            yield cast(BinaryIO, file)

    def read_range(self, of: CheckpointId, name: str, start: int, length: int) -> bytes:
        if not length:
            return b""
        with _as_os_error():
            return bytes(self._fs.cat_file(self._path(f"{of.name}/{name}"), start=start, end=start + length))

    def size_of(self, of: CheckpointId, name: str) -> int:
        with _as_os_error():
            return int(self._fs.info(self._path(f"{of.name}/{name}"), refresh=True)["size"])

    def location(self, of: CheckpointId) -> str:
        return f"{self.name}/{of.name}"

    def _prepare(self) -> None:
        for name in (".metadata", MANIFEST):
            with _as_os_error():
                is_there = self._fs.exists(self._path(name))
            if is_there:
                raise CheckpointError(
                    f"{self.name} is itself one checkpoint, not a folder of checkpoints; name an empty folder or its parent"
                )
        self._probe()

    def _probe(self) -> None:
        """Check that the store refuses to create a file that exists. Some stores, and some clients, ignore the condition."""
        name = f"{CLAIMS}/probe-{secrets.token_hex(4)}"
        self._create(name, "first")
        was_let_in = self._create(name, "second")
        self._remove(name)
        if was_let_in:
            raise CheckpointError(
                f"{self.name} lets an existing file be created again, so that a replaced run could overwrite its successor's "
                "checkpoints; use a store that refuses this, and a release of its fsspec package that requests it"
            )

    def _fence_off(self, generation: int) -> None:
        barrier = _BARRIER.decode() + f'"generation {generation} has taken over"}}'
        for of, is_complete in self._written():
            if of.generation < generation and not is_complete:
                self._create(f"{of.name}/{MANIFEST}", barrier)  # refused if it has been committed meanwhile

    def _delete_unfinished(self, generation: int, progress: Progress = no_progress) -> None:
        for of, is_complete in self._written():
            if of.generation <= generation and not is_complete and not self._is_in_use(of.name):
                self._delete_folder(of.name)
                progress()

    def _delete(self, old: Sequence[CheckpointId], generation: int, progress: Progress = no_progress) -> None:
        """Delete the manifest first, so that a half-deleted checkpoint does not count."""
        for each in old:
            self.check_fence(generation)
            self._delete_from_manifest_on(each.name)
            progress()

    def _delete_from_manifest_on(self, name: str) -> None:
        self._remove(f"{name}/{MANIFEST}")
        self._delete_folder(name)

    def _written(self) -> list[tuple[CheckpointId, bool]]:
        """List the drafts and checkpoints, and whether each is complete.

        It asks for the names only, which are few, and not for the files, of which every rank has one in each checkpoint; and for
        each manifest, also for one that was seen before: an older generation may have deleted it since.
        """
        matches = [match for match in map(COMPLETE.fullmatch, self._names("")) if match]
        there = sorted(CheckpointId(int(match[1]), int(match[2])) for match in matches)
        return [
            *zip(
                there,
                map_in_threads(self._is_complete, there, _LOOKS_AT_ONCE, "elastipod-checkpoint-list"),
                strict=True,
            )
        ]

    def _is_complete(self, of: CheckpointId) -> bool:
        try:
            is_long = self.size_of(of, MANIFEST) > _MAX_BARRIER_BYTES
            return is_long or not self._read(f"{of.name}/{MANIFEST}").startswith(_BARRIER.decode())
        except FileNotFoundError:
            return False

    def _canonical_name(self) -> str:
        return self.name

    def _names(self, folder: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            with _as_os_error():
                listed = self._fs.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        return [str(each).rstrip("/").rpartition("/")[2] for each in listed]

    def _read(self, name: str) -> str:
        with _as_os_error():
            return bytes(self._fs.cat_file(self._path(name))).decode()

    def _write(self, name: str, text: str) -> None:
        self._put(name, text.encode())

    def _put(self, name: str, content: bytes) -> None:
        with _as_os_error():
            self._make_folder(name)
            self._fs.pipe_file(self._path(name), content)

    def _create(self, name: str, text: str) -> bool:
        try:
            with _as_os_error():
                self._make_folder(name)
                self._fs.pipe_file(self._path(name), text.encode(), mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno == errno.EINVAL and self._fs.exists(
                self._path(name)
            ):  # how older s3fs reports that a file exists
                return False
            raise
        return True

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError), _as_os_error():
            self._fs.rm_file(self._path(name))

    def _delete_folder(self, name: str) -> None:
        with suppress(FileNotFoundError), _as_os_error():
            self._fs.rm(self._path(name), recursive=True)

    def _make_folder(self, name: str) -> None:
        """Create the folder of a file where the file system has folders."""
        protocols = self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,)
        if not _WITHOUT_FOLDERS.intersection(protocols):
            self._fs.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Convert the exceptions that a client defines itself to OSError, as most of them are.

    A client that finds a checksum mismatch has found damage: DamagedCheckpoint.
    """
    try:
        yield
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        if type(error).__name__.endswith("ChecksumError"):  # botocore's and gcsfs's; neither need be installed
            raise DamagedCheckpoint(f"the store's client has found damage: {error}") from error
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


def _without_credentials(address: str) -> str:
    """Return the address without user, password and query, fit for messages."""
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))
