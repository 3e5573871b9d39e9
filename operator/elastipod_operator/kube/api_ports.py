"""The part of the API server that the shell uses. The operator passes its client (`Api`, `Events`), the simulator its models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Protocol

from ..core.actions import JobEvent
from ..core.snapshot import ObservedJob

Body = dict[str, Any]


class RawCalls(Protocol):
    """Calls by method and path, for queues. All raise as `Api` does."""

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | str | None = None,
        *,
        query: list[tuple[str, str]] | None = None,
        content_type: str = "application/json",
    ) -> Body:
        """Make one call and give the answer's body."""

    def watch(self, path: str, query: list[tuple[str, str]], limit_s: float) -> AsyncIterator[Body]:
        """Give the events of a watch until the API server ends it. A silent watch ends with TimeoutError."""


class PodCalls(Protocol):
    """Calls that create and delete pods."""

    async def list_pods(self, namespace: str, job_uid: str) -> tuple[list[Body], int]:
        """Give the pods of a job, consistently read, and the version of the list."""

    async def create_pod(self, manifest: Mapping[str, Any]) -> Body:
        """Create a pod; 409 if it exists."""

    async def create_secret(self, manifest: Mapping[str, Any]) -> None:
        """Create a Secret; 409 if it exists."""

    async def delete_pod(self, namespace: str, name: str, uid: str, *, force: bool, grace_s: int | None = None) -> Body:
        """Delete a pod if it is still the same one; gives the pod, or a Status if it is gone at once."""


class JobReads(Protocol):
    """The call that reads one job."""

    async def effective_job(self, namespace: str, name: str) -> Body:
        """Give a job as it is now."""


class JobCalls(RawCalls, PodCalls, JobReads, Protocol):
    """All calls of a reconcile pass."""

    async def patch_metadata(self, job: ObservedJob, version: str, metadata: Mapping[str, Any]) -> Body:
        """Write annotations or finalizers if the job is still at `version`; otherwise the answer is 409."""

    async def apply_status(self, job: ObservedJob, status: Mapping[str, Any]) -> Body:
        """Apply the whole status; the operator is its only writer."""

    async def delete_job(self, job: ObservedJob) -> None:
        """Delete the job if it is still the same one."""


class EventSink(Protocol):
    """Writes Events about jobs in the background."""

    def record(self, job: ObservedJob, events: Iterable[JobEvent]) -> None:
        """Queue Events with the present time; none after `close`."""

    async def close(self) -> None:
        """Write queued Events for a short time; then drop the rest."""
