"""Workers that are started for one generation and end with it."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable

from elastipod_agent.core.exits import Outcome, StopMode, classify, is_late_drain
from elastipod_agent.generation.faults import LATE_DRAIN, GenerationEnd
from elastipod_agent.generation.generation_run import GenerationRun
from elastipod_agent.metrics import METRICS
from elastipod_agent.runtime import AgentRuntime
from elastipod_agent.scripts import failed_script
from elastipod_agent.settings import find_missing_script
from elastipod_agent.workers.failure import describe_error
from elastipod_agent.workers.group import KILL_AGAIN_S, WorkerGroup
from elastipod_agent.workers.output_tap import OutputTap

GIVE_UP_S = 30.0  # how long the agent tries to end a worker that hangs in its start


class ProcessWorkers:
    """Starts one process per local rank, and ends all of them. See `GenerationWorkers`."""

    def __init__(self, runtime: AgentRuntime, run: GenerationRun) -> None:
        # Workers may be kept until rules are added. Output that goes straight to a file is not read for that alone.
        is_read = run.output_tap is not None or not runtime.settings.logs.direct_streams(0)
        self.tap: OutputTap | None = OutputTap(run.output_tap) if is_read else None
        self.directory = runtime.root / f"gen-{run.start.run_generation:06d}"
        self._runtime = runtime
        self._settings = runtime.settings
        self._run = run

    async def start(self) -> bool:
        """Run the pre-train script and start the workers; False if the generation has already ended."""
        try:
            shutil.rmtree(self.directory, ignore_errors=True)  # an operator without generations may restart its count
            self.directory.mkdir(mode=0o700, parents=True)
            return await self._start()
        except OSError as error:
            self._run.fail("StartFailed", f"the workers could not be started: {describe_error(error)}")
            return False

    async def supervise(self, is_handed_over: Callable[[], bool] = lambda: False) -> None:
        """Wait until a worker fails, all have ended, a stop ends them, or somebody else is to supervise them from now on."""
        run, group = self._run, self._run.group
        assert group is not None
        while not is_handed_over():
            failed = group.first_failure()
            if failed is not None:
                return await run.fail_with(group, failed)
            if run.reported_fault is not None:
                return run.set_fault(run.reported_fault)
            if run.finding is not None:
                return run.fail(run.finding.reason, run.finding.message)
            if not group.living or run.stop_mode is StopMode.HARD or run.is_late():
                return None
            await run.wait_for_change()
        return None

    async def finish(self) -> GenerationEnd:
        """End what is left, and name the end."""
        run, group = self._run, self._run.group
        await run.end_monitors()
        if group is None:
            return GenerationEnd(outcome=Outcome.CRASHED if run.fault else Outcome.STOPPED)
        is_late = is_late_drain(run.stop_mode, is_past_deadline=run.is_late(), has_living=bool(group.living))
        number = signal.SIGKILL if is_late else self._settings.shutdown_signal
        stuck = await group.end(number, 0 if number == signal.SIGKILL else self._settings.shutdown_timeout_s)
        outcome = Outcome.CRASHED if run.fault else classify(group.exits(), run.stop_mode)
        note = LATE_DRAIN if is_late else ""
        if outcome is Outcome.COMPLETED:
            note = await run.run_post_script()
        return GenerationEnd(outcome=outcome, is_late=is_late, note=note, stuck=tuple(stuck))

    def close(self) -> None:
        """Remove the files of the generation."""
        if self._run.group is not None:
            self._run.group.close()
            self._run.group = None
        shutil.rmtree(self.directory, ignore_errors=True)

    async def _start(self) -> bool:
        """Start the workers after everything that comes before them. Raises OSError."""
        began, run, script = time.monotonic(), self._run, self._settings.pre_script
        if run.is_ending:
            return False
        if script is not None:
            status, tail = await run.run_pre_script(script)
            if run.is_ending:
                return False
            if status != 0:
                run.fail("PreScriptFailed", failed_script(script, status, tail))
                return False
        missing = await self._find_missing_script()
        if run.is_ending:
            return False
        if missing:
            run.fail("StartFailed", missing)
            return False
        if run.start.rank == 0 and is_port_in_use(run.start.master_port):
            run.fail("WorkerFault", run.port_taken_message())
            return False
        runtime = self._runtime
        run.group = WorkerGroup(self._settings, run.start, self.directory, runtime.reaper, runtime.pump, tap=self.tap)
        await self._spawn(run.group)
        METRICS.set("last_start_seconds", time.monotonic() - began)
        run.begin_monitors(run.group)
        return True

    async def _find_missing_script(self) -> str | None:
        """Say that the training script is missing. A stop does not wait for slow storage."""
        searching = asyncio.ensure_future(find_missing_script(self._settings))
        while not searching.done() and not self._run.is_ending:
            await self._run.wait_for_change(searching)
        searching.cancel()
        return searching.result() if searching.done() else None

    async def _spawn(self, group: WorkerGroup) -> None:
        """Start the processes. An exec can hang on slow storage, so a stop does not wait for it. Raises OSError."""
        run = self._run
        spawning = asyncio.ensure_future(group.spawn(self._runtime.environ, run.wake.set))
        given_up_at: float | None = None
        while not spawning.done():
            await run.wait_for_change(spawning, limit_s=None if given_up_at is None else KILL_AGAIN_S)
            if run.stop_mode is StopMode.HARD or run.is_late():
                given_up_at = given_up_at or time.monotonic()
                group.give_up_spawning()
                if time.monotonic() - given_up_at > GIVE_UP_S:
                    spawning.cancel()
                    raise OSError("a worker hangs between fork and exec; is the storage of its program gone?")
        await spawning


def is_port_in_use(port: int) -> bool:
    """Tell whether something on this host listens on the port that torch's store needs."""
    family = socket.AF_INET6 if socket.has_ipv6 and os.path.exists("/proc/net/if_inet6") else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
