"""Files in memory, mapped into this process, in large pages where the kernel can provide them quickly.

With pages of 4 KiB, a new process spends more time on page faults than on copying an image. A memory file system uses large
pages only if it is mounted so, which a pod cannot request; but Linux 6.1 and later can collapse the pages of a file into
large ones on request. Processes that map the file later at a suitable address use them too.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import time
import weakref
from pathlib import Path

_MAP_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # allocate the pages instead of one fault for each
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # values on Linux
_MADV_COLLAPSE = 25  # madvise: use large pages now, whatever the system's setting; EINVAL before Linux 6.1
_SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MAX_PAGE_BYTES = 64 << 20  # with pages of 64 KiB a large one has 512 MiB, which is never available
_PAGES_PER_CALL = 64  # large pages per call; each call waits for all processors
_MAX_S_PER_PAGE = 0.005  # on average; several times what small pages take
_MAX_S_PER_FILE = 20.0


class MappedMemory:
    """The bytes of a file, or anonymous memory, mapped at an address that suits large pages. Raises OSError.

    Forked processes do not get the mapping: workers of a data loader would hold the memory of deleted images for as long as they live.
    """

    def __init__(self, descriptor: int | None, length: int, *, is_writable: bool = True) -> None:
        """Map ``length`` bytes. A writable mapping is populated; a file must have all its pages before.

        For a reader, populating is slower than page faults, which map 16 pages each.
        """
        reserved = length + (large_page_bytes() or mmap.PAGESIZE)
        start = _map(None, reserved, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        self._address = start + -start % (large_page_bytes() or mmap.PAGESIZE)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        flags = _MAP_FIXED | (_MAP_POPULATE if is_writable else 0)
        flags |= mmap.MAP_SHARED if descriptor is not None else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            _map(self._address, length, protection, flags, -1 if descriptor is None else descriptor)
        except OSError:
            _libc().munmap(start, reserved)
            raise
        _libc().madvise(self._address, length, mmap.MADV_DONTFORK)
        self.bytes = (ctypes.c_char * length).from_address(self._address)
        self._unmap = weakref.finalize(self.bytes, _unmap, os.getpid(), start, reserved)
        self._unmap.atexit = False  # other threads may still use it, and the process is ending

    def collapse(self, start: int, length: int) -> bool:
        """Collapse these bytes of the file into large pages; return whether the kernel did so."""
        return int(_libc().madvise(self._address + start, length, _MADV_COLLAPSE)) == 0

    def close(self) -> None:
        """Unmap the memory now; otherwise it is unmapped with the last user of `bytes`."""
        self._unmap()


def allocate_file(descriptor: int, length: int) -> None:
    """Allocate the memory of an empty file, in large pages as far as they are quickly available. Raises OSError."""
    os.ftruncate(descriptor, length)
    if 0 < large_page_bytes() <= length:
        _collapse_pages(descriptor, length)
    os.posix_fallocate(descriptor, 0, length)  # a full file system must fail here, not with SIGBUS later


def _collapse_pages(descriptor: int, length: int) -> None:
    """Collapse large pages from the start, until one is refused or they take too long.

    Each needs one small page first, because an empty range is refused. The kernel then clears the rest and copies nothing, which
    is several times faster than small pages, unless it must move much memory to make room.
    """
    size = large_page_bytes()
    step = size * _PAGES_PER_CALL
    mapping = MappedMemory(descriptor, length, is_writable=False)
    try:
        began = time.monotonic()
        for start in range(0, length // size * size, step):
            end = min(start + step, length // size * size)
            for place in range(start, end, size):
                os.pwrite(descriptor, b"\0", place)
            patience = min(_MAX_S_PER_FILE, end // size * _MAX_S_PER_PAGE)
            if not mapping.collapse(start, end - start) or time.monotonic() - began > patience:
                break
    finally:
        mapping.close()


@functools.cache
def large_page_bytes() -> int:
    """Return the size of a large page, 0 if there are none."""
    try:
        size = int(_SIZE_FILE.read_text())
    except (OSError, ValueError):
        return 0
    return size if size <= _MAX_PAGE_BYTES else 0


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _unmap(owner: int, start: int, length: int) -> None:
    if os.getpid() == owner:  # in a forked process something else may be at these addresses
        _libc().munmap(start, length)


def _map(address: int | None, length: int, protection: int, flags: int, descriptor: int) -> int:
    found = int(_libc().mmap(address, length, protection, flags, descriptor, 0) or 0)
    if found == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found
