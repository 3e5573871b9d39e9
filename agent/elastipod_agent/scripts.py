"""Runs pre- and post-train scripts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping

from elastipod_agent.core.exits import describe_status
from elastipod_agent.settings import Script
from elastipod_agent.workers import process_tree
from elastipod_agent.workers.output_pump import OutputPump, OutputStream
from elastipod_agent.workers.reaper import Reaper

NOT_RUN = 256  # not an exit code: the script was not started


class ScriptRunner:
    """Runs one script at a time.

    is_over: tells whether the script is no longer needed; wake is set whenever that may have changed.
    """

    def __init__(
        self, reaper: Reaper, pump: OutputPump, *, is_over: Callable[[], bool], wake: asyncio.Event, patience_s: float
    ) -> None:
        self._reaper = reaper
        self._pump = pump
        self._is_over = is_over
        self._wake = wake
        self._patience_s = patience_s

    async def run(self, script: Script, name: str, env: Mapping[str, str]) -> tuple[int, str]:
        """Run a script until it ends or is no longer needed; gives its status and the end of its output.

        A script that cannot be started has the status NOT_RUN, and a sentence instead of output.
        """
        source, sink = os.pipe2(os.O_CLOEXEC)
        stream = OutputStream(source, f"[{name}]:".encode(), 1)
        try:
            child = await self._reaper.spawn(script.command(), env, stdout=sink, stderr=sink)
        except OSError as error:
            os.close(source)
            return NOT_RUN, f"{name} script {script.path} cannot be run: {error.strerror}"
        finally:
            os.close(sink)
        self._pump.add(stream)
        ended = asyncio.ensure_future(child.ended.wait())
        while child.status is None and not self._is_over():
            wake = asyncio.ensure_future(self._wake.wait())
            await asyncio.wait([ended, wake], return_when=asyncio.FIRST_COMPLETED)
            wake.cancel()
            self._wake.clear()
        if child.status is None:
            await process_tree.end_all(self._reaper, {child.pid}, "\0", self._patience_s)
            self._reaper.collect()
        await asyncio.wait([ended], timeout=1.0)
        ended.cancel()
        await self._pump.caught_up([stream])
        tail = "\n".join(stream.tail.decode("utf-8", "replace").strip().splitlines()[-20:])
        return -signal.SIGKILL if child.status is None else child.status, tail


def failed_script(script: Script, status: int, tail: str) -> str:
    """Describe how a script failed."""
    if status == NOT_RUN:
        return tail
    said = f"; the end of its output:\n{tail}" if tail else ""
    return f"{script.path} ended with {describe_status(status)}{said}"
