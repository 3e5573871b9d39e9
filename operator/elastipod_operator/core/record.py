"""The one record of a job (decision 1): everything that must outlive the operator, in annotation `elastipod.io/state`.

Every write that allocates a generation or spends a budget carries the job's resourceVersion and comes before the first
call to an agent. `record_codec` writes and reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from .names import PodId, Slot

# The cause of a suspension that the user wishes; all other causes are a queue's.
SUSPENDED_BY_USER = "Suspended"

# Cause of the first transition on a record that was made anew, since the old one was lost.
RECORD_LOST = "RecordLost"


class TransitionKind(StrEnum):
    """Why the workers are stopped, or not yet started."""

    START = "start"
    RESIZE = "resize"
    RECOVERY = "recovery"
    SUSPEND = "suspend"


class RestartMode(StrEnum):
    """How far a recovery reaches, in the words of /stop's `restart_mode`; the members stand in order, the least first."""

    IN_PROCESS = "in_process_restart"  # workers that can outlive a fault keep their processes
    LOCAL = "local_process_level_restart"  # but for the one that asked for another process
    PROCESSES = "process_level_restart"  # all workers get new processes
    JOB = "job_level_restart"  # all pods are made anew


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """A change of generation under way: recorded before the first /stop, gone with the record of the next start.

    graceful: workers are asked to reach a checkpoint until `deadline`, else they are ended at once. goal: the size that
    is waited for. counted: the incident was booked to the budgets. weighed: everybody was accounted for and the budgets
    were looked at, so what happens from then on changes neither. full: a full job restart, all pods are made anew.
    reach: the most that the failed workers asked for. is_shortened: `deadline` is sooner than agents were told at first.
    """

    kind: TransitionKind
    cause: str
    message: str
    from_size: int
    target_size: int
    began_at: datetime
    detected_at: datetime
    deadline: datetime
    graceful: bool = False
    not_before: datetime | None = None
    uses_budget: bool = False
    is_budget_checked: bool = False
    recreates_pods: bool = False
    reach: RestartMode = RestartMode.IN_PROCESS
    is_shortened: bool = False


@dataclass(frozen=True, slots=True)
class RestartWindow:
    """Counted restarts of the present evaluation window, which opens with the first of them.

    number: windows that ended before. restarts: process-level ones since the last full job restart. full: full ones.
    """

    number: int = 0
    since: datetime | None = None
    restarts: int = 0
    full_restarts: int = 0


@dataclass(frozen=True, slots=True)
class FaultyReplica:
    """A replica that the latest fault hit: its pod, its group rank then, and its node (empty when not known)."""

    pod: PodId
    rank: int
    node: str


@dataclass(frozen=True, slots=True)
class NodeFaults:
    """How often a node was behind a fault, and when last."""

    node: str
    times: int
    at: datetime


@dataclass(frozen=True, slots=True)
class PartialGang:
    """A gang or an increment that lacks some pods (decision 14).

    since: when it last came closer to being whole. bound: its pods that hold a place. tries: how often they were given
    back. rest_until: set while they are given back; one pod in wait is the demand then.
    """

    since: datetime
    bound: int = 0
    tries: int = 0
    rest_until: datetime | None = None


@dataclass(frozen=True, slots=True)
class ResizeStatistics:
    """What this job was seen to gain and to lose by resizes (decision 13).

    pause: how long workers stood still in the last planned resize. paces: time of a step at each size, the newest last.
    """

    pause: timedelta | None = None
    step_times: tuple[tuple[int, timedelta], ...] = ()


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Where the job's time went: whole milliseconds booked to each phase, and the phase that runs since `since`."""

    phase: str = ""
    since: datetime | None = None
    booked: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RequeueBackoff:
    """Increments were taken back: how often in a row, and until when none is asked for again."""

    tries: int
    until: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the operator decided and must not forget.

    generation 0 and no members: never started. members are in order of their group ranks. lost: pods that were given up and
    must never be taken back, while the API server still lists them. incarnations: the newest one of each slot that a pod was
    seen in. window_since: when the present growth (or start) window opened. generation_began_at: when the present generation was
    allocated. running_since: when all its agents answered RUNNING. fault_at: when the fault that is being recovered from was
    seen. best_step: the newest step known at the last incident. consecutive_failures: recoveries without a newer step; stalled:
    those of them that worker faults caused. size_before_growth: the size before the growth that has not reached RUNNING yet, 0 when
    there is none. resize_began_at: when the planned resize that has not reached RUNNING yet began. idle: time that the job was
    suspended. first_pod_at: until the first training, when the job came to have pods. shrank_after_fault: the last change of size was
    a shrink after a fault. accepted_at: when an operator first saw the job. queue: the one on whose quota the pods run; empty
    for none. owner: UID of the job; empty in records of earlier operators.
    """

    generation: int = 0
    members: tuple[PodId, ...] = ()
    master_addr: str = ""
    transition: Transition | None = None
    lost: tuple[PodId, ...] = ()
    incarnations: dict[Slot, int] = field(default_factory=dict)
    window_since: datetime | None = None
    generation_began_at: datetime | None = None
    running_since: datetime | None = None
    resized_at: datetime | None = None
    recovered_at: datetime | None = None
    fault_at: datetime | None = None
    started_at: datetime | None = None
    accepted_at: datetime | None = None
    restarts: int = 0
    retries: int = 0
    consecutive_failures: int = 0
    stalled_recoveries: int = 0
    best_step: int = -1
    window: RestartWindow = RestartWindow()
    faulty_replicas: tuple[FaultyReplica, ...] = ()
    is_full_restart: bool = False
    shrank_after_fault: bool = False
    node_faults: tuple[NodeFaults, ...] = ()
    size_before_growth: int = 0
    resize_failures: int = 0
    resize_failed_at: datetime | None = None
    gang: PartialGang | None = None
    resize_began_at: datetime | None = None
    resize_statistics: ResizeStatistics = ResizeStatistics()
    suspended_time: timedelta = timedelta(0)
    first_pod_at: datetime | None = None
    phase_times: PhaseTimes = PhaseTimes()
    queue: str = ""
    requeue_backoff: RequeueBackoff | None = None
    ceiling: int = 0
    """spec.replicas as the operator last saw it."""
    outcome: str = ""
    outcome_reason: str = ""
    outcome_message: str = ""
    ended_at: datetime | None = None
    owner: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether it tells of nothing that an operator leaves behind: neither workers, nor a change, nor an end."""
        return not (self.members or self.transition or self.outcome)

    @property
    def size(self) -> int:
        """Replicas that train together in the present generation; 0 while the workers are being exchanged."""
        return 0 if self.transition else len(self.members)
