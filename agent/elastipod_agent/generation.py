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

from elastipod.worker_file import Progress
from elastipod_agent.clock import utc_now
from elastipod_agent.core.exits import Outcome, Stop, classify, describe_status
from elastipod_agent.core.requests import Start
from elastipod_agent.core.worker_env import pod_env
from elastipod_agent.settings import Script, Settings, missing_script
from elastipod_agent.workers import process_tree
from elastipod_agent.workers.failure import Failure, describe, shorten
from elastipod_agent.workers.group import Worker, WorkerGroup
from elastipod_agent.workers.output import OutputPump, Stream
from elastipod_agent.workers.reaper import Reaper
from elastipod_agent.workers.watches import Finding, Watch, Watches

GIVE_UP_S = 30.0  # how long a worker that hangs in its start is tried to be ended
GIVE_UP_AGAIN_S = 0.2


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a generation cannot go on: the reason as it stands in /status, and who failed how."""

    reason: str
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a generation ended.

    is_late: the time of a graceful stop ran out. note: a sentence worth showing, or "". stuck: pids that SIGKILL did not
    end.
    """

    outcome: Outcome
    is_late: bool = False
    note: str = ""
    stuck: tuple[int, ...] = ()


class Generation:
    """Runs once. `stop` may be called at any time; `on_fault` is called at once, before the rest is torn down."""

    def __init__(
        self,
        settings: Settings,
        start: Start,
        *,
        root: Path,
        environ: Mapping[str, str],
        reaper: Reaper,
        pump: OutputPump,
        on_fault: Callable[[Fault], None],
    ) -> None:
        self.start = start
        self._settings = settings
        self._environ = environ
        self._directory = root / f"gen-{start.run_generation:06d}"
        self._reaper = reaper
        self._pump = pump
        self._on_fault = on_fault
        self._group: WorkerGroup | None = None
        self._stop = Stop.NONE
        self._deadline: float | None = None  # monotonic
        self._wake = asyncio.Event()
        self._fault: Fault | None = None
        self._finding: Finding | None = None
        self._watches = Watches(self._found)
        self._last_progress: Progress | None = None

    def stop(self, mode: Stop, timeout_s: float) -> None:
        """Ask for the end: graceful gives the workers this long to drain, hard ends them now. Hard beats graceful."""
        if mode is Stop.GRACEFUL and self._stop is Stop.NONE:
            self._deadline = time.monotonic() + timeout_s
            self._stop = mode
            if self._group is not None:
                self._group.raise_event(time.time() + timeout_s, signal.SIGUSR1)
        elif mode is Stop.HARD:
            self._stop = mode
        self._wake.set()

    @property
    def is_draining(self) -> bool:
        """True while a graceful stop is under way."""
        return self._stop is Stop.GRACEFUL

    def progress(self) -> Progress | None:
        """Give the last report of local rank 0, also after the end."""
        if self._group is not None:
            self._last_progress = self._group.progress() or self._last_progress
        return self._last_progress

    async def run(self) -> End:
        """Run to the end. Never raises for what workers, scripts or the machine do: that is in the End."""
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
            self._fail("StartFailed", f"the workers could not be started: {error}")
            return False

    async def _prepare(self) -> bool:
        """Run the pre-train script and start the workers; False when the end has come already. Raises OSError."""
        if self._stop is not Stop.NONE:
            return False
        script = self._settings.pre_script
        if script is not None:
            status, tail = await self._run_script(script, "pre-train")
            if self._stop is not Stop.NONE:
                return False
            if status != 0:
                said = f"; it printed last:\n{tail}" if tail else ""
                self._fail("PreScriptFailed", f"{script.path} ended with {describe_status(status)}{said}")
                return False
        missing = missing_script(self._settings)
        if missing:
            self._fail("StartFailed", missing)
            return False
        if self.start.rank == 0 and is_taken(self.start.master_port):
            self._fail("WorkerFault", self._port_taken())
            return False
        self._group = WorkerGroup(self._settings, self.start, self._directory, self._reaper, self._pump)
        await self._spawn(self._group)
        self._watches.begin(self._wanted_watches())
        return True

    async def _spawn(self, group: WorkerGroup) -> None:
        """Start the workers. An exec can hang on slow storage, so a stop does not wait for it. Raises OSError."""
        spawning = asyncio.ensure_future(group.spawn(self._environ, self._wake.set))
        given_up_at: float | None = None
        while not spawning.done():
            await self._woken(spawning, limit_s=None if given_up_at is None else GIVE_UP_AGAIN_S)
            if self._stop is Stop.HARD or self._is_late():
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
                await self._report(group, failed)
                return
            if self._finding is not None:
                self._fail(self._finding.reason, self._finding.message)
                return
            if not group.living or self._stop is Stop.HARD or self._is_late():
                return
            await self._woken()

    def _wanted_watches(self) -> list[Watch]:
        """Give what is to be watched beside exits."""
        return []

    def _found(self, finding: Finding) -> None:
        self._finding = finding
        self._wake.set()

    async def _woken(self, *others: asyncio.Future[Any], limit_s: float | None = None) -> None:
        """Wait for an exit, a stop, one of the others, the end of the drain's time, or at most for so long."""
        if limit_s is None and self._deadline is not None:
            limit_s = max(0.0, self._deadline - time.monotonic())
        wait: asyncio.Future[Any] = asyncio.ensure_future(self._wake.wait())
        await asyncio.wait([wait, *others], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        wait.cancel()
        self._wake.clear()

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    async def _finish(self) -> End:
        """Tear down what is left and name the end."""
        await self._watches.end()
        group = self._group
        if group is None:
            return End(outcome=Outcome.CRASHED if self._fault else Outcome.STOPPED)
        is_late = self._is_late() and self._stop is Stop.GRACEFUL and bool(group.living)
        number = signal.SIGKILL if is_late else self._settings.shutdown_signal
        stuck = await group.end(number, 0 if number == signal.SIGKILL else self._settings.shutdown_timeout_s)
        outcome = Outcome.CRASHED if self._fault else classify(group.exits(), self._stop)
        note = ""
        if is_late:
            note = "the workers did not drain in the time that the stop gave them and were killed"
        if outcome is Outcome.COMPLETED and self._settings.post_script is not None:
            note = await self._post_train(self._settings.post_script)
        return End(outcome=outcome, is_late=is_late, note=note, stuck=tuple(stuck))

    async def _post_train(self, script: Script) -> str:
        status, tail = await self._run_script(script, "post-train")
        if status == 0:
            return ""
        return shorten(f"training completed, but {script.path} ended with {describe_status(status)}\n{tail}".strip())

    async def _run_script(self, script: Script, name: str) -> tuple[int, str]:
        """Run a script until it ends or a stop comes; gives its status and the end of what it printed."""
        source, sink = os.pipe2(os.O_CLOEXEC)
        stream = Stream(source, f"[{name}]:".encode(), 1)
        env = pod_env(self._environ, self.start, self._settings.layout)
        try:
            child = await self._reaper.spawn(script.command(), env, stdout=sink, stderr=sink)
        except OSError as error:
            os.close(source)
            return 127, f"{script.path} cannot be run: {error.strerror}"
        finally:
            os.close(sink)
        self._pump.add(stream)
        ended = asyncio.ensure_future(child.ended.wait())
        while child.status is None and self._stop is Stop.NONE:
            wake = asyncio.ensure_future(self._wake.wait())
            await asyncio.wait([ended, wake], return_when=asyncio.FIRST_COMPLETED)
            wake.cancel()
            self._wake.clear()
        if child.status is None:
            await process_tree.end_all(self._reaper, {child.pid}, "\0", self._settings.shutdown_timeout_s)
            self._reaper.collect()
        await asyncio.wait([ended], timeout=1.0)
        ended.cancel()
        await asyncio.wait([asyncio.wrap_future(self._pump.catch_up([stream]))], timeout=0.25)
        tail = "\n".join(stream.tail.decode("utf-8", "replace").strip().splitlines()[-20:])
        return -signal.SIGKILL if child.status is None else child.status, tail

    async def _report(self, group: WorkerGroup, worker: Worker) -> None:
        await group.catch_up(worker)
        assert worker.child.status is not None
        tail = worker.stderr_tail()
        failure = describe(
            global_rank=group.global_rank(worker),
            local_rank=worker.local_rank,
            status=worker.child.status,
            error_file=worker.error_file,
            stderr_tail=tail,
            time=utc_now(),
        )
        reason = "WorkerCrash"
        if failure.global_rank == 0 and "EADDRINUSE" in tail and str(self.start.master_port) in tail:
            reason = "WorkerFault"
            failure = replace(failure, message=shorten(f"{self._port_taken()}\n{failure.message}"))
        self._set_fault(Fault(reason, failure))

    def _port_taken(self) -> str:
        return f"EADDRINUSE: master port {self.start.master_port} is in use on this host"

    def _fail(self, reason: str, message: str) -> None:
        """Note a fault that is no worker's."""
        failure = Failure(
            global_rank=None, local_rank=None, exitcode=None, signal=None, message=shorten(message), time=utc_now()
        )
        self._set_fault(Fault(reason, failure))

    def _set_fault(self, fault: Fault) -> None:
        self._fault = fault
        self._on_fault(fault)


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
