"""The state of one generation in this pod: what the operator asked for, what went wrong, and waiting for the next change."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from elastipod.ipc.protocol import RestartMode
from elastipod.worker_file import Progress
from elastipod_agent.core.exits import StopMode, is_port_taken
from elastipod_agent.core.inprocess_restart import is_deeper, kept_after_drain
from elastipod_agent.core.requests import StartRequest
from elastipod_agent.core.worker_env import pod_env
from elastipod_agent.generation.faults import Fault, describe_worker_failure, failure_without_worker, stderr_tail
from elastipod_agent.runtime import AgentRuntime
from elastipod_agent.scripts import ScriptRunner, failed_script
from elastipod_agent.settings import Script
from elastipod_agent.workers.failure import shorten
from elastipod_agent.workers.group import WorkerGroup, WorkerProcess
from elastipod_agent.workers.hang_monitor import HangMonitor
from elastipod_agent.workers.log_monitor import monitor_logs
from elastipod_agent.workers.monitors import Finding, Monitor, Monitors

# How long workers have to show that they can answer a drain. They see the event within milliseconds; a script asks for it once a step.
ANSWER_TIME_S = 5.0
# A worker that has just been started may still be importing; it asks afterwards, and has trained for less than this.
IMPORT_TIME_S = 30.0
SHORTEN_MARGIN_S = 1.0  # a repeated stop gives whole seconds
POLL_S = 0.1  # how often a drain checks whether the workers have acknowledged it; they cannot wake the agent


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvents:
    """What the agent is told while a generation runs.

    on_fault: called at once, before the rest is torn down. on_deeper: called when a worker asks for more than the fault does. on_saving:
    called once in a drain, when all workers have acknowledged it. on_unanswered: called once in a drain, when no worker in this pod can
    know of it.
    """

    on_fault: Callable[[Fault], None]
    on_deeper: Callable[[RestartMode], None]
    on_saving: Callable[[], None]
    on_unanswered: Callable[[], None]


class GenerationRun:
    """One generation. Code that changes it calls `wake.set`; the code that runs it waits with `wait_for_change`.

    group: the workers while they run. restart_mode, leaves: as in /stop. finding: of a monitor. reported_fault: by a worker.
    reports_before: the number of progress reports by local rank, of processes that are older than the generation. is_last: the pod is
    being terminated, so no other generation follows here.
    """

    def __init__(self, runtime: AgentRuntime, start: StartRequest, events: RunEvents) -> None:
        self.start = start
        self.stop_mode = StopMode.NONE
        self.restart_mode = ""
        self.leaves: bool | None = None
        self.group: WorkerGroup | None = None
        self.fault: Fault | None = None
        self.reported_fault: Fault | None = None
        self.replaced_by_request: set[int] = set()  # local ranks whose workers asked for a new process
        self.finding: Finding | None = None
        self.is_last = False
        self.reports_before: Mapping[int, int] = {}
        self.wake = asyncio.Event()
        self._runtime = runtime
        self._events = events
        self._began_at = time.monotonic()
        self._deadline: float | None = None  # of the drain, monotonic
        self._unanswered_check_at: float | None = None  # monotonic
        self._is_saving = False
        self._last_progress: Progress | None = None
        self._monitors = Monitors(self._on_finding)
        self._hang_monitor: HangMonitor | None = None
        self._log_monitor = monitor_logs(
            start,
            runtime.settings.job,
            reaper=runtime.reaper,
            environ=runtime.environ,
            pump=runtime.pump,
            is_over=self._expects_no_output,
        )

    # -- what the operator and the workers say ---------------------------------------------------------------------

    def request_stop(self, mode: StopMode, timeout_s: float, restart_mode: str, *, leaves: bool | None) -> None:
        """Begin a drain of at most this long, or a hard stop. A hard stop replaces a drain."""
        self.restart_mode, self.leaves = restart_mode, leaves
        if mode is StopMode.GRACEFUL and self.stop_mode is StopMode.NONE:
            self._deadline = time.monotonic() + timeout_s
            self.stop_mode = mode
            self._unanswered_check_at = max(time.monotonic() + ANSWER_TIME_S, self._began_at + IMPORT_TIME_S)
            if self.group is not None:
                kept = kept_after_drain(restart_mode)
                self.group.raise_event(timeout_s, signal.SIGUSR1, leaves=leaves, kept=kept)
        elif mode is StopMode.HARD:
            self.stop_mode = mode
        self.wake.set()

    def shorten_drain(self, timeout_s: float) -> bool:
        """Give a drain that is under way less time; False if it does not have more than that."""
        deadline = time.monotonic() + timeout_s
        if self._deadline is None or deadline > self._deadline - SHORTEN_MARGIN_S:
            return False
        self._deadline = deadline
        if self.group is not None:
            self.group.file.set_deadline(time.time() + timeout_s, steady_deadline=deadline)
        self.wake.set()
        return True

    def leave_after_drain(self) -> None:
        """Tell workers that drain that this pod ends afterwards. Those that have not stopped yet hand over what they hold."""
        self.leaves = True
        if self.group is not None and self.is_draining:
            self.group.file.set_leaves()

    def report_fault(self, fault: Fault) -> None:
        """Record the first fault that a worker reports, and of all of them the most that is asked for.

        The first one is often that of a peer whose collective has failed; who has failed itself may ask for more.
        """
        if fault.restart_mode is RestartMode.LOCAL_PRL and fault.failure.local_rank is not None:
            self.replaced_by_request.add(fault.failure.local_rank)
        self.reported_fault = self._deepened(self.reported_fault, fault) or fault
        if self.fault is not None and (deeper := self._deepened(self.fault, fault)) is not self.fault:
            self.fault = deeper
            assert fault.restart_mode is not None
            self._events.on_deeper(fault.restart_mode)
        self.wake.set()

    @staticmethod
    def _deepened(first: Fault | None, later: Fault) -> Fault | None:
        if first is None or not is_deeper(later.restart_mode, first.restart_mode):
            return first
        return replace(first, restart_mode=later.restart_mode)

    # -- what follows from it --------------------------------------------------------------------------------------

    @property
    def is_ending(self) -> bool:
        """True once a stop of either kind was requested."""
        return self.stop_mode is not StopMode.NONE

    @property
    def is_draining(self) -> bool:
        """True while a graceful stop is under way."""
        return self.stop_mode is StopMode.GRACEFUL

    @property
    def has_deadline(self) -> bool:
        """True while a drain limits the time."""
        return self._deadline is not None

    def is_late(self) -> bool:
        """Tell whether the time of a drain has run out."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _time_left_s(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def drop_deadline(self) -> None:
        """Wait for changes without the limit of the drain, which is over."""
        self._deadline = None

    def progress(self) -> Progress | None:
        """Give the last report of local rank 0 in this generation, also after the end."""
        if self.group is not None:
            if self.group.file.num_reports(0) == self.reports_before.get(0, 0):
                return None
            self._last_progress = self.group.progress() or self._last_progress
        return self._last_progress

    async def wait_for_change(self, *others: asyncio.Future[Any], limit_s: float | None = None) -> None:
        """Wait for an exit, a stop, one of the other futures, the end of the drain's time, or at most this long."""
        if limit_s is None:
            limit_s = self._time_left_s()
        if self.is_draining and not self._is_saving:
            limit_s = POLL_S if limit_s is None else min(limit_s, POLL_S)
        wait: asyncio.Future[Any] = asyncio.ensure_future(self.wake.wait())
        await asyncio.wait([wait, *others], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        wait.cancel()
        self.wake.clear()
        self._check_acknowledged()

    def _check_acknowledged(self) -> None:
        group = self.group
        if group is None or self._is_saving or not self.is_draining:
            return
        if all(group.file.acknowledged(rank) for rank in range(self._runtime.settings.layout.nproc)):
            self._is_saving = True
            self._events.on_saving()
        elif self._unanswered_check_at is not None and time.monotonic() >= self._unanswered_check_at:
            self._unanswered_check_at = None
            if not group.answers_events(signal.SIGUSR1):
                self._events.on_unanswered()

    # -- faults ----------------------------------------------------------------------------------------------------

    def set_fault(self, fault: Fault) -> None:
        """Record why the generation cannot continue, and tell the agent at once."""
        self.fault = fault
        self._events.on_fault(fault)

    def fail(self, reason: str, message: str) -> None:
        """Record a fault that no worker caused."""
        self.set_fault(Fault(reason, failure_without_worker(message)))

    async def fail_with(self, group: WorkerGroup, worker: WorkerProcess) -> None:
        """Record the failure of a worker that has ended."""
        failure = await describe_worker_failure(group, worker)
        reason = "WorkerCrash"
        if is_port_taken(failure.global_rank, await stderr_tail(worker), self.start.master_port):
            reason = "WorkerFault"
            failure = replace(failure, message=shorten(f"{self.port_taken_message()}\n{failure.message}"))
        self.set_fault(Fault(reason, failure))

    def port_taken_message(self) -> str:
        """Say that the master port cannot be used."""
        return f"EADDRINUSE: master port {self.start.master_port} is in use on this host"

    # -- monitors --------------------------------------------------------------------------------------------------

    @property
    def output_tap(self) -> Callable[[bytes], None] | None:
        """What takes the output of local rank 0; None if no rule monitors it."""
        return None if self._log_monitor is None else self._log_monitor.take

    def begin_monitors(self, group: WorkerGroup) -> None:
        """Monitor these workers for hangs and log rules."""
        settings, wanted = self._runtime.settings, list[Monitor]()
        if settings.hang_timeout_s != 0:
            print_line = self._runtime.pump.print_line
            self._hang_monitor = HangMonitor(settings, group, print_line, lambda: self.is_ending, self.reports_before)
            wanted.append(self._hang_monitor)
        if self._log_monitor is not None and group.has_tap:
            wanted.append(self._log_monitor)
        elif self._log_monitor is not None:  # silence would be a fault
            self._runtime.log.warning(
                "log rules apply to new processes only: local rank 0 was started before there were any, and writes to a file"
            )
        self._monitors.begin(wanted)

    async def hang_culprits(self) -> frozenset[int]:
        """Give the local ranks that hang when a stop gives no more time, whichever pod has seen it; call it before `end_monitors`."""
        if self._hang_monitor is None or not (self.stop_mode is StopMode.HARD or self.is_late()):
            return frozenset()
        return await self._hang_monitor.culprits()

    async def end_monitors(self) -> None:
        """Stop monitoring. Raises what a monitor failed with, which is an error of the agent."""
        await self._monitors.end()

    def _on_finding(self, finding: Finding) -> None:
        self.finding = finding
        self.wake.set()

    def _expects_no_output(self) -> bool:
        """True when local rank 0 is not expected to print anything more."""
        is_gone = self.group is None or not any(worker.local_rank == 0 for worker in self.group.living)
        return is_gone or self.is_ending

    # -- scripts ---------------------------------------------------------------------------------------------------

    async def run_pre_script(self, script: Script) -> tuple[int, str]:
        """Run the pre-train script until it ends or a stop is requested; gives its status and the end of its output."""
        return await self._run_script(script, "pre-train", lambda: self.is_ending)

    async def _run_script(self, script: Script, name: str, is_over: Callable[[], bool]) -> tuple[int, str]:
        runtime = self._runtime
        runner = ScriptRunner(
            runtime.reaper,
            runtime.pump,
            is_over=is_over,
            wake=self.wake,
            patience_s=runtime.settings.shutdown_timeout_s,
            time_left_s=self._time_left_s,
        )
        return await runner.run(script, name, pod_env(runtime.environ, self.start, runtime.settings.layout))

    def _must_end(self) -> bool:
        return self.stop_mode is StopMode.HARD or self.is_late()

    async def run_post_script(self) -> str:
        """Run the post-train script, if there is one; gives a sentence if it failed, else "". A drain lets it end in time."""
        script = self._runtime.settings.post_script
        if script is None:
            return ""
        await self._runtime.pump.caught_up()  # the output of the workers comes before that of the script
        status, tail = await self._run_script(script, "post-train", self._must_end)
        return "" if status == 0 else shorten(f"training completed, but {failed_script(script, status, tail)}")
