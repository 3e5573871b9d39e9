"""Runs one generation of workers from its start to its end, whichever way the workers come and go."""

from __future__ import annotations

from typing import Protocol

from elastipod.worker_file import Progress
from elastipod_agent.core.exits import StopMode
from elastipod_agent.generation.faults import Fault, GenerationEnd
from elastipod_agent.generation.generation_run import GenerationRun


class GenerationWorkers(Protocol):
    """How the workers of one generation come and go: processes of its own, or processes that live over generations."""

    async def start(self) -> bool:
        """Start the workers; False if the generation has already ended: a stop was requested or the start failed."""

    async def supervise(self) -> None:
        """Return once the workers have ended, failed, or are to be ended."""

    async def finish(self) -> GenerationEnd:
        """Leave no worker in this generation, and name its end."""

    def close(self) -> None:
        """Release what the generation used. Called in any case."""


class GenerationSupervisor:
    """Runs once. `stop` may be called at any time."""

    def __init__(self, run: GenerationRun, workers: GenerationWorkers) -> None:
        self._run = run
        self._workers = workers

    async def run(self) -> GenerationEnd:
        """Run to the end. What workers, scripts or the machine do raises nothing: it is in the GenerationEnd."""
        try:
            if await self._workers.start():
                await self._workers.supervise()
            return await self._workers.finish()
        finally:
            self._run.progress()  # the last one, before the worker file is closed
            self._workers.close()

    def stop(self, mode: StopMode, timeout_s: float, restart_mode: str = "", *, leaves: bool | None = None) -> None:
        """Ask for the end: a graceful stop gives the workers this long to drain, a hard one ends them now. Hard replaces graceful.

        restart_mode and leaves: as in /stop.
        """
        self._run.request_stop(mode, timeout_s, restart_mode, leaves=leaves)

    def shorten_drain(self, timeout_s: float) -> bool:
        """Give a drain that is under way less time; False if it does not have more than that."""
        return self._run.shorten_drain(timeout_s)

    def leave_after_drain(self) -> None:
        """Tell workers that drain that this pod ends afterwards."""
        self._run.leave_after_drain()

    def note_last(self) -> None:
        """Take note that the pod is being terminated: no other generation follows."""
        self._run.is_last = True

    def report_fault(self, fault: Fault) -> None:
        """Take a fault that a worker reports."""
        self._run.report_fault(fault)

    @property
    def is_draining(self) -> bool:
        """True while a graceful stop is under way."""
        return self._run.is_draining

    def progress(self) -> Progress | None:
        """Give the last report of local rank 0, also after the end."""
        return self._run.progress()
