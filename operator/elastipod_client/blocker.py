"""One thing that keeps a job from training, or from the size that it could have, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from elastipod_operator.core.reasons import AnyReason, Reason, Severity

# Reasons that Kueue gives when it takes quota back. They are Kueue's own, so `Reason` does not list them.
KUEUE_ADVICE = {
    "Preempted": "Nothing, if the other Workload may go first: the job continues when it gets quota again. Otherwise give "
    "the job a higher priority class, or raise the quota.",
    "PodsReadyTimeout": "Kueue gave the pods too little time to start: raise `waitForPodsReady.timeout` of Kueue, or see "
    "with `elastipod why` why the pods do not start.",
    "AdmissionCheck": "An admission check of the ClusterQueue took its consent back: `kubectl describe workload`.",
    "ClusterQueueStopped": "Set `stopPolicy` of the ClusterQueue to `None`.",
    "LocalQueueStopped": "Set `stopPolicy` of the LocalQueue to `None`.",
    "NodeFailures": "Check the nodes: Kueue looks for others by itself.",
}
KUEUE_DEACTIVATED = "Set `spec.active` of the Workload to true; the message says why Kueue has deactivated it."
WORKERS_FAILED = "See the first failure with `elastipod logs JOB --first-failure`."
UNKNOWN_REASON = (
    "This version does not know the reason: see the message, and the job's Events with `kubectl describe hpjob`."
)
NOTHING = "There is nothing to do."


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocker:
    """Something that the job waits for, or that needs attention.

    where: the condition, object or Event that says so. since: None if unknown. message: one or more sentences without the last
    full stop. advice: whole sentences, empty for nothing to do.
    """

    reason: AnyReason
    where: str
    message: str
    since: datetime | None = None
    severity: Severity = Severity.INFO
    advice: str = ""


def blocker_of(
    reason: AnyReason, where: str, message: str, since: datetime | None, *, is_fault: bool = False
) -> Blocker:
    """Give the blocker for a reason. Those of others get an advice of ours. is_fault: the reason is the cause of a fault."""
    if isinstance(reason, Reason):
        return Blocker(
            reason=reason, where=where, message=message or sentence(reason.meaning), since=since,
            severity=Severity.WARNING if is_fault and reason.severity is Severity.INFO else reason.severity,
            advice=reason.advice,
        )  # fmt: skip
    advice = WORKERS_FAILED if is_fault else kueue_advice(reason)
    severity = Severity.WARNING if is_fault or not advice else Severity.INFO
    return Blocker(
        reason=reason, where=where, message=message, since=since, severity=severity, advice=advice or UNKNOWN_REASON
    )


def kueue_advice(reason: str) -> str:
    """Say what to do about an eviction by Kueue; empty for a reason that is not known."""
    if reason.startswith("Deactivated"):
        return KUEUE_DEACTIVATED
    return KUEUE_ADVICE.get(reason, "")


def sentence(text: str) -> str:
    """Give a sentence without its full stop."""
    return text.rstrip().removesuffix(".")
