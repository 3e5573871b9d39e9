"""Memory images: one rank's part of the state in host memory, in files that outlive the process where there is a place.

An image is a file of raw tensor bytes in a memory file system and a header beside it. The header appears, by a rename,
when the image is whole, and is taken away before the image is written anew: a process may die anywhere. It holds sums of
all stretches of each chunk, which whoever reads one compares with what has arrived in its own memory.
What is read from here is JSON and raw numbers; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from elastipod.checkpoint.mapped_memory import MappedMemory, allocate_file
from elastipod.checkpoint.save_plan import Chunk, SavePlan
from elastipod.checkpoint.store import CheckpointId

log = logging.getLogger(__name__)

FORMAT = 3
CHECKSUM_BLOCK = (
    1 << 20
)  # bytes of a chunk with a checksum of their own; they are still in the cache when they are summed
SLOTS = 2
STALE_AFTER_S = 3 * 86_400.0  # images of a job that has not saved for so long are deleted by the next one there
MEMORY_ENV = "ELASTIPOD_MEMORY_DIR"
DEFAULT_ROOT = "/dev/shm"  # noqa: S108  # memory is what is wanted
_FOLDER = "elastipod-images-"
_HEADER = re.compile(r"image-gen-(\d{6,})-rank-(\d{5,})-slot-(\d)\.json")
_SUMS = re.compile(r"(?:[0-9a-f]{16})*")
_MAX_HEADER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What an image is. plan: digest of the plan that says where in it which chunk lies; size: bytes; values: packed, by key.

    sums: `checksum` of each block of each chunk, 16 hex digits, in the plan's order. durable: newest durable checkpoint that the run knew
    to be there, this one itself once it is durable too; who deletes that one has rolled back by hand. wants_durable: it was to be
    written to durable storage too.
    """

    id: CheckpointId
    rank: int
    slot: int
    world_size: int
    plan: str
    size: int
    sums: str
    durable: CheckpointId | None
    values: Mapping[str, str]
    extra: Mapping[str, Any]
    wants_durable: bool = False

    @property
    def name(self) -> str:
        return image_name(self.id.generation, self.rank, self.slot)

    def to_json(self) -> str:
        return json.dumps(
            {
                "format": FORMAT,
                "step": self.id.step,
                "generation": self.id.generation,
                "rank": self.rank,
                "slot": self.slot,
                "world_size": self.world_size,
                "plan": self.plan,
                "size": self.size,
                "sums": self.sums,
                "durable": self.durable and [self.durable.step, self.durable.generation],
                "values": dict(self.values),
                "extra": dict(self.extra),
                "wants_durable": self.wants_durable,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> ImageHeader:
        """Read a header. Raises ValueError, KeyError or TypeError when it is none of ours."""
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']}, this library reads {FORMAT}")
        if not _SUMS.fullmatch(data["sums"]):
            raise ValueError("its sums are none of ours")
        return cls(
            CheckpointId(int(data["step"]), int(data["generation"])),
            int(data["rank"]),
            int(data["slot"]),
            int(data["world_size"]),
            str(data["plan"]),
            int(data["size"]),
            str(data["sums"]),
            None if data["durable"] is None else CheckpointId(*map(int, data["durable"])),
            dict(data["values"]),
            dict(data["extra"]),
            bool(data.get("wants_durable", False)),
        )


def image_name(generation: int, rank: int, slot: int) -> str:
    return f"image-gen-{generation:06d}-rank-{rank:05d}-slot-{slot}"


class MemoryDirectory:
    """The images of one job on one node, shared by the ranks there. Readable by this user only."""

    def __init__(self, root: str | os.PathLike[str], job: str) -> None:
        """Make the folder for a job (named by anything that is its own). Raises OSError."""
        self.path = Path(root) / f"{_FOLDER}{hashlib.sha256(job.encode()).hexdigest()[:20]}"
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(self.path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(f"{self.path} belongs to somebody else")

    def node(self) -> str:
        """Give the identity of this memory: alike in all processes that share it, and in no others."""
        found = os.stat(self.path)
        boot = Path("/proc/sys/kernel/random/boot_id")
        host = boot.read_text().strip() if boot.exists() else os.uname().nodename
        return hashlib.sha256(f"{host} {found.st_dev} {found.st_ino}".encode()).hexdigest()[:16]

    def headers(self) -> list[ImageHeader]:
        """List the images that are whole. What cannot be read is no image; raises OSError where the folder cannot."""
        found: list[ImageHeader] = []
        for name in os.listdir(self.path):
            match = _HEADER.fullmatch(name)
            if match is None:
                continue
            try:
                if os.stat(self.path / name).st_size <= _MAX_HEADER_BYTES:
                    header = ImageHeader.from_json((self.path / name).read_text(encoding="utf-8"))
                    if f"{header.name}.json" == name:
                        found.append(header)
            except (OSError, ValueError, KeyError, TypeError):
                continue  # an image that cannot be read does not exist for us
        return found

    def publish(self, header: ImageHeader) -> None:
        """Let a whole image appear."""
        self._write(f"{header.name}.json", header.to_json())

    def withdraw(self, name: str) -> None:
        """Take an image's header away; its bytes may be written over from now on."""
        (self.path / f"{name}.json").unlink(missing_ok=True)

    def note_durable(self, headers: dict[str, ImageHeader], of: CheckpointId) -> None:
        """Write into whole images, by name, that there is a newer durable checkpoint now; those without room for that go."""
        for name, header in list(headers.items()):
            headers[name] = replace(header, durable=of)
            try:
                self.publish(headers[name])
            except OSError as error:
                log.warning("the copy of step %d in memory is given up: %s", header.id.step, error)
                del headers[name]
                with suppress(OSError):
                    self.withdraw(name)

    def store_plan(self, plan: SavePlan) -> None:
        """Keep the plan that images refer to."""
        if not (self.path / f"plan-{plan.digest}.json").exists():
            self._write(f"plan-{plan.digest}.json", plan.to_json())

    def plan(self, digest: str) -> SavePlan | None:
        """Give a plan, None when it is not here or is not what its name says."""
        try:
            plan = SavePlan.from_json((self.path / f"plan-{digest}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return plan if plan.digest == digest else None

    def remove_stale_images(self, keep: Iterable[str], *, older_than: int) -> None:
        """Delete the images of generations before ``older_than``, but for those named, plans that no image needs, and drafts.

        What cannot be deleted stays; the next save tries again.
        """
        kept = set(keep)
        try:
            names = os.listdir(self.path)
            needed = {f"plan-{header.plan}.json" for header in self.headers()}
        except OSError:
            return
        for name in names:
            found = re.fullmatch(r"\.?(image-gen-(\d+)-rank-\d+-slot-\d)\..*", name)
            is_old = found is not None and int(found[2]) < older_than and found[1] not in kept
            if is_old or (name.startswith(("plan-", ".plan-")) and name not in needed):
                with suppress(OSError):
                    (self.path / name).unlink()

    def size_of(self, names: Iterable[str]) -> int:
        """Give the bytes of memory that images hold, whole or not; what is not there holds none."""
        size = 0
        for name in names:
            with suppress(FileNotFoundError):
                size += os.stat(self.path / f"{name}.bin").st_blocks * 512
        return size

    def remove_unfinished(self, names: Iterable[str]) -> None:
        """Give back the memory of images that have no header."""
        for name in names:
            if not (self.path / f"{name}.json").exists():
                with suppress(OSError):
                    (self.path / f"{name}.bin").unlink()

    def open(self, header: ImageHeader) -> MappedImage:
        """Open an image to read it. Raises ValueError, in a sentence, when it is not there or too short."""
        path = self.path / f"{header.name}.bin"
        try:
            return MappedImage.open(path, header.size)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error

    def _write(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}-{secrets.token_hex(4)}"  # pods that share the folder may have equal pids
        try:
            temporary.write_text(text, encoding="utf-8")
            os.rename(temporary, self.path / name)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


class MappedImage:
    """The bytes of an image, mapped into this process; also a plain piece of memory where no file is wanted."""

    def __init__(self, mapping: MappedMemory, size: int) -> None:
        self.size = size
        self._mapping = mapping
        self._registered = 0
        self._is_asked = False
        self.bytes = torch.frombuffer(mapping.bytes, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)

    @classmethod
    def create(cls, path: Path | None, size: int) -> MappedImage:
        """Make memory for an image, in a new file or, with None, in this process alone; its pages are there afterwards.

        Raises OSError when there is not room enough.
        """
        length = max(size, mmap.PAGESIZE)
        if path is None:
            return cls(MappedMemory(None, length), size)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            allocate_file(descriptor, length)
            return cls(MappedMemory(descriptor, length), size)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, path: Path, size: int) -> MappedImage:
        """Map an existing image to read it. Raises OSError, or ValueError when the file is shorter than ``size``."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_size < size:
                raise ValueError("it is cut short")
            return cls(MappedMemory(descriptor, max(size, mmap.PAGESIZE), is_writable=False), size)
        finally:
            os.close(descriptor)

    def pin(self, device: torch.device) -> None:
        """Let a CUDA device copy into it without a detour. Where that is refused, copies take the detour, and end in time too."""
        if not self.size or self._is_asked:
            return
        self._is_asked = True
        pointer = self.bytes.data_ptr()
        error = int(torch.cuda.cudart().cudaHostRegister(pointer, self.bytes.numel(), 0))  # type: ignore[no-untyped-call]
        if error == 0:
            self._registered = pointer
            return
        log.warning("copies of the state to host memory are slow: it cannot be registered with CUDA (error %d)", error)
        with suppress(RuntimeError):  # torch's next look at CUDA's last error would take ours for its own
            torch.zeros(1, device=device)

    def chunk_bytes(self, chunk: Chunk, position: int) -> torch.Tensor:
        """Give the bytes of a chunk."""
        return self.bytes[position : position + chunk.num_bytes]

    def chunk_tensor(self, chunk: Chunk, position: int) -> torch.Tensor:
        """Give the part of the image that holds a chunk, as a tensor of its type and sizes."""
        return view_as_chunk(self.chunk_bytes(chunk, position), chunk)

    def sums(self, chunks: Iterable[tuple[Chunk, int]]) -> str:
        """Give what `ImageHeader.sums` holds. chunks: with their positions."""
        raws = (self.chunk_bytes(chunk, position) for chunk, position in chunks)
        return "".join(
            f"{checksum(raw[at : at + CHECKSUM_BLOCK]):016x}"
            for raw in raws
            for at in range(0, len(raw), CHECKSUM_BLOCK)
        )

    def close(self) -> None:
        """Let the memory go. The tensors that `chunk_tensor` gave must not be used afterwards: torch does not hold the mapping for them."""
        self._unregister()
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._mapping.close()

    def _unregister(self) -> None:
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered)  # type: ignore[no-untyped-call]
            self._registered = 0

    def __del__(self) -> None:
        with suppress(Exception):  # at the interpreter's end CUDA may be gone already
            self._unregister()

    def __enter__(self) -> MappedImage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def view_as_chunk(raw: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Give the bytes of a chunk as a tensor of its type and sizes."""
    dtype: torch.dtype = getattr(torch, chunk.dtype)
    return raw.view(dtype).view(chunk.sizes)


def checksum(raw: torch.Tensor) -> int:
    """Add up all 64-bit words, and the bytes after the last, modulo 2**64: as quick as memory, and other for any change of one word.

    Sums of parts add up to the sum of the whole, where each part but the last is of whole words.
    """
    whole = raw.numel() // 8 * 8
    words = int(raw[:whole].view(torch.int64).sum().item()) if whole else 0
    return (words + int.from_bytes(bytes(raw[whole:].tolist()), "little")) % (1 << 64)


def num_checksum_blocks(chunk: Chunk) -> int:
    return -(-chunk.num_bytes // CHECKSUM_BLOCK)


def memory_root(wanted: str | os.PathLike[str] | bool | None, *, is_in_pod: bool) -> Path | None:
    """Decide where images go: what is asked for, else what the environment names, else /dev/shm in a pod; None for nowhere."""
    if wanted is False:
        return None
    if isinstance(wanted, (str, os.PathLike)):
        return Path(wanted)
    named = os.environ.get(MEMORY_ENV, "")
    if named:
        return Path(named)
    return Path(DEFAULT_ROOT) if wanted or is_in_pod else None


def open_memory_directory(root: Path | None, job: str) -> MemoryDirectory | None:
    """Open the job's images; None, with a warning, where that is not possible: memory is a tier that one can do without."""
    if root is None:
        return None
    try:
        directory = MemoryDirectory(root, job)
        _remove_stale_directories(directory)
        return directory
    except OSError as error:
        log.warning("no checkpoints are kept in memory: %s", error)
        return None


def _remove_stale_directories(ours: MemoryDirectory) -> None:
    """Delete what other jobs of this user left in the same memory and have not written to for days."""
    for other in ours.path.parent.glob(f"{_FOLDER}*"):
        with suppress(OSError):
            found = other.lstat()
            is_old = time.time() - found.st_mtime > STALE_AFTER_S
            if is_old and other != ours.path and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                shutil.rmtree(other, ignore_errors=True)
