"""Pods of jobs as decisions want them: created and deleted, many at a time, and what comes of it when some are refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from . import clock
from .core.actions import CreatePod, DeletePod
from .core.backoff import backoff
from .kube.api import Api, ApiError
from .kube.applied import effective_spec
from .kube.placement import Placement
from .kube.pods import pod_manifest
from .kube.store import Job, Store
from .kube.tokens import Tokens, secret_manifest
from .kube.writes import about, is_refusal, is_taken, together, written

log = logging.getLogger(__name__)

# Calls that the API server refused (quota, admission, rights) are repeated with this back-off.
REFUSAL_FIRST_S, REFUSAL_LAST_S = 5.0, 120.0
WRITE_PARALLEL = 16
CANNOT_AUTHENTICATE = (
    "the Secret with the token of the job was refused by the API server (give the operator the right to create Secrets, or set "
    "spec.elastipod.authentication to Off)"
)

Place = Callable[[Job, Sequence[CreatePod]], Awaitable[tuple[list[tuple[CreatePod, Placement | None]], str]]]


@dataclass(slots=True)
class Refusal:
    """Why no pods of a job are created for now, or one of them is not deleted, and until when; may be lost without harm."""

    why: str = ""
    until: datetime | None = None
    times: int = 0

    def holds(self) -> bool:
        """Whether it is too early to try again."""
        return self.until is not None and clock.now() < self.until

    def again(self, why: str, key: str) -> float:
        """Note that it was refused; gives the seconds until it is tried again. key: spreads the waits of different jobs."""
        first, last = timedelta(seconds=REFUSAL_FIRST_S), timedelta(seconds=REFUSAL_LAST_S)
        self.why, self.times = why, self.times + 1
        wait = backoff(first, last, self.times, key)
        self.until = clock.now() + wait
        return wait.total_seconds()


KeptPods = dict[str, tuple[str, Refusal]]
"""Pods of a job that are to go and that the API server refuses to delete: name and refusal by UID."""


def why_kept(kept: KeptPods) -> str:
    """Say in one sentence which pods cannot be deleted, and why; empty when there are none."""
    if not kept:
        return ""
    name, refusal = min(kept.values(), key=lambda one: one[0])
    more = f" (and {len(kept) - 1} more)" if len(kept) > 1 else ""
    return f"the API server refuses to delete pod {name}{more}, which is tried again: {refusal.why}"


class PodWrites:
    """Creates and deletes pods. All raise as Api does, but for refusals, which are noted, told, and tried again later.

    place: where pods may run, and why others may not. list_pods: bring the store up to date. forget: the pod of a UID is
    gone. wake: have a job looked at soon.
    """

    def __init__(
        self, api: Api, store: Store, tokens: Tokens, *, place: Place, list_pods: Callable[[Job], Awaitable[None]],
        forget: Callable[[str], None], wake: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._api = api
        self._store = store
        self._tokens = tokens
        self._place = place
        self._list_pods = list_pods
        self._forget = forget
        self._wake = wake
        self._slots = asyncio.Semaphore(WRITE_PARALLEL)

    async def create_secret(self, job: Job, refusal: Refusal, actions: Sequence[CreatePod]) -> bool:
        """Create the Secret that new pods refer to; gives False when no pods are to be created for now.

        It is there already but for the first time, or when somebody took it away.
        """
        if refusal.holds():
            return False
        token = self._tokens.of(job.fact)
        if token is None or not actions:
            return True
        try:
            await written("secret", self._api.create_secret(secret_manifest(job.fact, token)))
        except ApiError as error:
            if is_taken(error):
                return True
            if not is_refusal(error):
                raise
            self._refused(job, refusal, f"{CANNOT_AUTHENTICATE}: {error}")
            return False
        return True

    async def create(self, job: Job, refusal: Refusal, actions: Sequence[CreatePod]) -> None:
        """Create pods; none means that nothing is refused any more."""
        token = self._tokens.of(job.fact)
        secret = token.secret if token is not None else ""
        placed, problem = await self._place(job, actions)
        results = await asyncio.gather(*(self._create(job, *one, secret) for one in placed), return_exceptions=True)
        errors = [error for error in results if isinstance(error, BaseException)]
        if failures := [error for error in errors if not is_refusal(error)]:
            raise failures[0]
        refusals = [str(error) for error in errors if not is_taken(error)]
        if len(refusals) < len(errors):
            refusals += await self._taken_by_others(job, actions)
        if refusals:
            problem = f"{len(refusals)} pods were refused by the API server: {refusals[0]}"
        if problem:
            self._refused(job, refusal, problem)
        elif refusal.why:
            refusal.why, refusal.times, refusal.until = "", 0, None
            self._wake(job.fact.uid)  # the status must not tell of it any more

    async def delete(
        self, job: Job, kept: KeptPods, actions: Sequence[DeletePod], then: Callable[[DeletePod], None]
    ) -> None:
        """Delete pods; one that cannot be deleted keeps no other from going. then: is told of each as soon as it is done.

        kept: those whose deletion was refused, which are tried again later; who need not go any more is none of them.
        """
        told, uids = why_kept(kept), {action.uid for action in actions}
        for uid in [uid for uid in kept if uid not in uids]:
            del kept[uid]

        async def delete_one(action: DeletePod) -> None:
            refusal = kept[action.uid][1] if action.uid in kept else Refusal()
            if refusal.holds():
                return
            try:
                await self._delete(job, action)
            except ApiError as error:
                if not is_refusal(error):
                    raise
                log.warning("a pod could not be deleted: %s", error, extra={**about(job.fact), "pod": action.name})
                kept[action.uid] = action.name, refusal
                self._refused(job, refusal, str(error))
            else:
                kept.pop(action.uid, None)
                then(action)

        try:
            await together(*map(delete_one, actions))
        finally:
            if why_kept(kept) != told:
                self._wake(job.fact.uid)  # the status is to tell of it, or not any more

    def _refused(self, job: Job, refusal: Refusal, why: str) -> None:
        """Say why something is not done for now, and have it tried again."""
        asyncio.get_running_loop().call_later(refusal.again(why, job.fact.uid), self._wake, job.fact.uid)

    async def _create(self, job: Job, order: CreatePod, placed: Placement | None, token_secret: str) -> None:
        assert job.fact.policy is not None
        manifest = pod_manifest(
            job.fact, effective_spec(job.body), job.fact.policy, order.pod, order.nnodes, token_secret,
            generation=order.generation, avoids=order.avoids, placed=placed,
        )  # fmt: skip
        async with self._slots:
            self._store.put_pod(await written("pod", self._api.create_pod(manifest)))

    async def _taken_by_others(self, job: Job, actions: Sequence[CreatePod]) -> list[str]:
        """Tell of names that pods bear which are none of this job's; its own were only not known yet."""
        await self._list_pods(job)
        ours = {pod.id for pod in job.pods.values()}
        self._wake(job.fact.uid)
        return [
            f"pod {a.pod.name(job.fact.name)} exists and does not belong to this job; delete it or rename the job"
            for a in actions
            if a.pod not in ours
        ]

    async def _delete(self, job: Job, action: DeletePod) -> None:
        log.info(
            "pod deleted", extra={**about(job.fact), "pod": action.name, "reason": action.why, "force": action.force}
        )
        try:
            async with self._slots:
                call = self._api.delete_pod(job.fact.namespace, action.name, action.uid, force=action.force)
                body = await written("pod", call)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            body = {}
        if body.get("kind") == "Pod" and not action.force:
            self._store.put_pod(body)
        else:
            self._store.drop_pod_uid(job.fact.uid, action.uid)
            self._forget(action.uid)
            self._wake(job.fact.uid)  # where the watch missed its end, nothing else tells
