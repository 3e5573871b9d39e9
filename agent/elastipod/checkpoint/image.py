"""Memory images: one rank's part of the state in host memory, in files that outlive the process where there is a place.

An image is a file of raw tensor bytes in a memory file system and a header beside it. The header appears, by a rename,
when the image is whole, and is taken away before the image is written anew: a process may die anywhere. It holds sums of
all stretches of each chunk, which whoever reads one compares with what has arrived in its own memory.
What is read from here is JSON and raw numbers; nothing is unpickled.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

from elastipod.checkpoint.mapped_memory import MappedMemory, allocate_file
from elastipod.checkpoint.save_plan import Chunk

log = logging.getLogger(__name__)

CHECKSUM_BLOCK = (
    1 << 20
)  # bytes of a chunk with a checksum of their own; they are still in the cache when they are summed


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
