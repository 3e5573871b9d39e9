"""A limit for the end of fixtures: whatever a failed test leaves hanging, the run goes on and says which test it was.

The time limit of a test (pytest-timeout) is spent once it has raised; what its fixtures do afterwards is not limited by it. Here
a teardown that takes too long is failed like a test, which goes on with the other fixtures. If that does not end it either,
the process ends, with the stacks of all threads: pytest-xdist reports the test and continues in another process.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Generator
from types import FrameType

import pytest


class TeardownLimit:
    """A plugin. limit_s: for all fixtures of a test together; once that is over, for what is left of them again."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        # The process writes there whatever pytest captures; a copy, because capturing replaces the descriptor.
        self._stderr = os.dup(2)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        if threading.current_thread() is not threading.main_thread():
            return (yield)

        def fail(number: int, frame: FrameType | None) -> None:
            self._say(f"the teardown of {item.nodeid} has not ended within {self.limit_s:g} s")
            faulthandler.cancel_dump_traceback_later()
            faulthandler.dump_traceback_later(self.limit_s, exit=True, file=self._stderr)
            pytest.fail(f"the teardown of {item.nodeid} has not ended within {self.limit_s:g} s")

        before = signal.signal(signal.SIGALRM, fail)
        signal.setitimer(signal.ITIMER_REAL, self.limit_s)
        # Ends the process even if its main thread never runs Python again.
        faulthandler.dump_traceback_later(2 * self.limit_s, exit=True, file=self._stderr)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            faulthandler.cancel_dump_traceback_later()

    def _say(self, text: str) -> None:
        os.write(self._stderr, f"\n{text}\n".encode())
