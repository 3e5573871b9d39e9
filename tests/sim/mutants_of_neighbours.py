"""Mistakes to plant in what keeps the jobs of one operator apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from elastipod_operator.core.names import LABEL_UID
from elastipod_operator.kube import store
from elastipod_operator.kube.store import Job, Store
from elastipod_operator.reconciler import Reconciler


def forget_all_jobs_with_one(patch: pytest.MonkeyPatch) -> None:
    real = Reconciler.forget

    def forget(self: Reconciler, uid: str) -> None:
        real(self, uid)
        for job_task in self._job_tasks.values():
            if job_task.task is not None:
                job_task.task.cancel()
        self._job_tasks.clear()

    patch.setattr(Reconciler, "forget", forget)


def tell_pods_by_the_name_of_their_job(patch: pytest.MonkeyPatch) -> None:
    real = Store.put_pod

    def put_pod(self: Store, body: Mapping[str, Any]) -> str | None:
        first = next(iter(self.jobs), "")
        labels = {**body["metadata"]["labels"], LABEL_UID: first}
        return real(self, {**body, "metadata": {**body["metadata"], "labels": labels}})

    patch.setattr(Store, "put_pod", put_pod)
    patch.setattr(store, "_is_owned", lambda body, job: True)


def stop_with_the_first_job_that_fails(patch: pytest.MonkeyPatch) -> None:
    real = Reconciler._after_failure

    async def after_failure(self: Reconciler, job: Job, error: Exception) -> None:
        self._closed = True
        await real(self, job, error)

    patch.setattr(Reconciler, "_after_failure", after_failure)
