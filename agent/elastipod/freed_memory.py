"""Memory that this process frees, and has again without asking the system for it. Imports no torch: the agent uses it as well."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MAP_THRESHOLD = -1, -3  # of mallopt(3)
MOST_MAP_THRESHOLD = 32 << 20  # that each glibc takes


def keep_freed_memory(num_bytes: int, *, block_bytes: int) -> bool:
    """Let the C library keep freed memory instead of returning it to the system. Gives False where it cannot: only glibc does.

    num_bytes: that it keeps of the heap. block_bytes: from which size on a block is not part of the heap, but mapped by itself and
    returned when it is freed; at most MOST_MAP_THRESHOLD.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all(
        mallopt(name, value) == 1 for name, value in ((_MAP_THRESHOLD, block_bytes), (_TRIM_THRESHOLD, num_bytes))
    )
