"""What the checkers of the invariants remember."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from elastipod_operator.api import JobSpec
from elastipod_operator.core.names import PodId
from elastipod_operator.core.record import Record, TransitionKind
from elastipod_operator.core.snapshot import Policy
from elastipod_operator.kube.job_policy import policy_of

if TYPE_CHECKING:
    from tests.sim.training import MeetingPlace

JOB_NAME = "train"
JOB_UID = "job-uid"
# From a decision to its write.
WRITING_TIME = timedelta(seconds=1)


class Violation(AssertionError):
    """An invariant does not hold; the text says which and how."""


class InvariantState:
    """What was inflicted on the job, what was written and called, and what is excused because of that."""

    def __init__(self, say: Callable[[str], None], *, heeds_events: bool) -> None:
        self._say = say
        self.heeds_events = heeds_events
        self._started: dict[tuple[int, int], str] = {}
        self._places: dict[int, tuple[MeetingPlace, int]] = {}
        self._members: dict[int, tuple[PodId, ...]] = {}
        self._steps_at_fault = 0  # all that workers had made when the last recovery began
        self._kinds: dict[int, TransitionKind] = {}
        self._causes: dict[int, str] = {}
        self._ran_at: dict[TransitionKind, datetime] = {}
        """When a generation of each kind last ran, by the operator's clock."""
        self._stepped = 0
        self._excused = 0
        self._num_hidden = 0
        self._inflicted = 0
        self._knows_spec = True
        self._given_up: set[str] = set()
        self._touched: dict[str, float] = {}
        self._hidden: dict[str, float] = {}
        self._trained: set[str] = set()
        self._unwanted: set[str] = set()
        self._asked_for_processes: set[int] = set()
        self._stopped_at: dict[int, float] = {}
        """When the first agent heard that a generation is to stop."""
        self._must_count: dict[int, int] = {}
        """Generations that a fault of their own ended, with the retries that were booked before."""
        self._minimum = 0
        """The smallest size that was wished when the present generation was allocated."""
        self.is_replicated = False
        """Whether each worker keeps the whole state in memory."""
        self.has_true_time = True
        """Whether the operator's clock was never set."""
        self.clock_error_s = 0.0
        """By how much it was set in all."""
        self.are_names_known = True
        """Whether nobody took the record away that knows which names pods had."""
        self.is_fenced = True
        """Whether no operator acts on what it saw before others went on."""
        self.is_lied_to = False
        """Whether an agent claimed a generation that is not its own: it is stopped by the name that it gives."""
        self.met: Counter[str] = Counter()
        """What really happened, and how often: of a fault that was drawn but hit nobody there is no word here."""
        self.worker_faults = 0
        self.asked_for_pods = 0
        self.record = Record()
        self.job_uid = JOB_UID
        self.nproc = 1
        """Workers in each pod, as the job was applied."""

    def touched(self, pod: str, until: float) -> None:
        """A fault is inflicted on a pod, whose consequences may be seen until then."""
        self._touched[pod] = max(until, self._touched.get(pod, 0.0))
        self._inflicted += 1

    def hidden(self, pod: str, until: float) -> None:
        """The operator cannot reach a pod's agent: that may spoil a resize, but never a generation that trains."""
        self._hidden[pod] = max(until, self._hidden.get(pod, 0.0))
        self._num_hidden += 1

    def record_wiped(self, *, with_spec: bool) -> None:
        """The annotations were removed from outside: one unexplained recovery is excused.

        with_spec: also the one that tells from which spec the pods were made.
        """
        self._knows_spec &= not with_spec
        self.are_names_known = False
        self._ran_at.clear()
        self._excused += 1
        self.record = Record()


_read: tuple[Any, Policy | None] = (None, None)


def policy_in(spec: Any) -> Policy:
    """Give the policy of a spec that can be used. It is mostly asked for the one that was read last."""
    global _read
    if _read[1] is None or _read[0] is not spec:
        _read = (spec, policy_of(JobSpec.model_validate(spec)))
    assert _read[1] is not None
    return _read[1]


def short(pod: PodId) -> str:
    return f"{pod.spec}-{pod.ordinal}-{pod.incarnation}"
