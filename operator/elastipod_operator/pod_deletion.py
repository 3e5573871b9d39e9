"""Deletes the pods of one job beside its decisions, and says which ones the API server keeps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from .core.actions import DeletePod
from .in_flight import InFlight
from .kube.api import ApiError
from .kube.store import Job
from .kube.writes import about, is_overtaken, is_refusal, written
from .pod_control import PodDesk, Refusal

log = logging.getLogger(__name__)

Key = tuple[str, bool]  # UID of the pod, and whether by force
Then = Callable[[DeletePod], None]


class PodDeletion:
    """The deletions of one job; what it remembers may be lost without harm.

    A decision orders all pods to go that are to go. Those that are being deleted already are let be, and what the newest
    decision wants to keep is not deleted any more (`keep_only`).
    """

    def __init__(self, desk: PodDesk, uid: str) -> None:
        """uid: the job's."""
        self._desk, self._uid = desk, uid
        self.calls: InFlight[Key] = InFlight(desk.slots, self._settle)
        self._kept: dict[str, tuple[str, Refusal]] = {}  # whose deletion was refused, by UID
        self._failure = Refusal()

    def keep_only(self, wanted: Sequence[DeletePod]) -> bool:
        """Delete no others any more; False when some are on their way: once `calls.answered()` it must be decided anew."""
        uids = {action.uid for action in wanted}
        kept = {uid: one for uid, one in self._kept.items() if uid in uids}
        if kept != self._kept:
            self._kept = kept
            self._desk.wake(self._uid)  # the status is to tell of these no more
        return self.calls.keep_only(frozenset(map(_key, wanted)))

    def missing(self, wanted: Sequence[DeletePod]) -> list[DeletePod]:
        """Give those that are to be deleted now: not yet under way, nor refused or failed just before."""
        if self._failure.holds():
            return []
        return [action for action in wanted if _key(action) not in self.calls and not self._rests(action)]

    @property
    def why_kept(self) -> str:
        """Which pods cannot be deleted and why, in one sentence; empty when there are none."""
        if not self._kept:
            return ""
        name, refusal = min(self._kept.values(), key=lambda one: one[0])
        more = f" (and {len(self._kept) - 1} more)" if len(self._kept) > 1 else ""
        return f"the API server refuses to delete pod {name}{more}, which is tried again: {refusal.why}"

    def begin(self, job: Job, actions: Sequence[DeletePod], then: Then) -> None:
        """Have pods deleted that are `missing`; one that cannot be deleted keeps no other from going.

        job: as the decision saw it. then: is told of each that was deleted.
        """
        self.calls.begin({_key(action): partial(self._delete, job, action, then) for action in actions})

    def _rests(self, action: DeletePod) -> bool:
        return action.uid in self._kept and self._kept[action.uid][1].holds()

    async def _delete(self, job: Job, action: DeletePod, then: Then) -> None:
        log.info(
            "pod deleted",
            extra={
                **about(job.fact),
                "pod": action.name,
                "reason": action.why,
                "force": action.force,
                "grace_s": action.grace_s,
            },
        )
        call = self._desk.api.delete_pod(
            job.fact.namespace, action.name, action.uid, force=action.force, grace_s=action.grace_s
        )
        try:
            body = await written("pod", call)
        except ApiError as error:
            if is_refusal(error) and not is_overtaken(error):
                self._keep(job, action, error)
                return
            if error.status != 404 and not is_overtaken(error):
                raise
            body = {}
        if body.get("kind") == "Pod" and not action.force:
            self._desk.store.put_pod(body)
        else:
            self._desk.store.drop_pod_uid(self._uid, action.uid)
            self._desk.forget(action.uid)
            self._desk.wake(self._uid)  # where the watch missed its end, nothing else tells
        self._kept.pop(action.uid, None)
        then(action)

    def _keep(self, job: Job, action: DeletePod, error: ApiError) -> None:
        log.warning("a pod could not be deleted: %s", error, extra={**about(job.fact), "pod": action.name})
        _, refusal = self._kept.setdefault(action.uid, (action.name, Refusal()))
        self._desk.wake_in(refusal.again(str(error), self._uid), self._uid)

    async def _settle(self, failed: Mapping[Key, Exception]) -> None:
        job = self._desk.store.jobs.get(self._uid)
        if failed and job is not None:
            await self._desk.failed(job, next(iter(failed.values())))
            self._desk.wake_in(self._failure.failed(self._uid), self._uid)
        else:
            self._failure.is_over()
        self._desk.wake(self._uid)  # the status is to tell of it


def _key(action: DeletePod) -> Key:
    return action.uid, action.force
