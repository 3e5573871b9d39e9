"""Why a change of the world goes as deep as it does: a code for metrics and programs, and a sentence for people, in one place."""

from __future__ import annotations

from enum import StrEnum


class DepthReason(StrEnum):
    """A code, which is a label of `elastipod_changes_total`, so there are few.

    depths: those that it explains. sentence: what the history, the Event and the condition say, empty where the depth needs no
    explanation. meaning: what the reference says where the sentence does not tell. A code that only a later operator knows reads as
    UNKNOWN.
    """

    depths: tuple[str, ...]
    sentence: str
    meaning: str

    def __new__(cls, value: str, depths: tuple[str, ...] = (), sentence: str = "", meaning: str = "") -> DepthReason:
        member = str.__new__(cls, value)
        member._value_ = value
        member.depths, member.sentence, member.meaning = depths, sentence, meaning or sentence
        return member

    def told(self, sentence: str) -> str:
        """Give what the timeline says: the sentence of the history, else what the code means; empty if neither is known."""
        return sentence or ("" if self is DepthReason.UNKNOWN else self.meaning)

    @classmethod
    def _missing_(cls, value: object) -> DepthReason:
        return cls.UNKNOWN

    WORKERS_KEPT = "WorkersKept", ("memory",), "", "those who stay keep their processes and their state"
    NOTHING_KEPT = "NothingKept", ("process",), "", "the workers of this job never keep anything in memory"
    MEMBER_KEEPS_NOTHING = (
        "MemberKeepsNothing", ("process",), "the workers of pod {pod} keep nothing in memory",
        "the workers of a pod that stays keep nothing in memory, while others do",
    )  # fmt: skip
    RECOVERY_IS_PROCESS = "RecoveryIsProcess", ("process",), "spec.elastipod.recovery is Process"
    NO_REPLICA_STAYS = "NoReplicaStays", ("process",), "no replica stays"
    NO_PROCESS_LEFT = "NoProcessLeft", ("process",), "no worker's process was left"
    JOB_SUSPENDED = "JobSuspended", ("process",), "the job is suspended"
    PROCESS_REQUESTED = "ProcessRequested", ("process",), "a worker asked for new processes"
    REPEATED_FAILURES = (
        "RepeatedFailures", ("process", "pod", "job"), "the same replica failed {times} times in a row without a new step",
        "the same replica failed again and again without a new step, or different ones did",
    )  # fmt: skip
    JOB_REQUESTED = "JobRequested", ("job",), "a worker requested a job-level restart"
    RESTART_LIMIT = "RestartLimit", ("job",), "there were more restarts than numRestartBeforeFullJobRestart"
    UNKNOWN = "Unknown", ("memory", "process", "pod", "job"), "", "another version of the operator began the change"
