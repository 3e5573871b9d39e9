"""Another thread that has done something and lives on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.patience import PATIENCE_S


@contextmanager
def a_thread_that(acts: Callable[[], object], *, waits: bool = True) -> Iterator[threading.Thread]:
    """Have another thread act and live on until the block ends. waits: until it has acted."""
    has_acted, release = threading.Event(), threading.Event()

    def run() -> None:
        acts()
        has_acted.set()
        assert release.wait(PATIENCE_S)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert not waits or has_acted.wait(PATIENCE_S)
        yield thread
    finally:
        release.set()
        thread.join(PATIENCE_S)
