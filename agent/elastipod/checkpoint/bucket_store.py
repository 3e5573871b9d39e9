"""Checkpoints in an object store (S3 and its like), through fsspec.

There is no rename: the files are written where they will stay, and the manifest, written last and only if there is none
yet, is what makes a checkpoint. A newer generation puts a barrier in the manifest's place wherever an older one is still
writing; the store lets only one of the two in, so a replaced generation cannot commit.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit, urlunsplit

from elastipod.checkpoint.manifest import MANIFEST, CheckpointId, DamagedCheckpoint, Manifest
from elastipod.checkpoint.store import CLAIMS, COMPLETE, CheckpointStore
from elastipod.errors import CheckpointError

BEGUN = "begun"
_BARRIER = b'{"barrier": '
_MAX_BARRIER_BYTES = 64  # a manifest names two files at least, and is longer
_PART_BYTES = 16 << 20
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}


class BucketStore(CheckpointStore):
    """Checkpoints below an address that fsspec understands. Raises OSError where the store fails."""

    def __init__(self, address: str, options: Mapping[str, Any]) -> None:
        """Find the file system. options: what it wants to know, credentials among it; they are given to it and to nobody else.

        Raises CheckpointError when the package for this kind of address is missing, or credentials are in the address.
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
        self._put(f"{target.name}/{BEGUN}", b"")
        # After the mark is there: a claim that we do not see now will see the mark.
        self.check_fence(target.generation)
        return target.name

    @contextmanager
    def create_file(self, draft: Any, name: str) -> Iterator[BinaryIO]:
        with _as_os_error(), self._fs.open(self._path(f"{draft}/{name}"), "wb", block_size=_PART_BYTES) as file:
            yield cast(BinaryIO, file)

    def commit(self, draft: Any, manifest: Manifest) -> str:
        text = manifest.to_json()
        self.check_fence(manifest.id.generation)
        name = f"{draft}/{MANIFEST}"
        # What is there may be our own: of two attempts of a client, the first had got through.
        if not self._create(name, text) and self._read(name) != text:
            self.check_fence(manifest.id.generation)
            raise CheckpointError(f"cannot commit {self.location(manifest.id)}: another writer was there first")
        return self.location(manifest.id)

    def discard(self, draft: Any) -> None:
        self._remove(f"{draft}/{MANIFEST}")  # where a commit got through whose answer did not
        self._delete_folder(str(draft))

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
        """See that the store refuses to create a file that is there. Some, and some clients, take no notice of the wish."""
        name = f"{CLAIMS}/probe-{secrets.token_hex(4)}"
        self._create(name, "first")
        was_let_in = self._create(name, "second")
        self._remove(name)
        if was_let_in:
            raise CheckpointError(
                f"{self.name} lets an existing file be created once more, so that a replaced run could overwrite its successor's "
                "checkpoints; use a store that refuses this, and a release of its fsspec package that asks for it"
            )

    def _fence_off(self, generation: int) -> None:
        barrier = _BARRIER.decode() + f'"generation {generation} has taken over"}}'
        for name in self._names(""):
            found = COMPLETE.fullmatch(name)
            if found and int(found[2]) < generation:
                self._create(f"{name}/{MANIFEST}", barrier)  # refused where the checkpoint is complete

    def _delete_unfinished(self, generation: int) -> None:
        for of, is_complete in self._written():
            if of.generation <= generation and not is_complete:
                self._delete_folder(of.name)

    def _delete(self, old: CheckpointId) -> None:
        """The manifest first: a half-deleted checkpoint is none."""
        self._remove(f"{old.name}/{MANIFEST}")
        self._delete_folder(old.name)

    def _written(self) -> Iterator[tuple[CheckpointId, bool]]:
        """List what was begun, and whether it is complete: one listing, and a look into what is as short as a barrier."""
        sizes: dict[str, int] = {}  # of manifests, by the checkpoint's name; -1 where there is none
        for path, size in self._listed():
            name, _, rest = path.partition("/")
            if COMPLETE.fullmatch(name):
                sizes[name] = size if rest == MANIFEST else sizes.get(name, -1)
        for name, size in sizes.items():
            is_complete = size > _MAX_BARRIER_BYTES or (size >= 0 and self._is_manifest(f"{name}/{MANIFEST}"))
            found = COMPLETE.fullmatch(name)
            assert found is not None
            yield CheckpointId(int(found[1]), int(found[2])), is_complete

    def _is_manifest(self, name: str) -> bool:
        try:
            return not self._read(name).startswith(_BARRIER.decode())
        except FileNotFoundError:
            return False

    def _listed(self) -> Iterator[tuple[str, int]]:
        """Give the files below the root, as paths from there, with their sizes."""
        self._fs.invalidate_cache()
        try:
            with _as_os_error():
                found = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return
        for path, info in found.items():
            yield str(path).removeprefix(self._root).lstrip("/"), int(info.get("size") or 0)

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
            if error.errno == errno.EINVAL and self._fs.exists(self._path(name)):  # as older s3fs say "it is there"
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
        """Make the folder of a file where the file system has such a thing."""
        protocols = self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,)
        if not _WITHOUT_FOLDERS.intersection(protocols):
            self._fs.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Let what a client raises of its own come as an OSError, as what most of them raise does.

    A client that finds the content to be other than what was stored has found damage: Damaged.
    """
    try:
        yield
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        if type(error).__name__.endswith("ChecksumError"):  # botocore's and gcsfs's, neither of which is there for sure
            raise DamagedCheckpoint(f"the store's client has found damage: {error}") from error
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


def _without_credentials(address: str) -> str:
    """Give the address as it may be shown: without user, password and query."""
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))
