"""Back-off after failures: doubled each time, with jitter that depends only on its arguments."""

from __future__ import annotations

import zlib
from datetime import timedelta

SPREAD = 0.25


def jitter(key: str, number: int) -> float:
    """Give a number between 0 and 1 that is the same for the same arguments and differs between jobs and attempts."""
    return zlib.crc32(f"{key}/{number}".encode()) / 2**32


def backoff(base: timedelta, limit: timedelta, tries: int, key: str) -> timedelta:
    """Give the wait after `tries` failures (1 or more): base * 2^(tries-1), at most `limit`, and up to a quarter more."""
    return doubled(base, limit, tries) * (1 + SPREAD * jitter(key, tries))


def doubled(base: timedelta, limit: timedelta, tries: int) -> timedelta:
    """Give base * 2^(tries-1), at most `limit`; the base for less than one try."""
    times = 2.0 ** min(max(tries, 1) - 1, 16)
    # The product may exceed the range of timedelta.
    return limit if base > limit / times else min(limit, base * times)


def longest_wait(limit: timedelta) -> timedelta:
    """Give the longest back-off with this limit."""
    return limit * (1 + SPREAD)
