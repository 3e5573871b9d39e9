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


class Kind(StrEnum):
    """Why the workers are stopped, or not yet started."""

    START = "start"
    RESIZE = "resize"
    RECOVERY = "recovery"
    SUSPEND = "suspend"


class Reach(StrEnum):
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

    kind: Kind
    cause: str
    message: str
    from_size: int
    goal: int
    began_at: datetime
    detected_at: datetime
    deadline: datetime
    graceful: bool = False
    not_before: datetime | None = None
    counted: bool = False
    weighed: bool = False
    full: bool = False
    reach: Reach = Reach.IN_PROCESS
    is_shortened: bool = False


@dataclass(frozen=True, slots=True)
class Window:
    """Counted restarts of the present evaluation window, which opens with the first of them.

    number: windows that ended before. restarts: process-level ones since the last full job restart. full: full ones.
    """

    number: int = 0
    since: datetime | None = None
    restarts: int = 0
    full: int = 0


@dataclass(frozen=True, slots=True)
class Culprit:
    """A replica that the latest fault hit: its pod, its group rank then, and its node (empty when not known)."""

    pod: PodId
    rank: int
    node: str


@dataclass(frozen=True, slots=True)
class Offence:
    """How often a node was behind a fault, and when last."""

    node: str
    times: int
    at: datetime


@dataclass(frozen=True, slots=True)
class Gang:
    """A gang or an increment that lacks some pods (decision 14).

    since: when it last came closer to being whole. bound: its pods that hold a place. tries: how often they were given
    back. rest_until: set while they are given back; one pod in wait is the demand then.
    """

    since: datetime
    bound: int = 0
    tries: int = 0
    rest_until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Measures:
    """What this job was seen to gain and to lose by resizes (decision 13).

    pause: how long workers stood still in the last planned resize. paces: time of a step at each size, the newest last.
    """

    pause: timedelta | None = None
    paces: tuple[tuple[int, timedelta], ...] = ()


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where the job's time went: whole milliseconds booked to each phase, and the phase that runs since `since`."""

    phase: str = ""
    since: datetime | None = None
    booked: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Shed:
    """Increments were taken back: how often in a row, and until when none is asked for again."""

    tries: int
    until: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the operator decided and must not forget.

    generation 0 and no members: never started. members are in order of their group ranks. lost: pods that were given up and
    must never be taken back, while the API server still lists them. incarnations: the newest one of each slot that a pod was
    seen in. window_since: when the present growth (or start) window opened. begun_at: when the present generation was
    allocated. settled_at: when all its agents answered RUNNING. incident_at: when the fault that is being recovered from was
    seen. best_step: the newest step known at the last incident. failures_in_row: recoveries without a newer step; stalled:
    those of them that worker faults caused. grew_from: the size before the growth that has not reached RUNNING yet, 0 when
    there is none. paused_at: when the planned resize that has not reached RUNNING yet began. idle: time that the job was
    suspended. pods_at: until the first training, when the job came to have pods. is_faulty_shrink: the last change of size was
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
    begun_at: datetime | None = None
    settled_at: datetime | None = None
    resized_at: datetime | None = None
    recovered_at: datetime | None = None
    incident_at: datetime | None = None
    started_at: datetime | None = None
    accepted_at: datetime | None = None
    restarts: int = 0
    retries: int = 0
    failures_in_row: int = 0
    stalled: int = 0
    best_step: int = -1
    window: Window = Window()
    culprits: tuple[Culprit, ...] = ()
    is_full_restart: bool = False
    is_faulty_shrink: bool = False
    offences: tuple[Offence, ...] = ()
    grew_from: int = 0
    resize_failures: int = 0
    resize_failed_at: datetime | None = None
    gang: Gang | None = None
    paused_at: datetime | None = None
    measures: Measures = Measures()
    idle: timedelta = timedelta(0)
    pods_at: datetime | None = None
    ledger: Ledger = Ledger()
    queue: str = ""
    shed: Shed | None = None
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
