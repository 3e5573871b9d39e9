"""Digests of a state that stands still: computed once, while this rank waits for others, so that a comparison need not wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

from elastipod.in_memory.members import Members
from elastipod.torch_compat import accelerators_of, current_streams


class DigestsAtRest:
    """The digests of one rank's members. Code that changes a member calls `forget` first.

    progress: called after each tensor, by the thread too, so that a large state does not exceed the limit of a phase.
    """

    def __init__(self, members: Members, progress: Callable[[], None]) -> None:
        self._members, self._progress = members, progress
        self._known: dict[str, str] = {}
        self._is_whole = False  # those of plain values are known, too
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """The state stands still from now on: compute its digests in a thread, once what the caller has queued on it has run."""
        self.forget()
        queued = current_streams(accelerators_of(self._members.model))
        thread = threading.Thread(target=self._compute, args=(queued,), name="elastipod-digests", daemon=True)
        thread.start()
        self._thread = thread

    @property
    def has_begun(self) -> bool:
        """Whether digests are being computed, or some are known."""
        return self._thread is not None or bool(self._known)

    def forget(self, *, but: Collection[str] = ()) -> None:
        """All members are about to change, but for tensors with these keys."""
        self._join()
        self._is_whole = False
        self._known = {key: each for key, each in self._known.items() if key in but}

    def digests(self) -> dict[str, str]:
        """Give the digests of now."""
        self._join()
        if not self._is_whole:
            self._known, self._is_whole = self._members.digests(self._known, self._progress), True
        return dict(self._known)

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _compute(self, queued: list[Any]) -> None:
        for each in queued:  # a thread has streams of its own, which wait for no others
            each.synchronize()
        self._known = self._members.digests(progress=self._progress)
        self._is_whole = True
