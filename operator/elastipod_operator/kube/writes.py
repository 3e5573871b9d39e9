"""What all writes to the API server have in common: they are timed, counted and named alike in the log; several are made at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from .. import metrics
from ..core.snapshot import ObservedJob
from .api import ApiError

T = TypeVar("T")


async def timed_write(what: str, call: Awaitable[T]) -> T:
    """Make a call that writes. what: its kind, for the metrics."""
    try:
        with metrics.API_SECONDS.labels(what).time():
            answer = await call
    except Exception:
        metrics.API_CALLS.labels(what, "failed").inc()
        raise
    metrics.API_CALLS.labels(what, "ok").inc()
    return answer


async def gather_all(*parts: Coroutine[Any, Any, Any]) -> list[Any]:
    """Wait for all, whatever becomes of the others. Raises what the first of them raised, in their order."""
    results = await asyncio.gather(*parts, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def is_refusal(error: BaseException) -> bool:
    """Whether the API server will not have it so, as long as nothing else changes.

    So it is too where it has to ask a webhook that does not answer: that may last, and somebody must mend it.
    """
    if not isinstance(error, ApiError):
        return False
    return error.status in (400, 403, 409, 422) or (error.status >= 500 and "failed calling webhook" in str(error))


def is_conflict(error: BaseException) -> bool:
    """Whether somebody wrote it just now, or it is another one by now: the watch tells what it is."""
    return isinstance(error, ApiError) and error.status == 409


def is_name_taken(error: BaseException) -> bool:
    """Whether there is an object of that name."""
    return is_conflict(error) and "already exists" in str(error)


def log_fields(job: ObservedJob) -> dict[str, str]:
    """Give what a line of the log says of a job."""
    return {"job": f"{job.namespace}/{job.name}"}
