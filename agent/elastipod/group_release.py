"""Releases process groups of gloo in a thread of their own: each takes 15 to 40 ms to end, in which nothing else would happen.

gloo's threads look for their end only every 10 ms, so the time is spent waiting, and a rank has up to four groups.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

_releasing: list[threading.Thread] = []


def release_in_background(held: list[Any]) -> None:
    """Empty a list whose objects hold the last references to gloo's part of process groups. Returns at once."""
    if not threading.main_thread().is_alive():
        # The interpreter is ending, and a thread could not come back into it. The system ends what groups hold with the process.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
        return
    # Not a daemon: a process that ends waits for it, because it would otherwise return into an interpreter that is gone.
    thread = threading.Thread(target=held.clear, name="elastipod-group-release")
    thread.start()
    _releasing.append(thread)


def wait_until_released() -> None:
    """Return once all groups that were given so far have ended. A group does not end while one of its collectives runs."""
    while _releasing:
        _releasing.pop().join()
