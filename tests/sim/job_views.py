"""What one operator has of each of its jobs, and the way of its calls to the right one: no call of a job may concern another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tests.sim.api_calls import ApiCalls
from tests.sim.cluster import Cluster
from tests.sim.invariant_state import Violation
from tests.sim.invariants import InvariantChecker
from tests.sim.kernel import Script
from tests.sim.objects import Body

from elastipod_operator.core.actions import JobEvent, Plan
from elastipod_operator.core.snapshot import ObservedJob

if TYPE_CHECKING:
    from tests.sim.shell import Shell


class JobView:
    """A job as one operator reaches it: its part of the API server, its agents, and what was decided about it last."""

    def __init__(self, shell: Shell, cluster: Cluster, checker: InvariantChecker) -> None:
        self._shell = shell
        self.cluster = cluster
        self.checker = checker
        self.last_plan: Plan | None = None
        self.passes = 0
        self.looks = 0
        """How often the decision that is under way was made."""
        self.is_ending = False
        """Whether the job is being deleted, so far as the pass knows that makes calls."""
        self.api = ApiCalls(self, cluster)

    @property
    def held_until(self) -> float:
        return self._shell.held_until

    def may_die(self) -> Script:
        """A call about the job is about to be made."""
        yield from self._shell.may_die(self.cluster)

    def note_sent_away(self, name: str, uid: str) -> None:
        """From here on a pod ends because the operator wants it, unless its container has ended already."""
        real = self.cluster.pods.get(uid)
        if real is None or real.exit_code is None:
            self.checker.sent_away(name)


class Views:
    """All jobs of one operator, by what their calls name."""

    def __init__(self, views: list[JobView]) -> None:
        self.all = views
        self.first = views[0]
        self._by_namespace = {view.cluster.namespace: view for view in views}
        self._by_job = {view.cluster.job_uid: view for view in views}
        self._by_prefix = {view.cluster.prefix: view for view in views}

    def in_namespace(self, name: str) -> JobView:
        return self._by_namespace[name]

    def of_job(self, uid: str) -> JobView:
        return self._by_job[uid]

    def of_pod(self, uid: str) -> JobView:
        return self._by_prefix[uid.rpartition("pod-")[0]]

    def of_pods(self, uids: Iterable[str]) -> tuple[JobView, list[str]]:
        """Give the job of some pods. Raises Violation if it is not one."""
        listed = list(uids)
        views = {id(view): view for view in map(self.of_pod, listed)} or {0: self.first}
        if len(views) > 1:
            raise Violation(f"what pods of several jobs tell is put together: {listed}")
        return next(iter(views.values())), listed


class RoutedApi:
    """What the operator's `kube.api.Api` is to its Reconciler."""

    def __init__(self, views: Views) -> None:
        self._views = views

    async def list_pods(self, namespace: str, job_uid: str) -> tuple[list[Body], int]:
        return await self._views.in_namespace(namespace).api.list_pods(namespace, job_uid)

    async def effective_job(self, namespace: str, name: str) -> Body:
        return await self._views.in_namespace(namespace).api.effective_job(namespace, name)

    async def patch_metadata(self, job: ObservedJob, version: str, metadata: Mapping[str, Any]) -> Body:
        return await self._views.in_namespace(job.namespace).api.patch_metadata(job, version, metadata)

    async def apply_status(self, job: ObservedJob, status: Mapping[str, Any]) -> Body:
        return await self._views.in_namespace(job.namespace).api.apply_status(job, status)

    async def delete_job(self, job: ObservedJob) -> None:
        await self._views.in_namespace(job.namespace).api.delete_job(job)

    async def create_pod(self, manifest: Mapping[str, Any]) -> Body:
        return await self._views.in_namespace(manifest["metadata"]["namespace"]).api.create_pod(manifest)

    async def create_secret(self, manifest: Mapping[str, Any]) -> None:
        await self._views.in_namespace(manifest["metadata"]["namespace"]).api.create_secret(manifest)

    async def delete_pod(self, namespace: str, name: str, uid: str, *, force: bool, grace_s: int | None = None) -> Body:
        view = self._views.in_namespace(namespace)
        return await view.api.delete_pod(namespace, name, uid, force=force, grace_s=grace_s)

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | str | None = None,
        *,
        query: list[tuple[str, str]] | None = None,
        content_type: str = "application/json",
    ) -> Body:
        """Make a call that concerns Kueue, or the room on the nodes of all jobs."""
        found = await self._views.first.api.call(method, path, body, query=query, content_type=content_type)
        if path in ("/api/v1/nodes", "/api/v1/pods"):
            others = (view.cluster.listed(path, dict(query or ())) for view in self._views.all[1:])
            return {"items": [*found["items"], *(item for other in others for item in other["items"])]}
        return found

    def watch(self, path: str, query: list[tuple[str, str]], limit_s: float) -> AsyncIterator[Body]:
        return self._views.first.api.watch(path, query, limit_s)


class SimEvents:
    """Where Events go: the checker of the invariants notes them, and the cluster keeps the newest."""

    def __init__(self, views: Views) -> None:
        self._views = views

    def record(self, job: ObservedJob, events: Iterable[JobEvent]) -> None:
        view = self._views.of_job(job.uid)
        for note in events:
            view.checker.met[f"Event: {note.reason}"] += 1
            view.cluster.keep_event(str(note.reason), note.message)

    async def close(self) -> None:
        """Nothing waits here."""
