"""Releases process groups of gloo in a thread of their own: each takes 15 to 40 ms to end, in which nothing else would happen.

gloo's threads look for their end only every 10 ms, so the time is spent waiting, and a rank has up to four groups.
"""

from __future__ import annotations

import threading
from typing import Any

_releasing: list[threading.Thread] = []


def release_in_background(held: list[Any]) -> None:
    """Empty a list whose objects hold the last references to gloo's part of process groups. Returns at once."""
    # Not a daemon: a process that ends waits for it, because it would otherwise return into an interpreter that is gone.
    thread = threading.Thread(target=held.clear, name="elastipod-group-release")
    thread.start()
    _releasing.append(thread)


def wait_until_released() -> None:
    """Return once all groups that were given so far have ended. A group does not end while one of its collectives runs."""
    while _releasing:
        _releasing.pop().join()
