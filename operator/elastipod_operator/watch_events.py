"""Puts the events of the watches of jobs, pods and nodes into the store, and wakes the affected jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .kube.reading import name_of, uid_of
from .kube.store import Store
from .reconciler import Reconciler

Body = Mapping[str, Any]


class WatchEvents:
    """Takes the events of the watches. is_gone: the object was deleted."""

    def __init__(self, store: Store, reconciler: Reconciler) -> None:
        self._store = store
        self._reconciler = reconciler

    def job(self, body: Body, *, is_gone: bool) -> None:
        """Take an event of a job."""
        uid = uid_of(body)
        if is_gone:
            self._reconciler.forget(uid)
        elif self._reconciler.jobs.take(body):
            self._reconciler.wake(uid)

    def pod(self, body: Body, *, is_gone: bool) -> None:
        """Take an event of a pod."""
        if is_gone:
            self._reconciler.forget_pod(uid_of(body))
            job = self._store.drop_pod(body)
        else:
            job = self._store.put_pod(body)
        if job is not None:
            self._reconciler.wake(job)

    def node(self, body: Body, *, is_gone: bool) -> None:
        """Take an event of a node."""
        jobs = self._store.drop_node(name_of(body)) if is_gone else self._store.put_node(body)
        for job in jobs:
            self._reconciler.wake(job)
