"""The calls of one operator to the API server of the model. Each may be its last one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any

from tests.sim.cluster import Cluster
from tests.sim.kernel import Script
from tests.sim.kueue_api import KueueApi
from tests.sim.objects import Body
from tests.sim.process import Wait

from elastipod_operator.core.snapshot import ObservedJob
from elastipod_operator.kube.api import ApiError

if TYPE_CHECKING:
    from tests.sim.job_views import JobView


class ApiCalls:
    """What the operator's `kube.api.Api` is to its Reconciler."""

    def __init__(self, shell: JobView, cluster: Cluster) -> None:
        self._shell = shell
        self._cluster = cluster
        self._kueue = KueueApi(cluster.tenant, self._call) if cluster.tenant is not None else None

    def close(self) -> None:
        """End its watches."""
        if self._kueue is not None:
            self._kueue.close()

    async def list_pods(self, namespace: str, job_uid: str) -> tuple[list[Body], int]:
        found: tuple[list[Body], int] = await Wait(self._call(self._cluster.list_pods, writes=False))
        return found

    async def effective_job(self, namespace: str, name: str) -> Body:
        return await self._answer(self._cluster.job_body, writes=False)

    async def patch_metadata(self, job: ObservedJob, version: str, metadata: Mapping[str, Any]) -> Body:
        return await self._answer(lambda: self._cluster.patch_metadata(version, metadata))

    async def apply_status(self, job: ObservedJob, status: Mapping[str, Any]) -> Body:
        return await self._answer(lambda: self._cluster.apply_status(dict(status)))

    async def delete_job(self, job: ObservedJob) -> None:
        await Wait(self._call(self._cluster.delete_job))

    async def create_pod(self, manifest: Mapping[str, Any]) -> Body:
        await Wait(self._cluster.admission())
        return await self._answer(lambda: self._cluster.create_pod(manifest))

    async def create_secret(self, manifest: Mapping[str, Any]) -> None:
        await self._answer(lambda: self._cluster.create_secret(manifest))

    async def delete_pod(self, namespace: str, name: str, uid: str, *, force: bool, grace_s: int | None = None) -> Body:
        self._shell.note_sent_away(name, uid)
        return await self._answer(lambda: self._cluster.delete_pod(name, uid, force=force, grace_s=grace_s))

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | str | None = None,
        *,
        query: list[tuple[str, str]] | None = None,
        content_type: str = "application/json",
    ) -> Body:
        """Make a call that concerns Kueue, or the room on nodes."""
        if path in ("/api/v1/nodes", "/api/v1/pods"):
            return await self._answer(lambda: self._cluster.listed(path, dict(query or ())), writes=False)
        if self._kueue is not None:
            return await self._kueue.call(method, path, body)
        return await self._answer(lambda: _not_found(path), writes=False)

    def watch(self, path: str, query: list[tuple[str, str]], limit_s: float) -> AsyncIterator[Body]:
        assert self._kueue is not None
        return self._kueue.watch(path, query, limit_s)

    async def _answer(self, effect: Callable[[], Body], *, writes: bool = True) -> Body:
        body: Body = await Wait(self._call(effect, writes=writes))
        return body

    def _call(self, effect: Callable[[], Any], *, writes: bool = True) -> Script:
        yield from self._shell.may_die()
        return (yield from self._cluster.call(effect, writes=writes))


def _not_found(path: str) -> Body:
    raise ApiError(404, f"{path} not found")
