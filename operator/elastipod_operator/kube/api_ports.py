"""What decisions need of the API server, and no more: the operator gives the client (`Api`, `Events`), the simulator its models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Protocol

from ..core.actions import JobEvent
from ..core.snapshot import ObservedJob

Body = dict[str, Any]


class RawCalls(Protocol):
    """Calls by method and path, as those around queues are made. All raise as `Api` does."""

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
        """Give the events of a watch until the API server ends it; one that falls silent ends with TimeoutError."""


class PodCalls(Protocol):
    """What making and deleting pods takes."""

    async def list_pods(self, namespace: str, job_uid: str) -> tuple[list[Body], int]:
        """Give the pods of a job, consistently read, and the version of the list."""

    async def create_pod(self, manifest: Mapping[str, Any]) -> Body:
        """Create a pod; 409 means that it is there already."""

    async def create_secret(self, manifest: Mapping[str, Any]) -> None:
        """Create a Secret; 409 means that it is there already."""

    async def delete_pod(self, namespace: str, name: str, uid: str, *, force: bool, grace_s: int | None = None) -> Body:
        """Delete a pod if it is still the same one; gives the pod, or a Status when it is gone at once."""


class JobCalls(RawCalls, PodCalls, Protocol):
    """All that the care for jobs takes."""

    async def effective_job(self, namespace: str, name: str) -> Body:
        """Give a job as it is now."""

    async def patch_metadata(self, job: ObservedJob, version: str, metadata: Mapping[str, Any]) -> Body:
        """Write annotations or finalizers if the job is still at `version`; otherwise the answer is 409."""

    async def apply_status(self, job: ObservedJob, status: Mapping[str, Any]) -> Body:
        """Apply the whole status, of which we are the only writer."""

    async def delete_job(self, job: ObservedJob) -> None:
        """Delete the job if it is still the same one."""


class EventSink(Protocol):
    """Where Events about jobs go; none is waited for."""

    def record(self, job: ObservedJob, events: Iterable[JobEvent]) -> None:
        """Have Events written soon, with the time of now; none after the end."""

    async def close(self) -> None:
        """Write those that wait, for a short time, and no more after that."""
