"""Elastic events: `elastic_event_detected()`, which a training loop calls once per step.

In a pod the agent sets the event level in the worker file, and SIGUSR1 only wakes the worker. Outside a pod SIGUSR1 itself is
the event. With more than one rank the ranks agree on the answer (`elastipod.agreement`), so that all stop after the same step.
With ``HYPERPOD_SIGNAL_COORDINATION=disabled`` each rank gives its own answer.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from elastipod.agent_store import AgentStore, meeting_place
from elastipod.agreement import Agreement
from elastipod.errors import ElasticAgreementError
from elastipod.local_worker import local_worker, store_generation
from elastipod.process_restarts import tell_of_process_restarts
from elastipod.stores import Store, TorchStore
from elastipod.uncaught import uncaught_exception
from elastipod.variables import float_from_env
from elastipod.worker_file import EventLevel

log = logging.getLogger(__name__)

COORDINATION_ENV = "HYPERPOD_SIGNAL_COORDINATION"
TIMEOUT_ENV = "ELASTIPOD_AGREEMENT_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 300.0  # long enough for a rank that still compiles its first step


def elastic_event_detected() -> bool:
    """Give True when this job must save a checkpoint and exit now: the same answer at the same step on every rank.

    Call it once per step, on every rank, from the training thread. While no event is pending it costs a few microseconds: no
    collective, no round trip to a store. After the first True, save a checkpoint and return. It stays True from then on, and an
    exit with 0 then counts as a drain, not as completion. Outside `hyperpodrun`, SIGUSR1 to any rank is the event.

    Raises ElasticAgreementError when the other ranks cannot be reached, and ElasticAgreementTimeout, which names the ranks, when
    some ranks call it less often or have died; the timeout is ``ELASTIPOD_AGREEMENT_TIMEOUT_S`` (300) seconds.
    """
    global _detector
    if _detector is None:
        tell_of_process_restarts()
        _detector = _Detector()
    return _detector.call()


def is_leaving() -> bool:
    """Whether `elastic_event_detected()` has been True in this run: an exit with 0 is a drain. Not a collective."""
    return _detector is not None and _detector.detected


def has_left_last_run() -> bool:
    """Whether this process lived through its last run and left it for an event. Not a collective."""
    return _has_left


def reset_elastic_event(*, is_abandoned: bool = False) -> None:
    """Forget the event, in a process that has left one run and waits for the next (in-process restart).

    The ranks of the next run agree through a store and a prefix of their own. is_abandoned: other ranks may have died, so this
    one does not wait for them to sign off.
    """
    global _detector, _has_left
    if _detector is not None:
        _detector.close(is_abandoned=is_abandoned)
        _has_left = _detector.detected and not is_abandoned
        _detector = None


def abandon_elastic_event() -> None:
    """Let `elastic_event_detected()` raise ElasticAgreementError, also a call that waits: the generation is over, and others may be gone.

    From any thread, on ranks whose agent has ended the generation.
    """
    if (detector := _detector) is not None:
        detector.abandon()


class _Detector:
    """The event in this process: its level, its signal handler and, with other ranks, the agreement."""

    def __init__(self) -> None:
        self._worker = local_worker()
        if self._worker:
            self._worker.file.set_checks_events(self._worker.local_rank)
        self._signalled = False
        self.detected = False
        self._agreement: Agreement | None = None
        self._previous: Callable[[int, FrameType | None], object] | None = None
        self._handle_signal()

    def call(self) -> bool:
        if self.detected:
            return True
        if self._agreement is None:
            self._agreement = _start_agreement(self.is_pending)
        self.detected = self._agreement.record_call() if self._agreement else self.is_pending()
        if self.detected and self._worker:
            self._worker.file.acknowledge(self._worker.local_rank)
        return self.detected

    def is_pending(self) -> bool:
        """True when an event is pending on this rank. Reads memory only; any thread may call it."""
        if self._worker:
            return self._worker.file.event().level != EventLevel.NONE
        return self._signalled

    def abandon(self) -> None:
        if self._agreement:
            self._agreement.abandon()

    def close(self, *, is_abandoned: bool = False) -> None:
        if self._agreement:
            self._agreement.close(is_abandoned=is_abandoned)

    def _handle_signal(self) -> None:
        """Handle SIGUSR1 where Python allows it. Without the handler the level is still seen, at most 50 ms later."""
        if threading.current_thread() is not threading.main_thread():
            if not self._worker:
                log.warning("elastic_event_detected() was first called outside the main thread: SIGUSR1 is not handled")
            return
        previous = signal.getsignal(signal.SIGUSR1)
        if previous is None:  # installed by C code, which may rely on it
            return
        while isinstance(
            former := getattr(previous, "__self__", None), _Detector
        ):  # left by an earlier run of this process
            previous = former._previous
        self._previous = previous if callable(previous) else None
        signal.signal(signal.SIGUSR1, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        if self._agreement:
            self._agreement.wake()
        if self._previous:
            self._previous(number, frame)


def _start_agreement(is_pending: Callable[[], bool]) -> Agreement | None:
    """Start the agreement with the other ranks; give None while there are no other ranks."""
    if not _coordinated():
        return None
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    place = _place_to_agree(is_host=dist.get_rank() == 0)
    agreement = Agreement(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        is_pending=is_pending,
        connect=place.connect,
        timeout_s=float_from_env(TIMEOUT_ENV, DEFAULT_TIMEOUT_S),
        hosts_store=place.is_own,
        reconnects=place.is_served,
    )
    agreement.start()
    return agreement


@dataclass(frozen=True, slots=True)
class _Place:
    """What connects to the store of the generation. is_own: this process hosts it. is_served: an agent does, for as long as it lasts."""

    connect: Callable[[float], Store]
    is_own: bool = False
    is_served: bool = False


def _place_to_agree(*, is_host: bool) -> _Place:
    """is_host: this process hosts the store where no agent serves one."""
    prefix = f"elastipod/event/{store_generation()}"
    served = meeting_place()
    if served is not None:
        return _Place(lambda timeout_s: AgentStore(served.renewed(timeout_s), prefix), is_served=True)
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        raise ElasticAgreementError(
            "elastic_event_detected() reaches the other ranks through MASTER_ADDR and MASTER_PORT, which are not set; "
            f"start the script with hyperpodrun or torchrun, or set {COORDINATION_ENV}=disabled"
        )
    hosts_store = is_host and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return _Place(
        lambda timeout_s: TorchStore(host, int(port), prefix, timeout_s, keep_server=hosts_store), hosts_store
    )


def _coordinated() -> bool:
    return os.environ.get(COORDINATION_ENV, "").strip().lower() != "disabled"


_detector: _Detector | None = None
_has_left = False
_abandoned: list[_Detector] = []  # in a forked child: the parent's connections, which must be neither used nor closed


def _close_at_exit() -> None:
    if _detector is not None:
        # After an exception nobody may take this rank's end for that of the training.
        _detector.close(is_abandoned=uncaught_exception() is not None)
    # While it ends, Python restores the default action of signals: an event would then kill this process.
    if isinstance(getattr(signal.getsignal(signal.SIGUSR1), "__self__", None), _Detector):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _forget_in_child() -> None:
    """In a forked child, which has none of its parent's threads: start from scratch at the first call."""
    global _detector
    if _detector is not None:
        _abandoned.append(_detector)
        _detector = None


atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_forget_in_child)
