"""A thread that reports to rank 0 that this rank is at work, until rank 0 has a result."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

HEARTBEAT_S = 10.0  # interval of the messages of a rank at work
WORK_TIMEOUT_S = 7200.0  # limit for the work of one rank, such as writing its file


class HeartbeatThread(threading.Thread):
    """Sends heartbeats to rank 0, then this rank's answer, until all ranks have answered."""

    def __init__(self, send: Callable[[bytes], bytes]) -> None:
        super().__init__(name="elastipod-checkpoint-talk", daemon=True)
        self._send = send
        self._answer = b""
        self._is_answered = threading.Event()
        self.result = b""
        self.failure: Exception | None = None
        self.start()

    def set_answer(self, answer: bytes) -> None:
        self._answer = answer
        self._is_answered.set()

    def run(self) -> None:
        deadline = time.monotonic() + WORK_TIMEOUT_S
        try:
            while not self.result:
                if not self._is_answered.wait(HEARTBEAT_S) and time.monotonic() > deadline:
                    raise TimeoutError(f"its part was not done within {WORK_TIMEOUT_S:g} s")
                self.result = self._send(self._answer if self._is_answered.is_set() else b"")
        except Exception as error:  # kept for the caller, which is another thread
            self.failure = error
