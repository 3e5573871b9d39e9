"""Runs pre- and post-train scripts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping

from elastipod_agent.core.exits import describe_status
from elastipod_agent.settings import Script
from elastipod_agent.waiting import in_thread
from elastipod_agent.workers import process_tree
from elastipod_agent.workers.output_pump import OutputPump, OutputStream
from elastipod_agent.workers.reaper import Reaper

_FIRST_ACCESS_S = 60.0  # a file system may be mounted at its first access
_TIDYING_S = 5.0
NOT_RUN = 256  # not an exit code: the script was not started


class ScriptRunner:
    """Runs one script at a time.

    is_over: tells whether the script is no longer needed; wake is set whenever that may have changed, and it changes after time_left_s.
    A script that is no longer needed gets SIGTERM with all processes of its group, and SIGKILL after at most 5 s.
    """

    def __init__(
        self,
        reaper: Reaper,
        pump: OutputPump,
        *,
        is_over: Callable[[], bool],
        wake: asyncio.Event,
        patience_s: float,
        time_left_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._reaper = reaper
        self._pump = pump
        self._is_over = is_over
        self._wake = wake
        self._patience_s = patience_s
        self._time_left_s = time_left_s

    async def run(self, script: Script, name: str, env: Mapping[str, str]) -> tuple[int, str]:
        """Run a script until it ends or is no longer needed; gives its status and the end of its output.

        A script that cannot be started has the status NOT_RUN, and a sentence instead of output.
        """
        source, sink = os.pipe2(os.O_CLOEXEC)
        stream = OutputStream(source, f"[{name}]:".encode(), 1)
        try:
            command = await in_thread(script.command, _FIRST_ACCESS_S)
            child = await self._reaper.spawn(command, env, stdout=sink, stderr=sink)
        except OSError as error:
            os.close(source)
            return NOT_RUN, f"{name} script {script.path} cannot be run: {error.strerror}"
        finally:
            os.close(sink)
        self._pump.add(stream)
        ended = asyncio.ensure_future(child.ended.wait())
        while child.status is None and not self._is_over():
            wake = asyncio.ensure_future(self._wake.wait())
            await asyncio.wait([ended, wake], timeout=self._time_left_s(), return_when=asyncio.FIRST_COMPLETED)
            wake.cancel()
            self._wake.clear()
        if child.status is None:
            child.send_group(signal.SIGTERM)
            await asyncio.wait([ended], timeout=_TIDYING_S)
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
