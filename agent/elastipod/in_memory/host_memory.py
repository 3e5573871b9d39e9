"""Host memory that a newcomer has from the system before it joins.

The system gives memory page by page, when a page is first written to. Without a reserve a newcomer pays for all pages of activations and
gradients in its first step, for which all other ranks wait: half of what it computed there in the demo.
"""

from __future__ import annotations

from pathlib import Path

import torch

from elastipod.freed_memory import MOST_MAP_THRESHOLD, keep_freed_memory

MOST_RESERVED_BYTES = 1 << 30
BLOCK_BYTES = 1 << 20
_PAGE_BYTES = 4096
_FREED_BYTES = 2 * MOST_MAP_THRESHOLD  # beside the reserve; glibc comes to keep as much by itself
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
    kept = blocks * BLOCK_BYTES + _FREED_BYTES
    if blocks <= 0 or not keep_freed_memory(kept, block_bytes=MOST_MAP_THRESHOLD):
        return 0
    held = [torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cpu") for _ in range(blocks)]
    for block in held:
        block[::_PAGE_BYTES] = 0
    return blocks * BLOCK_BYTES
