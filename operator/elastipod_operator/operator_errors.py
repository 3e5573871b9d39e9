"""Reports errors of the operator itself: in a condition, an Event, a counter and the log.

The text names the class of the error and the file and line of the operator. It never quotes the error, which may contain values of the job.
"""

from __future__ import annotations

import logging
from datetime import datetime
from pathlib import Path

from . import metrics
from .core.actions import JobEvent
from .core.conditions.operator_error import OPERATOR_ERROR, with_operator_error
from .job_intake import JobIntake
from .job_writes import JobWrites
from .kube.api_ports import EventSink, JobCalls
from .kube.changes import status_with_conditions
from .kube.store import Job
from .kube.writes import log_fields

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).resolve().parent


def error_location(error: BaseException) -> str:
    """Give the kind of an error and the innermost line of ours that it passed, such as `KeyError in kube/pods.py line 88`."""
    place, step = "", error.__traceback__
    while step is not None:
        path = Path(step.tb_frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            place = f" in {path.relative_to(PACKAGE)} line {step.tb_lineno}"
        step = step.tb_next
    return f"{type(error).__name__}{place}"


def operator_error_text(error: BaseException) -> str:
    """Give the sentence for the user."""
    return (
        f"the operator failed at this job because of an internal error ({error_location(error)}); it tries again every 15 s, and "
        "training continues meanwhile; please report it with the operator's log"
    )


def log_operator_error(what: str, error: BaseException, job: Job | None = None) -> None:
    """Log and count an error of the operator. what: pass, pods, handling, task or object."""
    metrics.OPERATOR_ERRORS.labels(what).inc()
    fields = log_fields(job.fact) if job is not None else {}
    log.error("internal error of the operator (%s)", what, exc_info=error, extra=fields)


async def report_operator_error(
    text: str, job: Job, now: datetime, *, api: JobCalls, jobs: JobIntake, events: EventSink, writes: JobWrites
) -> None:
    """Put a failed pass into the status of its job, with an Event when it is new. Raises as Api does."""
    conditions = with_operator_error(job.fact.conditions, text, now)
    if conditions is None:
        return
    events.record(job.fact, [JobEvent(OPERATOR_ERROR, text)])
    status = status_with_conditions(job, conditions)
    jobs.take(await writes.write("status", job.fact, api.apply_status(job.fact, status)))
