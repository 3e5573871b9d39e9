"""What a job may use now: what the user requested, limited by what the job's queue has granted (docs/design/queues.md).

`Policy` states what the user requested. A Grant is the outcome of `quota.apply_quota` for one decision and is stored nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .names import Slot
from .reasons import AnyReason, ReasonAndMessage
from .sizes import Sizes
from .snapshot import Policy, SpecLimits


@dataclass(frozen=True, slots=True)
class SuspendedBy:
    """Why a queue suspends a job: reason is CamelCase, message is Kueue's own sentence where there is one."""

    reason: AnyReason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The sizes at which a job may train now, and the slots that may hold a pod.

    specs: the limit and the spares of each spec that have quota. workloads: the slots that have quota, with the name of the
    Workload that each belongs to; None where no queue limits the pods. quota_lost: slots of pods whose quota is gone, with
    reason and sentence.
    """

    sizes: Sizes
    specs: tuple[SpecLimits, ...]
    workloads: Mapping[Slot, str] | None = None
    quota_lost: Mapping[Slot, ReasonAndMessage] = field(default_factory=dict)
    is_suspended: bool = False
    """The user or the queue suspends the job."""
    suspended_by: SuspendedBy | None = None
    """Why the queue suspends the job; None where it does not, or where the user does."""


def grant_all(policy: Policy) -> Grant:
    """Grant everything that the user requested."""
    return Grant(sizes=policy.sizes, specs=policy.specs, is_suspended=policy.suspend)
