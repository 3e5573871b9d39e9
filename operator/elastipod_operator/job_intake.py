"""Takes jobs as the watch and the answers of the API server show them, and lets go of those that another controller runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .core.snapshot import ObservedJob
from .kube.reading import uid_of
from .kube.store import Store, version_of

Body = Mapping[str, Any]


class JobIntake:
    """Puts jobs into the store. The watch may be late, so an answer may be the first to show that a job was given away.

    runs: whether this operator runs a job. hand_over: called with a job that it has run so far, and its object. forget: drops
    everything about a job.
    """

    def __init__(
        self,
        store: Store,
        forget: Callable[[str], None],
        runs: Callable[[Body], bool],
        hand_over: Callable[[ObservedJob, Body], None],
    ) -> None:
        self._store = store
        self._forget = forget
        self._runs = runs
        self._hand_over = hand_over
        self._let_go: dict[str, int] = {}
        """By UID the version of each job at which it was let go: a late watch shows older ones."""

    def take(self, body: Body) -> bool:
        """Take a job; False if that is no news, or another controller runs it."""
        uid, version = uid_of(body), version_of(body)
        if version < self._let_go.get(uid, -1):
            return False
        if self._runs(body):
            return self._store.put_job(body)
        known = self._store.jobs.get(uid)
        if known is not None and version >= known.version:  # else it has come back since
            self._forget(uid)
            self._let_go[uid] = version
            self._hand_over(known.fact, body)
        return False

    def drop(self, uid: str) -> None:
        """Forget that a job was let go."""
        self._let_go.pop(uid, None)
