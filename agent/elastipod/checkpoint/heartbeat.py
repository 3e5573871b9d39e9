"""A thread that reports to rank 0 that this rank is at work, until it has its answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

HEARTBEAT_S = 10.0  # so often a rank at work says that it is
WORK_TIMEOUT_S = 7200.0  # for one rank's part of something, such as writing its file


class HeartbeatThread(threading.Thread):
    """Tells rank 0 that this rank is at work, until there is an answer and all have one."""

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
