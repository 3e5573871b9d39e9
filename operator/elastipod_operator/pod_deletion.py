"""Deletes the pods of one job in the background, and keeps the reasons when some deletions are refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from .core.actions import DeletePod
from .in_flight import InFlight
from .kube.api import ApiError
from .kube.store import Job
from .kube.writes import is_conflict, is_refusal, log_fields, timed_write
from .pod_control import PodControl, RetryBackoff

log = logging.getLogger(__name__)

Key = tuple[str, bool]  # UID of the pod, and whether by force
Then = Callable[[DeletePod], None]


class PodDeletion:
    """The deletions of one job; its state can be lost without harm.

    A plan names all pods that have to go. Those that are being deleted already are left alone, and what the newest plan wants
    to keep is no longer deleted (`keep_only`).
    """

    def __init__(self, control: PodControl, uid: str) -> None:
        """uid: the job's."""
        self._control, self._uid = control, uid
        self.calls: InFlight[Key] = InFlight(control.slots, self._settle)
        self._kept: dict[str, tuple[str, RetryBackoff]] = {}  # whose deletion was refused, by UID
        self._failure = RetryBackoff()

    def keep_only(self, wanted: Sequence[DeletePod]) -> bool:
        """Cancel all other deletions. False if some were sent: then the caller awaits `calls.wait_unwanted()` and decides again."""
        uids = {action.uid for action in wanted}
        kept = {uid: one for uid, one in self._kept.items() if uid in uids}
        if kept != self._kept:
            self._kept = kept
            self._control.wake(self._uid)  # to remove these from the status
        return self.calls.keep_only(frozenset(map(_key, wanted)))

    def missing(self, wanted: Sequence[DeletePod]) -> list[DeletePod]:
        """Give those that are not in flight and not in back-off."""
        if self._failure.is_active():
            return []
        return [action for action in wanted if _key(action) not in self.calls and not self._rests(action)]

    @property
    def why_kept(self) -> str:
        """Why pods cannot be deleted, in one sentence; empty if there are none."""
        if not self._kept:
            return ""
        name, backoff = min(self._kept.values(), key=lambda one: one[0])
        more = f" (and {len(self._kept) - 1} more)" if len(self._kept) > 1 else ""
        return f"the API server refuses to delete pod {name}{more}, and the operator tries again: {backoff.refusal}"

    def begin(self, job: Job, actions: Sequence[DeletePod], then: Then) -> None:
        """Begin to delete the `missing` pods; a refused deletion does not hold up the others.

        job: as the decision saw it. then: called after each deletion.
        """
        self.calls.begin({_key(action): partial(self._delete, job, action, then) for action in actions})

    def _rests(self, action: DeletePod) -> bool:
        return action.uid in self._kept and self._kept[action.uid][1].is_active()

    async def _delete(self, job: Job, action: DeletePod, then: Then) -> None:
        log.info(
            "pod deleted",
            extra={
                **log_fields(job.fact),
                "pod": action.name,
                "reason": action.reason,
                "force": action.force,
                "grace_s": action.grace_s,
            },
        )
        call = self._control.api.delete_pod(
            job.fact.namespace, action.name, action.uid, force=action.force, grace_s=action.grace_s
        )
        try:
            body = await timed_write("pod", call)
        except ApiError as error:
            if is_refusal(error) and not is_conflict(error):
                self._keep(job, action, error)
                return
            if error.status != 404 and not is_conflict(error):
                raise
            body = {}
        if body.get("kind") == "Pod" and not action.force:
            self._control.store.put_pod(body)
        else:
            self._control.store.drop_pod_uid(self._uid, action.uid)
            self._control.forget(action.uid)
            self._control.wake(self._uid)  # the watch may have missed its end
        self._kept.pop(action.uid, None)
        then(action)

    def _keep(self, job: Job, action: DeletePod, error: ApiError) -> None:
        log.warning("a pod could not be deleted: %s", error, extra={**log_fields(job.fact), "pod": action.name})
        _, backoff = self._kept.setdefault(action.uid, (action.name, RetryBackoff()))
        self._control.wake_in(backoff.note_refusal(str(error), self._uid), self._uid)

    async def _settle(self, failed: Mapping[Key, Exception]) -> None:
        job = self._control.store.jobs.get(self._uid)
        if failed and job is not None:
            await self._control.failed(job, next(iter(failed.values())))
            self._control.wake_in(self._failure.note_failure(self._uid), self._uid)
        else:
            self._failure.reset()
        self._control.wake(self._uid)  # to update the status


def _key(action: DeletePod) -> Key:
    return action.uid, action.force
