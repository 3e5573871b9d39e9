"""Files in memory, mapped into this process, in large pages where the kernel has them quickly to give.

A page of 4 KiB at a time, a process that has just begun spends more on finding the pages of an image than on copying them.
A memory file system gives large pages only where it is mounted for it, which a pod cannot ask for; but Linux 6.1 and later
can be asked to gather pages of a file into large ones. Whoever maps the file afterwards has them, at an address that fits.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import time
import weakref
from pathlib import Path

_MAP_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # have the pages there, instead of one fault for each
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # of Linux
_MADV_COLLAPSE = 25  # madvise: gather into large pages, now, whatever the system's setting is; EINVAL before Linux 6.1
_SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MAX_PAGE_BYTES = 64 << 20  # of a large page; where pages are 64 KiB a large one has 512 MiB, which is never to be had
_PAGES_PER_CALL = 64  # large pages that are asked for in one call, each of which waits for all processors
_MAX_S_PER_PAGE = 0.005  # for one large page, on average: some times what as much in small pages takes
_MAX_S_PER_FILE = 20.0  # for the large pages of one file


class MappedMemory:
    """The bytes of a file, or of no file, at a place in this process where large pages fit. Raises OSError."""

    def __init__(self, descriptor: int | None, length: int, *, is_writable: bool = True) -> None:
        """Map ``length`` bytes. What is writable has all its pages afterwards; a file must have them before.

        For a reader this would be slower than its own faults, which map 16 pages each.
        """
        room = length + (large_page_bytes() or mmap.PAGESIZE)
        start = _map(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        self._address = start + -start % (large_page_bytes() or mmap.PAGESIZE)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        flags = _MAP_FIXED | (_MAP_POPULATE if is_writable else 0)
        flags |= mmap.MAP_SHARED if descriptor is not None else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            _map(self._address, length, protection, flags, -1 if descriptor is None else descriptor)
        except OSError:
            _libc().munmap(start, room)
            raise
        self.bytes = (ctypes.c_char * length).from_address(self._address)
        self._unmap = weakref.finalize(self.bytes, _libc().munmap, start, room)
        self._unmap.atexit = False  # other threads may still use it, and the process ends anyway

    def collapse(self, start: int, length: int) -> bool:
        """Have these bytes of the file in large pages; gives whether the kernel did so."""
        return int(_libc().madvise(self._address + start, length, _MADV_COLLAPSE)) == 0

    def close(self) -> None:
        """Let the memory go now; else it goes with the last that uses `bytes`."""
        self._unmap()


def allocate_file(descriptor: int, length: int) -> None:
    """Give an empty file its memory, in large pages as far as they are quickly to be had. Raises OSError when there is not enough."""
    os.ftruncate(descriptor, length)
    if 0 < large_page_bytes() <= length:
        _collapse_pages(descriptor, length)
    os.posix_fallocate(descriptor, 0, length)  # a full memory file system must say so now, not by SIGBUS


def _collapse_pages(descriptor: int, length: int) -> None:
    """Have large pages from the first byte on, until one is refused or they have taken too long.

    Of each there must be one small page: an empty stretch is refused. The rest is then cleared, and nothing is copied, so
    that this is several times quicker than small pages, unless the kernel must move much to make the room.
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
    """Give the size of a large page, 0 where there are none."""
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


def _map(address: int | None, length: int, protection: int, flags: int, descriptor: int) -> int:
    found = int(_libc().mmap(address, length, protection, flags, descriptor, 0) or 0)
    if found == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found
