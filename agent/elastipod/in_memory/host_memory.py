"""Host memory that a newcomer has from the system before it joins.

The system gives memory page by page, when a page is first written to. Without a reserve a newcomer pays for all pages of activations and
gradients in its first step, for which all other ranks wait: half of what it computed there in the demo.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

MOST_RESERVED_BYTES = 1 << 30
BLOCK_BYTES = 1 << 20
_PAGE_BYTES = 4096
# Of mallopt(3). Larger blocks are mapped one by one and are new to the system each time.
_TRIM_THRESHOLD, _MAP_THRESHOLD = -1, -3
_MOST_MAP_THRESHOLD = 32 << 20  # that glibc takes, and comes to by itself where such blocks are freed
_MOST_TRIM_THRESHOLD = 2 * _MOST_MAP_THRESHOLD  # that glibc comes to by itself
_STATUS = Path("/proc/self/status")


def private_bytes() -> int:
    """Give how much memory of its own this process has from the system; 0 where the system does not tell."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    found = next((line.split() for line in lines if line.startswith("RssAnon:")), ["", "0"])
    return int(found[1]) << 10


def reserve(num_bytes: int) -> int:
    """Have more memory from the system, and keep it free for later tensors; give how many bytes, at most MOST_RESERVED_BYTES.

    The thread that trains calls this, since each thread has memory of its own. Nothing is reserved where the C library is not glibc. From
    then on, this process gives memory back to the system only beyond what it has reserved here.
    """
    blocks = min(num_bytes, MOST_RESERVED_BYTES) // BLOCK_BYTES
    if blocks <= 0 or not _keep_freed_memory(blocks * BLOCK_BYTES):
        return 0
    held = [torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cpu") for _ in range(blocks)]
    for block in held:
        block[::_PAGE_BYTES] = 0
    return blocks * BLOCK_BYTES


def _keep_freed_memory(num_bytes: int) -> bool:
    """Have freed memory stay with this process. Gives False where that cannot be."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = ((_MAP_THRESHOLD, _MOST_MAP_THRESHOLD), (_TRIM_THRESHOLD, num_bytes + _MOST_TRIM_THRESHOLD))
    return all(mallopt(name, value) == 1 for name, value in settings)
