"""One run of the workers, from its pre-train script to its last process: what happened, and nothing left behind."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastipod.ipc.protocol import RestartMode
from elastipod.worker_file import Progress
from elastipod_agent.clock import utc_now
from elastipod_agent.core.exits import Outcome, StopMode, classify, is_late_drain, is_port_taken
from elastipod_agent.core.requests import StartRequest
from elastipod_agent.core.worker_env import pod_env
from elastipod_agent.metrics import METRICS
from elastipod_agent.scripts import ScriptRunner, failed_script
from elastipod_agent.settings import Script, Settings, missing_script
from elastipod_agent.workers.failure import Failure, describe, describe_error, shorten
from elastipod_agent.workers.group import WorkerGroup, WorkerProcess
from elastipod_agent.workers.hang_monitor import HangMonitor
from elastipod_agent.workers.log_monitor import monitor_logs
from elastipod_agent.workers.monitors import Finding, Monitor, Monitors
from elastipod_agent.workers.output_pump import OutputPump
from elastipod_agent.workers.reaper import Reaper

GIVE_UP_S = 30.0  # how long a worker that hangs in its start is tried to be ended
GIVE_UP_AGAIN_S = 0.2
# In a drain workers have so long to show that they can answer: a level is seen within milliseconds, a question comes with a step.
ANSWER_TIME_S = 5.0
# One that was only just started may still be at its imports, after which it asks; it has trained for less than that.
IMPORT_TIME_S = 30.0
SHORTEN_MARGIN_S = 1.0  # a repeated stop says whole seconds
POLL_S = 0.1  # how often a drain looks whether the workers know of it; they have no way to wake us


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a generation cannot go on: the reason as it stands in /status, and who failed how.

    restart_mode: what the worker that reported it asks for.
    """

    reason: str
    failure: Failure
    restart_mode: RestartMode | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEnd:
    """How a generation ended.

    is_late: the time of a graceful stop ran out. note: a sentence worth showing, or "". stuck: pids that SIGKILL did not
    end.
    """

    outcome: Outcome
    is_late: bool = False
    note: str = ""
    stuck: tuple[int, ...] = ()


class GenerationSupervisor:
    """Runs once. `stop` may be called at any time; `on_fault` is called at once, before the rest is torn down.

    on_saving: called once in a drain, when all workers know of it. on_unanswered: called once in a drain when it turns out that
    no worker here can know of it.
    """

    def __init__(
        self,
        settings: Settings,
        start: StartRequest,
        *,
        root: Path,
        environ: Mapping[str, str],
        reaper: Reaper,
        pump: OutputPump,
        on_fault: Callable[[Fault], None],
        on_saving: Callable[[], None],
        on_unanswered: Callable[[], None],
    ) -> None:
        self.start = start
        self._settings = settings
        self._environ = environ
        self._directory = root / f"gen-{start.run_generation:06d}"
        self._reaper = reaper
        self._pump = pump
        self._on_fault = on_fault
        self._on_saving = on_saving
        self._on_unanswered = on_unanswered
        self._is_saving = False
        self._began_at = time.monotonic()
        self._unanswered_check_at: float | None = (
            None  # monotonic: when it is looked whether the workers can answer an event
        )
        self._group: WorkerGroup | None = None
        self._stop = StopMode.NONE
        self._deadline: float | None = None  # monotonic
        self._wake = asyncio.Event()
        self._fault: Fault | None = None
        self._finding: Finding | None = None
        self._reported_fault: Fault | None = None
        self._monitors = Monitors(self._on_finding)
        self._log_monitor = monitor_logs(
            start, settings.job, reaper=reaper, environ=environ, pump=pump, is_over=self._is_quiet
        )
        self._last_progress: Progress | None = None
        self._reports_before: Mapping[int, int] = {}  # by local rank, of processes that are older than the generation

    def stop(self, mode: StopMode, timeout_s: float, restart_mode: str = "", *, leaves: bool | None = None) -> None:
        """Ask for the end: graceful gives the workers this long to drain, hard ends them now. Hard beats graceful.

        restart_mode and leaves: as in /stop; these workers end in any case.
        """
        if mode is StopMode.GRACEFUL and self._stop is StopMode.NONE:
            self._deadline = time.monotonic() + timeout_s
            self._stop = mode
            self._unanswered_check_at = max(time.monotonic() + ANSWER_TIME_S, self._began_at + IMPORT_TIME_S)
            if self._group is not None:
                self._group.raise_event(time.time() + timeout_s, signal.SIGUSR1, leaves=leaves)
        elif mode is StopMode.HARD:
            self._stop = mode
        self._wake.set()

    def shorten(self, timeout_s: float) -> bool:
        """Give a drain that is under way less time; False where it has no more than that."""
        deadline = time.monotonic() + timeout_s
        if self._deadline is None or deadline > self._deadline - SHORTEN_MARGIN_S:
            return False
        self._deadline = deadline
        if self._group is not None:
            self._group.file.set_deadline(time.time() + timeout_s)
        self._wake.set()
        return True

    def report_fault(self, fault: Fault) -> None:
        """Take a worker's word that the run cannot go on."""
        self._reported_fault = self._reported_fault or fault
        self._wake.set()

    @property
    def is_draining(self) -> bool:
        """True while a graceful stop is under way."""
        return self._stop is StopMode.GRACEFUL

    def progress(self) -> Progress | None:
        """Give the last report of local rank 0, also after the end."""
        if self._group is not None:
            self._last_progress = self._group.progress() or self._last_progress
        return self._last_progress

    async def run(self) -> GenerationEnd:
        """Run to the end. Never raises for what workers, scripts or the machine do: that is in the GenerationEnd."""
        try:
            if await self._start():
                await self._supervise()
            return await self._finish()
        finally:
            self.progress()
            if self._group is not None:
                self._group.close()
                self._group = None
            shutil.rmtree(self._directory, ignore_errors=True)

    async def _start(self) -> bool:
        """Start the workers, after what comes before them; False when the end has come already."""
        try:
            shutil.rmtree(self._directory, ignore_errors=True)  # a plain operator may count its faults anew
            self._directory.mkdir(mode=0o700, parents=True)
            return await self._prepare()
        except OSError as error:
            self._fail("StartFailed", f"the workers could not be started: {describe_error(error)}")
            return False

    async def _prepare(self) -> bool:
        """Run the pre-train script and start the workers; False when the end has come already. Raises OSError."""
        began = time.monotonic()
        if self._stop is not StopMode.NONE:
            return False
        script = self._settings.pre_script
        if script is not None:
            status, tail = await self._run_script(script, "pre-train")
            if self._stop is not StopMode.NONE:
                return False
            if status != 0:
                self._fail("PreScriptFailed", failed_script(script, status, tail))
                return False
        missing = missing_script(self._settings)
        if missing:
            self._fail("StartFailed", missing)
            return False
        if self.start.rank == 0 and is_taken(self.start.master_port):
            self._fail("WorkerFault", self._port_taken())
            return False
        tap = None if self._log_monitor is None else self._log_monitor.take
        self._group = WorkerGroup(self._settings, self.start, self._directory, self._reaper, self._pump, tap=tap)
        await self._spawn(self._group)
        METRICS.set("last_start_seconds", time.monotonic() - began)
        self._monitors.begin(self._wanted_monitors())
        return True

    async def _spawn(self, group: WorkerGroup) -> None:
        """Start the workers. An exec can hang on slow storage, so a stop does not wait for it. Raises OSError."""
        spawning = asyncio.ensure_future(group.spawn(self._environ, self._wake.set))
        given_up_at: float | None = None
        while not spawning.done():
            await self._wait_for_change(spawning, limit_s=None if given_up_at is None else GIVE_UP_AGAIN_S)
            if self._stop is StopMode.HARD or self._is_late():
                given_up_at = given_up_at or time.monotonic()
                group.give_up_spawning()
                if time.monotonic() - given_up_at > GIVE_UP_S:
                    spawning.cancel()
                    raise OSError("a worker hangs between fork and exec; is the storage of its program gone?")
        await spawning

    async def _supervise(self) -> None:
        group = self._group
        assert group is not None
        while True:
            failed = group.first_failure()
            if failed is not None:
                await self._report_failure(group, failed)
                return
            if self._reported_fault is not None:
                self._set_fault(self._reported_fault)
                return
            if self._finding is not None:
                self._fail(self._finding.reason, self._finding.message)
                return
            if not group.living or self._stop is StopMode.HARD or self._is_late():
                return
            await self._wait_for_change()

    def _wanted_monitors(self) -> list[Monitor]:
        """Give what is to be watched beside exits."""
        monitors: list[Monitor] = []
        if self._settings.hang_timeout_s != 0 and self._group is not None:
            monitors.append(
                HangMonitor(self._settings, self._group, self._pump.print_line, self._is_ending, self._reports_before)
            )
        if self._log_monitor is not None:
            monitors.append(self._log_monitor)
        return monitors

    def _is_quiet(self) -> bool:
        """True when local rank 0 is not expected to print anything more."""
        is_gone = self._group is None or not any(worker.local_rank == 0 for worker in self._group.living)
        return is_gone or self._is_ending()

    def _is_ending(self) -> bool:
        return self._stop is not StopMode.NONE

    def _on_finding(self, finding: Finding) -> None:
        self._finding = finding
        self._wake.set()

    async def _wait_for_change(self, *others: asyncio.Future[Any], limit_s: float | None = None) -> None:
        """Wait for an exit, a stop, one of the others, the end of the drain's time, or at most for so long."""
        if limit_s is None and self._deadline is not None:
            limit_s = max(0.0, self._deadline - time.monotonic())
        if self.is_draining and not self._is_saving:
            limit_s = POLL_S if limit_s is None else min(limit_s, POLL_S)
        wait: asyncio.Future[Any] = asyncio.ensure_future(self._wake.wait())
        await asyncio.wait([wait, *others], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        wait.cancel()
        self._wake.clear()
        self._check_acknowledged()

    def _check_acknowledged(self) -> None:
        group = self._group
        if group is None or self._is_saving or not self.is_draining:
            return
        if all(group.file.acknowledged(one) for one in range(self._settings.layout.nproc)):
            self._is_saving = True
            self._on_saving()
        elif self._unanswered_check_at is not None and time.monotonic() >= self._unanswered_check_at:
            self._unanswered_check_at = None
            if not group.answers_events(signal.SIGUSR1):
                self._on_unanswered()

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    async def _finish(self) -> GenerationEnd:
        """Tear down what is left and name the end."""
        await self._monitors.end()
        group = self._group
        if group is None:
            return GenerationEnd(outcome=Outcome.CRASHED if self._fault else Outcome.STOPPED)
        is_late = is_late_drain(self._stop, is_past_deadline=self._is_late(), has_living=bool(group.living))
        number = signal.SIGKILL if is_late else self._settings.shutdown_signal
        stuck = await group.end(number, 0 if number == signal.SIGKILL else self._settings.shutdown_timeout_s)
        outcome = Outcome.CRASHED if self._fault else classify(group.exits(), self._stop)
        note = ""
        if is_late:
            note = "the workers did not drain in the time that the stop gave them and were killed"
        if outcome is Outcome.COMPLETED and self._settings.post_script is not None:
            note = await self._post_train(self._settings.post_script)
        return GenerationEnd(outcome=outcome, is_late=is_late, note=note, stuck=tuple(stuck))

    async def _post_train(self, script: Script) -> str:
        await self._pump.caught_up()  # what the workers printed comes before what the script prints
        status, tail = await self._run_script(script, "post-train")
        if status == 0:
            return ""
        return shorten(f"training completed, but {failed_script(script, status, tail)}")

    async def _run_script(self, script: Script, name: str) -> tuple[int, str]:
        """Run a script until it ends or a stop comes; gives its status and the end of what it printed."""
        runner = ScriptRunner(
            self._reaper,
            self._pump,
            is_over=lambda: self._stop is not StopMode.NONE,
            wake=self._wake,
            patience_s=self._settings.shutdown_timeout_s,
        )
        return await runner.run(script, name, pod_env(self._environ, self.start, self._settings.layout))

    async def _report_failure(self, group: WorkerGroup, worker: WorkerProcess) -> None:
        failure = await describe_worker_failure(group, worker)
        tail = worker.stderr_tail()
        reason = "WorkerCrash"
        if is_port_taken(failure.global_rank, tail, self.start.master_port):
            reason = "WorkerFault"
            failure = replace(failure, message=shorten(f"{self._port_taken()}\n{failure.message}"))
        self._set_fault(Fault(reason, failure))

    def _port_taken(self) -> str:
        return f"EADDRINUSE: master port {self.start.master_port} is in use on this host"

    def _fail(self, reason: str, message: str) -> None:
        """Note a fault that is no worker's."""
        self._set_fault(Fault(reason, failure_without_worker(message)))

    def _set_fault(self, fault: Fault) -> None:
        self._fault = fault
        self._on_fault(fault)


async def describe_worker_failure(group: WorkerGroup, worker: WorkerProcess) -> Failure:
    """Put together how a worker failed that has ended."""
    await group.catch_up(worker)
    assert worker.child.status is not None
    return describe(
        global_rank=group.global_rank(worker),
        local_rank=worker.local_rank,
        status=worker.child.status,
        error_file=worker.error_file,
        stderr_tail=worker.stderr_tail(),
        time=utc_now(),
    )


def failure_without_worker(message: str) -> Failure:
    """Give a failure that is no worker's."""
    return Failure(
        global_rank=None, local_rank=None, exitcode=None, signal=None, message=shorten(message), time=utc_now()
    )


def is_taken(port: int) -> bool:
    """Tell whether something on this host listens on the port; torch's store will want it."""
    family = socket.AF_INET6 if socket.has_ipv6 and os.path.exists("/proc/net/if_inet6") else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
