"""Elastic events: `elastic_event_detected()`, the one question that a training loop asks once per step.

In a pod the agent raises the event as a level in the worker file, and SIGUSR1 only wakes; outside one, SIGUSR1 itself is
the event. With more than one rank the answer is agreed upon (see `elastipod.agreement`), so that all ranks stop after
the same step; ``HYPERPOD_SIGNAL_COORDINATION=disabled`` asks for each rank's own answer instead.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from elastipod.agreement import Agreement
from elastipod.errors import ElasticAgreementError
from elastipod.local_worker import local_worker, store_generation
from elastipod.stores import TorchStore
from elastipod.worker_file import EventLevel

log = logging.getLogger(__name__)

COORDINATION_ENV = "HYPERPOD_SIGNAL_COORDINATION"
TIMEOUT_ENV = "ELASTIPOD_AGREEMENT_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 300.0  # generous: a rank may still be compiling its first step


def elastic_event_detected() -> bool:
    """Tell whether this job should checkpoint and leave now; the same answer at the same step on every rank.

    Call it once per step, on every rank, from the training thread. Costs a few microseconds while nothing is pending:
    no collective, no store round trip. After the first True save a checkpoint and return; it stays True from then on,
    and an exit 0 counts as a drain, not as a completion. Outside `hyperpodrun`, SIGUSR1 to any rank is the event.

    Raises ElasticAgreementTimeout, naming the ranks, when ranks call it unequally often or died; the wait is
    ``ELASTIPOD_AGREEMENT_TIMEOUT_S`` (300) seconds.
    """
    global _detector
    if _detector is None:
        _detector = _Detector()
    return _detector.call()


def reset_elastic_event() -> None:
    """Forget the event, for a process that has left one run and waits for its next.

    With other ranks the next run agrees through a store of its own, under a prefix of its own.
    """
    global _detector
    if _detector is not None:
        _detector.close()
        _detector = None


class _Detector:
    """This process's side of the event: its level, its signal handler and, with other ranks, its agreement."""

    def __init__(self) -> None:
        self._worker = local_worker()
        if self._worker:
            self._worker.file.set_checks_events(self._worker.local_rank)
        self._signalled = False
        self._answer = False
        self._agreement: Agreement | None = None
        self._previous: Callable[[int, FrameType | None], object] | None = None
        self._handle_signal()

    def call(self) -> bool:
        if self._answer:
            return True
        if self._agreement is None:
            self._agreement = _start_agreement(self.level)
        self._answer = self._agreement.call() if self._agreement else self.level()
        if self._answer and self._worker:
            self._worker.file.acknowledge(self._worker.local_rank)
        return self._answer

    def level(self) -> bool:
        """Tell whether an event is pending on this rank. Memory only; any thread may ask."""
        if self._worker:
            return self._worker.file.event().level != EventLevel.NONE
        return self._signalled

    def close(self) -> None:
        if self._agreement:
            self._agreement.close()

    def _handle_signal(self) -> None:
        """Take SIGUSR1 where Python allows it. Without the handler the level is still seen, 50 ms later at most."""
        if threading.current_thread() is not threading.main_thread():
            if not self._worker:
                log.warning("elastic_event_detected() was first called outside the main thread: SIGUSR1 goes unseen")
            return
        previous = signal.getsignal(signal.SIGUSR1)
        if previous is None:  # installed by C code; replacing it could break that code
            return
        while isinstance(former := getattr(previous, "__self__", None), _Detector):  # of this process's last run
            previous = former._previous
        self._previous = previous if callable(previous) else None
        signal.signal(signal.SIGUSR1, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        if self._agreement:
            self._agreement.wake()
        if self._previous:
            self._previous(number, frame)


def _start_agreement(level: Callable[[], bool]) -> Agreement | None:
    """Begin to agree with the other ranks, or give None when there is nobody to agree with (yet)."""
    if not _coordinated():
        return None
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        raise ElasticAgreementError(
            "elastic_event_detected() reaches the other ranks through MASTER_ADDR and MASTER_PORT, which are not set; "
            f"start the script with hyperpodrun or torchrun, or set {COORDINATION_ENV}=disabled"
        )
    prefix = f"elastipod/event/{store_generation()}"
    hosts_store = dist.get_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    agreement = Agreement(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        level=level,
        connect=lambda timeout_s: TorchStore(host, int(port), prefix, timeout_s, keep_server=hosts_store),
        timeout_s=float(os.environ.get(TIMEOUT_ENV, DEFAULT_TIMEOUT_S)),
        hosts_store=hosts_store,
    )
    agreement.start()
    return agreement


def _coordinated() -> bool:
    return os.environ.get(COORDINATION_ENV, "").strip().lower() != "disabled"


_detector: _Detector | None = None
_abandoned: list[_Detector] = []  # a forked child's copies of its parent's connections: kept, never used, never closed


def _close_at_exit() -> None:
    if _detector is not None:
        _detector.close()
    # At its very end Python puts the default action in the place of its handlers: an event would kill a worker that leaves.
    if isinstance(getattr(signal.getsignal(signal.SIGUSR1), "__self__", None), _Detector):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _forget_in_child() -> None:
    """A forked child has none of its parent's threads: it starts anew if it ever asks."""
    global _detector
    if _detector is not None:
        _abandoned.append(_detector)
        _detector = None


atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_forget_in_child)
