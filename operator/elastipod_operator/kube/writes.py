"""Helpers for writes to the API server: metrics, log fields, parallel calls, and the kinds of refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from .. import metrics
from ..core.snapshot import ObservedJob
from .api import ApiError

T = TypeVar("T")


async def timed_write(what: str, call: Awaitable[T]) -> T:
    """Make a write and record its time and outcome: ok, conflict or failed. what: its kind, for the metrics."""
    try:
        with metrics.API_SECONDS.labels(what).time():
            answer = await call
    except Exception as error:
        is_expected = is_conflict(error) and not is_refusal(error)
        metrics.API_CALLS.labels(what, "conflict" if is_expected else "failed").inc()
        raise
    metrics.API_CALLS.labels(what, "ok").inc()
    return answer


async def gather_all(*parts: Coroutine[Any, Any, Any]) -> list[Any]:
    """Wait for all, even if some fail. Raises what the first failed one, in their order, raised."""
    results = await asyncio.gather(*parts, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def is_refusal(error: BaseException) -> bool:
    """Whether the API server will refuse the call until something else changes.

    A webhook that does not answer counts too: that may last until someone fixes it. A conflict does not: the admission of
    ResourceQuotas gives up with one when others create objects at the same moment, and the next try succeeds.
    """
    if not isinstance(error, ApiError):
        return False
    if error.status == 409:
        return "denied the request" in str(error)  # a webhook chooses its status
    return error.status in (400, 403, 422) or (error.status >= 500 and "failed calling webhook" in str(error))


def is_conflict(error: BaseException) -> bool:
    """Whether another client has changed or replaced the object; the watch will show it."""
    return isinstance(error, ApiError) and error.status == 409


def is_name_taken(error: BaseException) -> bool:
    """Whether an object of that name exists."""
    return is_conflict(error) and "already exists" in str(error)


def log_fields(job: ObservedJob) -> dict[str, str]:
    """Give the fields of a log line that identify a job."""
    return {"job": f"{job.namespace}/{job.name}"}
