"""Takes the operator's finalizer off jobs that their users give to another controller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from .core.names import ANNOTATION_STATE, FINALIZER
from .core.snapshot import ObservedJob
from .kube.api import CALL_ERRORS, ApiError
from .kube.reading import annotations_of, finalizers_of, mapping, text, uid_of
from .kube.writes import is_conflict, is_refusal, log_fields, timed_write

log = logging.getLogger(__name__)

Body = Mapping[str, Any]

FIRST_RETRY_S, LAST_RETRY_S = 0.2, 15.0


class HandoverCalls(Protocol):
    """The calls of a handover, as in `JobCalls`."""

    async def effective_job(self, namespace: str, name: str) -> dict[str, Any]:
        """Give a job as it is now."""

    async def patch_metadata(self, job: ObservedJob, version: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Write finalizers if the job is still at `version`; otherwise the answer is 409."""


class JobHandover:
    """Lets go of jobs that another controller runs from now on. With the finalizer of this operator they could never be deleted.

    A job is let go once, when it stops being ours: another release of Elastipod uses the same finalizer, and adds it again. The
    rest of the job stays as it is. holds: whether this operator runs a job.
    """

    def __init__(self, api: HandoverCalls, holds: Callable[[Body], bool]) -> None:
        self._api = api
        self._holds = holds
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, job: ObservedJob, body: Body) -> None:
        """Remove the finalizer in the background. body: the job as the watch shows it now."""
        if self._is_closed:  # another operator may lead by now
            return
        task = asyncio.create_task(self._let_go(job, body), name=f"handover of {job.uid}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give up what is under way."""
        self._is_closed = True
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _let_go(self, job: ObservedJob, body: Body) -> None:
        seen: Body | None = body
        retry_s = FIRST_RETRY_S
        while not await self._is_settled(job, seen, record=annotations_of(body).get(ANNOTATION_STATE)):
            await asyncio.sleep(retry_s)
            seen, retry_s = None, min(LAST_RETRY_S, 2 * retry_s)

    async def _is_settled(self, job: ObservedJob, seen: Body | None, *, record: str | None) -> bool:
        """Try once; False if it must be tried again. seen: the job, None to read it. record: what was last written of its state."""
        try:
            body = await self._api.effective_job(job.namespace, job.name) if seen is None else seen
            names = finalizers_of(body)
            if uid_of(body) != job.uid or FINALIZER not in names or self._holds(body):
                return True
            if (
                mapping(body.get("metadata")).get("deletionTimestamp")
                and annotations_of(body).get(ANNOTATION_STATE) != record
            ):
                return True  # another release of Elastipod runs the job by now, and takes its own time to end it
            version = text(mapping(body.get("metadata")).get("resourceVersion"))
            left = {"finalizers": [name for name in names if name != FINALIZER]}
            await timed_write("record", self._api.patch_metadata(job, version, left))
        except CALL_ERRORS as error:
            is_gone = isinstance(error, ApiError) and error.status == 404
            if not (is_gone or is_conflict(error)):
                log.warning("the finalizer could not be removed: %s", error, extra=log_fields(job))
            return is_gone or is_refusal(error)
        log.info("another controller runs the job from now on", extra=log_fields(job))
        return True
