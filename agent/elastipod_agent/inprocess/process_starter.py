"""Starts processes of workers that live over generations."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping

from elastipod_agent.core.requests import StartRequest
from elastipod_agent.core.worker_env import pod_env
from elastipod_agent.generation.faults import Fault, failure_without_worker, not_killed
from elastipod_agent.runtime import AgentRuntime
from elastipod_agent.scripts import ScriptRunner, failed_script
from elastipod_agent.settings import find_missing_script
from elastipod_agent.workers.failure import describe_error
from elastipod_agent.workers.group import KILL_AGAIN_S, WorkerGroup


class ProcessStarter:
    """Starts and replaces the processes of one group. is_closing: tells whether the workers are about to end for good."""

    def __init__(self, runtime: AgentRuntime, group: WorkerGroup, is_closing: Callable[[], bool]) -> None:
        self._runtime = runtime
        self._group = group
        self._is_closing = is_closing
        self._script_wake = asyncio.Event()
        self._scripts = ScriptRunner(
            runtime.reaper,
            runtime.pump,
            is_over=is_closing,
            wake=self._script_wake,
            patience_s=runtime.settings.shutdown_timeout_s,
        )

    def close(self) -> None:
        """Start nothing more."""
        self._group.give_up_spawning()
        self._script_wake.set()

    async def start(
        self, start: StartRequest, local_ranks: frozenset[int], reset_rank: Callable[[int], None]
    ) -> Fault | None:
        """Start processes, after ending what their predecessors left running; gives why it failed.

        The pre-train script runs before a complete new set. reset_rank: called for each rank before its process starts.
        """
        is_whole_set = not self._group.living
        if stuck := await self._group.end(signal.SIGKILL, 0, local_ranks):
            return Fault("WorkerUnhealthy", failure_without_worker(not_killed(stuck)))
        try:
            why_not, reason = await find_missing_script(self._runtime.settings), "StartFailed"
            if why_not is None and is_whole_set:
                why_not, reason = await self._pre_train(start), "PreScriptFailed"
            if why_not is None:
                for local_rank in local_ranks:
                    reset_rank(local_rank)
                await self._replace_workers(start, local_ranks)
                return None
        except OSError as error:
            why_not, reason = f"the workers could not be started: {describe_error(error)}", "StartFailed"
        return Fault(reason, failure_without_worker(why_not))

    async def _replace_workers(self, start: StartRequest, local_ranks: frozenset[int]) -> None:
        """Start processes. An exec that hangs (on storage that is gone) is ended like a late rank, or at the end. Raises OSError."""
        environ: Mapping[str, str] = self._runtime.environ
        spawning = asyncio.ensure_future(self._group.replace_workers(environ, start, local_ranks))
        late_at = time.monotonic() + self._runtime.settings.inprocess_timeout_s
        while not spawning.done():
            await asyncio.wait([spawning], timeout=KILL_AGAIN_S)
            if not spawning.done() and (self._is_closing() or time.monotonic() >= late_at):
                self._runtime.reaper.kill_pending_children()
        spawning.result()

    async def _pre_train(self, start: StartRequest) -> str | None:
        script = self._runtime.settings.pre_script
        if script is None:
            return None
        env = pod_env(self._runtime.environ, start, self._runtime.settings.layout)
        status, tail = await self._scripts.run(script, "pre-train", env)
        return None if status == 0 or self._is_closing() else failed_script(script, status, tail)
