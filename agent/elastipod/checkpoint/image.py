"""The bytes of a memory image: one rank's part of the state in host memory, and the checksums of its chunks.

An image is a file of raw tensor bytes in a memory file system, which outlives the process, or plain memory. Every block of
every chunk has a checksum, which readers compare with what has arrived in their own memory.
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

CHECKSUM_BLOCK = 1 << 20  # bytes of a chunk that share a checksum: few enough to be in the cache when they are summed


class MappedImage:
    """The bytes of an image, mapped into this process, or plain memory if no file is wanted."""

    def __init__(self, mapping: MappedMemory, size: int) -> None:
        self.size = size
        self._mapping = mapping
        self._registered = 0
        self._is_asked = False
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        if size:
            self.bytes = torch.frombuffer(mapping.bytes, dtype=torch.uint8)

    @classmethod
    def create(cls, path: Path | None, size: int) -> MappedImage:
        """Create memory for an image, in a new file or, with None, in this process only. All its pages are allocated.

        Raises OSError when there is not enough memory.
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
        """Register the memory with CUDA for direct copies. If that is refused, copies still work, but more slowly."""
        if not self.size or self._is_asked:
            return
        self._is_asked = True
        pointer = self.bytes.data_ptr()
        error = int(torch.cuda.cudart().cudaHostRegister(pointer, self.bytes.numel(), 0))  # type: ignore[no-untyped-call]
        if error == 0:
            self._registered = pointer
            return
        log.warning(
            "copies of the state to host memory are slow: the memory cannot be registered with CUDA (error %d)", error
        )
        with suppress(RuntimeError):  # else torch's next check of CUDA's last error would report this one
            torch.zeros(1, device=device)

    def chunk_bytes(self, chunk: Chunk, position: int) -> torch.Tensor:
        """Return the bytes of a chunk."""
        return self.bytes[position : position + chunk.num_bytes]

    def chunk_tensor(self, chunk: Chunk, position: int) -> torch.Tensor:
        """Return the part of the image that holds a chunk, as a tensor of its type and sizes."""
        return view_as_chunk(self.chunk_bytes(chunk, position), chunk)

    def sums(self, chunks: Iterable[tuple[Chunk, int]]) -> str:
        """Return the value of `ImageHeader.sums`. chunks: with their positions."""
        raws = (self.chunk_bytes(chunk, position) for chunk, position in chunks)
        return "".join(f"{found:016x}" for raw in raws for found in block_sums(raw))

    def close(self) -> None:
        """Release the memory. Tensors of `chunk_tensor` must not be used afterwards: torch does not keep the mapping alive."""
        self._unregister()
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._mapping.close()

    def _unregister(self) -> None:
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered)  # type: ignore[no-untyped-call]
            self._registered = 0

    def __del__(self) -> None:
        with suppress(Exception):  # CUDA may be gone when the interpreter exits
            self._unregister()

    def __enter__(self) -> MappedImage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def view_as_chunk(raw: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Return the bytes of a chunk as a tensor of its type and sizes."""
    dtype: torch.dtype = getattr(torch, chunk.dtype)
    return raw.view(dtype).view(chunk.sizes)


def checksum(raw: torch.Tensor) -> int:
    """Return the sum of all 64-bit words and the remaining bytes, modulo 2**64: as fast as memory, and it detects any changed word.

    The checksums of parts add up to that of the whole, if each part but the last consists of whole words.
    """
    aligned = raw.numel() // 8 * 8
    words = int(raw[:aligned].view(torch.int64).sum().item()) if aligned else 0
    return (words + int.from_bytes(bytes(raw[aligned:].tolist()), "little")) % (1 << 64)


def block_sums(raw: torch.Tensor) -> list[int]:
    """Return the checksum of each block of a chunk's bytes."""
    return [checksum(raw[at : at + CHECKSUM_BLOCK]) for at in range(0, len(raw), CHECKSUM_BLOCK)]


def num_checksum_blocks(chunk: Chunk) -> int:
    return -(-chunk.num_bytes // CHECKSUM_BLOCK)
