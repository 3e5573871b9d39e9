"""The state record of a job: everything that must survive the operator, in annotation `elastipod.io/state`.

Every write that allocates a generation or uses up a restart budget carries the job's resourceVersion and comes before the
first call to an agent. Each field declares its storage with `Stored`; `record_codec` and `clock_skew` follow from that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cached_property
from typing import Annotated

from .depth_reasons import DepthReason
from .names import PodId, Slot
from .reasons import NO_REASON, AnyReason, Reason
from .record_schema import Stored, TimeRule
from .sizes import MAX_REPLICAS

# The cause of a suspension by the user; all other causes come from a queue.
SUSPENDED_BY_USER = Reason.SUSPENDED

# The cause of the first transition of a record that replaces a lost one.
RECORD_LOST = Reason.RECORD_LOST


class TransitionKind(StrEnum):
    """Why the workers are stopped, or not yet started."""

    START = "start"
    RESIZE = "resize"
    RECOVERY = "recovery"
    SUSPEND = "suspend"


class RestartMode(StrEnum):
    """What a recovery restarts, least first. The values are those of `restart_mode` in /stop."""

    IN_PROCESS = "in_process_restart"  # workers that survive a fault keep their processes
    LOCAL = "local_process_level_restart"  # except a worker that requested a new process
    PROCESSES = "process_level_restart"  # all workers get new processes
    JOB = "job_level_restart"  # all pods are recreated


class Depth(StrEnum):
    """How far a change of the world goes for the workers that it does not remove; each is the fallback of the previous one."""

    MEMORY = "memory"  # they keep their processes and their state
    PROCESS = "process"  # they get new processes and resume from a checkpoint
    POD = "pod"  # pods that failed repeatedly are recreated too
    JOB = "job"  # all pods are recreated


# Longer messages are cut to this many characters.
MAX_TEXT = 1000
PAST, FOLLOWS, BACK_OFF = TimeRule.PAST, TimeRule.FOLLOWS, TimeRule.BACK_OFF


@dataclass(frozen=True, kw_only=True)
class NextGeneration:
    """A generation that agents begin by themselves once their workers have drained. Recorded before the first agent is told of it."""

    generation: int
    members: Annotated[tuple[PodId, ...], Stored(max_pods=MAX_REPLICAS)]
    """In the order of their group ranks."""
    master_addr: str
    agents_serve_store: bool

    @cached_property
    def ranks(self) -> dict[PodId, int]:
        """The group ranks by member: every replica is looked up several times in a pass."""
        return {member: rank for rank, member in enumerate(self.members)}


@dataclass(frozen=True, kw_only=True)
class Transition:
    """A change of generation in progress: recorded before the first /stop, removed when the next start is recorded."""

    kind: TransitionKind
    cause: AnyReason
    message: Annotated[str, Stored(max_length=MAX_TEXT)]
    from_size: int
    target_size: int
    """The size that the next start waits for."""
    began_at: Annotated[datetime, Stored(time_rule=PAST)]
    detected_at: Annotated[datetime, Stored(time_rule=PAST)]
    deadline: Annotated[datetime, Stored(time_rule=FOLLOWS, follows="began_at")]
    """When workers that drain are stopped at the latest."""
    graceful: bool = False
    """Whether the workers drain; otherwise they are stopped at once."""
    not_before: Annotated[datetime | None, Stored(time_rule=FOLLOWS, follows="began_at")] = None
    uses_budget: bool = False
    """Whether the fault counts against the restart budgets."""
    is_budget_checked: Annotated[bool, Stored(is_later=True)] = False
    """All replicas are accounted for and the budgets were checked: later findings change neither cause nor cost."""
    recreates_pods: Annotated[bool, Stored(is_later=True)] = False
    """Whether this is a full job restart."""
    reach: Annotated[RestartMode, Stored(is_later=True)] = RestartMode.IN_PROCESS
    """The farthest restart that a failed worker requested."""
    depth: Annotated[Depth, Stored(is_later=True)] = Depth.PROCESS
    depth_reason: Annotated[str, Stored(is_later=True, max_length=MAX_TEXT)] = ""
    """Why it is deeper than memory; empty if it is not, or if the workers never keep anything."""
    depth_code: Annotated[DepthReason, Stored(is_later=True)] = DepthReason.UNKNOWN
    leavers: Annotated[tuple[PodId, ...] | None, Stored("leavers")] = None
    """Members that do not train in the next generation; None where that is not decided before the workers stop."""
    next_generation: Annotated[NextGeneration | None, Stored("next")] = None
    """What follows the drain, if that was decided before the workers stop; None where it is decided afterwards."""
    is_shortened: Annotated[bool, Stored("shortened")] = False
    """`deadline` is earlier than in the first /stop."""

    @cached_property
    def leaver_set(self) -> frozenset[PodId]:
        """`leavers` to look replicas up in; empty where they are not decided yet."""
        return frozenset(self.leavers or ())


@dataclass(frozen=True, slots=True)
class RestartWindow:
    """Restarts that count in the present evaluation window, which begins with the first one."""

    number: int = 0
    """How many windows have ended."""
    since: Annotated[datetime | None, Stored(time_rule=PAST)] = None
    restarts: int = 0
    """Process-level restarts since the last full job restart."""
    full_restarts: int = 0


@dataclass(frozen=True, slots=True)
class FaultyReplica:
    """A replica that the latest fault hit: its pod, its group rank at that time (-1 for none), and its node (empty if unknown)."""

    pod: Annotated[PodId, Stored(is_inline=True)]
    rank: int
    node: str


@dataclass(frozen=True, slots=True)
class NodeFaults:
    """How many faults began on a node, and when the last one did."""

    node: str
    times: int
    at: Annotated[datetime, Stored(time_rule=PAST)]


@dataclass(frozen=True, slots=True)
class PartialGang:
    """A gang or an increment of which some pods have no node."""

    since: Annotated[datetime, Stored(time_rule=PAST)]
    """When the number of its pods with a node last increased."""
    bound: int = 0
    """How many of its pods have a node."""
    tries: int = 0
    """How often its nodes were released."""
    released_until: Annotated[datetime | None, Stored(time_rule=FOLLOWS, follows="since")] = None
    """Until when its nodes are left to other jobs; meanwhile one pending pod shows the demand. None while it keeps them."""


@dataclass(frozen=True, slots=True)
class ResizeStatistics:
    """What resizes of this job cost and save."""

    pause: timedelta | None = None
    """How long the workers did not train in the last planned resize."""
    step_times: tuple[tuple[int, timedelta], ...] = ()
    """The time of one step at each size, the newest last."""


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Where the job's time went: milliseconds by phase, and the present phase with its start."""

    phase: str = ""
    since: Annotated[datetime | None, Stored(time_rule=PAST)] = None
    booked: tuple[tuple[str, int], ...] = ()
    depth: Annotated[str, Stored(is_later=True)] = ""
    """The depth of the resize or recovery that the present phase belongs to; empty for none."""
    by_depth: Annotated[tuple[tuple[str, int], ...], Stored(is_later=True)] = ()
    """That part of `booked` that resizes and recoveries took, by their depth."""


@dataclass(frozen=True, slots=True)
class RequeueBackoff:
    """Consecutive evictions of increments by Kueue, and until when none is requested again."""

    tries: int
    until: Annotated[datetime, Stored(time_rule=BACK_OFF)]


@dataclass(frozen=True, kw_only=True)
class Record:
    """What the operator has decided and must not forget. Generation 0 without members: the job has never started."""

    generation: Annotated[int, Stored("generation", is_required=True)] = 0
    newest_told: Annotated[int, Stored("told")] = 0
    """The newest generation that an agent may have been told of before it began. No other one may have its number."""
    members: Annotated[tuple[PodId, ...], Stored("members", is_required=True, max_pods=MAX_REPLICAS)] = ()
    """In the order of their group ranks."""
    master_addr: Annotated[str, Stored("master", is_required=True)] = ""
    agents_serve_store: Annotated[bool, Stored("served")] = False
    """The agent of group rank 0 serves the store of the present generation. Every /start of it must say the same."""
    transition: Annotated[Transition | None, Stored("transition")] = None
    lost: Annotated[tuple[PodId, ...], Stored("lost", is_required=True)] = ()
    """Pods that were given up and must not be used again; kept until the API server no longer lists them."""
    incarnations: Annotated[dict[Slot, int], Stored("incarnations", is_derived=True)] = field(default_factory=dict)
    """The newest incarnation of each slot. Only those that do not follow from `members` are written."""

    restarts: Annotated[int, Stored("budget", 0, is_required=True)] = 0
    retries: Annotated[int, Stored("budget", 1, is_required=True)] = 0
    consecutive_failures: Annotated[int, Stored("budget", 2, is_required=True)] = 0
    """Recoveries without a newer step."""
    best_step: Annotated[int, Stored("budget", 3, is_required=True)] = -1
    """The newest step known at the last fault."""
    stalled_recoveries: Annotated[int, Stored("budget", 4, is_required=True, is_later=True)] = 0
    """Those consecutive failures that count against the restart budgets."""

    window_since: Annotated[datetime | None, Stored("times", 0, is_required=True, time_rule=PAST)] = None
    """When the operator began to wait for more replicas, for growth or for a start."""
    running_since: Annotated[datetime | None, Stored("times", 1, is_required=True, time_rule=PAST)] = None
    """When all agents of the present generation answered RUNNING."""
    resized_at: Annotated[datetime | None, Stored("times", 2, is_required=True, time_rule=PAST)] = None
    recovered_at: Annotated[datetime | None, Stored("times", 3, is_required=True, time_rule=PAST)] = None
    fault_at: Annotated[datetime | None, Stored("times", 4, is_required=True, time_rule=PAST)] = None
    """When the fault was detected from which the job recovers."""
    started_at: Annotated[datetime | None, Stored("times", 5, is_required=True, time_rule=PAST)] = None
    ended_at: Annotated[datetime | None, Stored("times", 6, is_required=True, time_rule=PAST)] = None
    accepted_at: Annotated[datetime | None, Stored("accepted", time_rule=PAST)] = None
    """When an operator first saw the job."""
    generation_began_at: Annotated[datetime | None, Stored("begun", time_rule=PAST)] = None
    """When the present generation was allocated."""
    first_pod_at: Annotated[datetime | None, Stored("pods", time_rule=PAST)] = None
    """When the job got its first pods; kept until it trains for the first time."""
    suspended_time: Annotated[timedelta, Stored("idle")] = timedelta(0)

    failures_in_place: Annotated[int, Stored("deeper")] = 0
    """How many faults in a row the same replica had, with no new step between them, while its workers kept state in memory."""
    failed_in_place: Annotated[tuple[PodId, ...], Stored("failing")] = ()
    """Which replicas `failures_in_place` counts for. `faulty_replicas` has those that were lost, too."""
    faults_without_step: Annotated[int, Stored("steps", 0)] = 0
    """How many faults in a row count against the budgets, with no new step between them; each may have another replica."""
    step_at_fault: Annotated[int, Stored("steps", 1)] = -1
    """The newest step at the last fault; less than `best_step` while the job computes again what it lost."""
    resizes_undone: Annotated[int, Stored("undone")] = 0
    """How many recoveries in a row have brought members back that were to leave; they may hold the only copy of a shard."""
    window: Annotated[RestartWindow, Stored("window")] = RestartWindow()
    is_full_restart: Annotated[bool, Stored("culprits", 0)] = False
    faulty_replicas: Annotated[tuple[FaultyReplica, ...], Stored("culprits", 1)] = ()
    node_faults: Annotated[tuple[NodeFaults, ...], Stored("offences")] = ()

    size_before_growth: Annotated[int, Stored("growth", 0)] = 0
    """The size before a growth whose generation is not RUNNING yet; 0 for none."""
    resize_failures: Annotated[int, Stored("growth", 1)] = 0
    resize_failed_at: Annotated[datetime | None, Stored("growth", 2, time_rule=PAST)] = None
    shrank_after_fault: Annotated[bool, Stored("shrunk")] = False
    """The last change of size was a shrink after a fault."""
    gang: Annotated[PartialGang | None, Stored("gang")] = None
    resize_began_at: Annotated[datetime | None, Stored("measures", 0, time_rule=PAST)] = None
    """When a planned resize began whose generation is not RUNNING yet."""
    resize_statistics: Annotated[ResizeStatistics, Stored("measures", 1, is_inline=True)] = ResizeStatistics()

    phase_times: Annotated[PhaseTimes, Stored("ledger")] = PhaseTimes()
    queue: Annotated[str, Stored("queue", 0)] = ""
    """The queue on whose quota the pods run; empty for none."""
    requeue_backoff: Annotated[RequeueBackoff | None, Stored("queue", 1, is_inline=True)] = None
    ceiling: Annotated[int, Stored("ceiling")] = 0
    """spec.replicas as the operator last saw it."""
    outcome: Annotated[str, Stored("outcome", 0)] = ""
    outcome_reason: Annotated[AnyReason, Stored("outcome", 1)] = NO_REASON
    outcome_message: Annotated[str, Stored("outcome", 2, max_length=2 * MAX_TEXT)] = ""
    owner: Annotated[str, Stored("uid")] = ""
    """UID of the job; empty in records of earlier operators."""

    # Every replica is looked up in these several times in a pass.
    @cached_property
    def member_set(self) -> frozenset[PodId]:
        return frozenset(self.members)

    @cached_property
    def member_slots(self) -> frozenset[Slot]:
        return frozenset(member.slot for member in self.members)

    @cached_property
    def lost_set(self) -> frozenset[PodId]:
        return frozenset(self.lost)

    @cached_property
    def all_leave(self) -> bool:
        """Whether all members are told that they leave."""
        return self.transition is not None and self.transition.leavers == self.members

    @property
    def is_empty(self) -> bool:
        """Whether it has no members, no transition and no outcome: no operator writes such a record."""
        return not (self.members or self.transition or self.outcome)

    @property
    def size(self) -> int:
        """Replicas that train together in the present generation; 0 during a transition."""
        return 0 if self.transition else len(self.members)
