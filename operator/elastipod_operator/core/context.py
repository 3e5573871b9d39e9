"""What the policies of one decision share: the context that they read, and the draft of the plan that they add to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime

from .actions import Action, JobEvent
from .grant import Grant
from .history import HistoryEntry
from .quota import Quota
from .record import Record
from .replica import Replicas
from .snapshot import Policy, Snapshot


@dataclass(frozen=True, slots=True)
class PlanDraft:
    """An unfinished plan, to which each policy adds."""

    record: Record
    actions: tuple[Action, ...] = ()
    events: tuple[JobEvent, ...] = ()
    history: tuple[HistoryEntry, ...] = ()
    running_since: datetime | None = None
    wake_at: datetime | None = None
    adopts_spec: bool = False

    def with_actions(self, *actions: Action) -> PlanDraft:
        """Give the draft with further actions at its end."""
        return replace(self, actions=(*self.actions, *actions))


@dataclass(frozen=True, slots=True)
class Context:
    """What every policy of one decision reads.

    policy: what the user requested. grant: the part that the job may use now. quota: the job's Workloads, None without a queue.
    key: seeds the jitter of waits, so that jobs do not wait in lockstep.
    """

    snapshot: Snapshot
    policy: Policy
    replicas: Replicas
    grant: Grant
    quota: Quota | None = None
    now: datetime = field(init=False)
    key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "now", self.snapshot.now)
        object.__setattr__(self, "key", self.snapshot.job.uid)

    @property
    def is_refused(self) -> bool:
        """Whether the API server refused to create the last pod."""
        return bool(self.snapshot.pod_creation_error)
