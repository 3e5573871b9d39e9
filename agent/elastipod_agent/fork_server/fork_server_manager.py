"""Keeps a fork server running, with a few processes forked in advance; logs why a start must be cold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

from elastipod_agent.core.warm_start import (
    Program,
    cold_start_reason,
    read_program,
    recent_losses,
    remaining_wait_s,
    replacement_delay_s,
)
from elastipod_agent.core.worker_env import steady_env
from elastipod_agent.fork_server import bootstrap
from elastipod_agent.fork_server.client import ForkRefused, ForkServerClient, ForkServerLost
from elastipod_agent.fork_server.forked_worker import ForkedWorker
from elastipod_agent.log import EventLog
from elastipod_agent.settings import Settings
from elastipod_agent.topology import bind
from elastipod_agent.workers.output_pump import OutputPump
from elastipod_agent.workers.reaper import Reaper

# Delay from a start until processes for the next generation are forked in advance, so as not to slow down the start.
PREFORK_DELAY_S = 5.0
_MAX_PREFORKED = 64
_FORK_ROUNDS = 3  # of one start, where processes die as soon as they are forked
_POLL_S = 1.0


class ForkServerManager:
    """All methods belong to the event loop's thread. `fork` gives None and logs the reason if workers must start cold."""

    def __init__(
        self, settings: Settings, environ: Mapping[str, str], reaper: Reaper, pump: OutputPump, log: EventLog
    ) -> None:
        self._program: Program | None = read_program(settings.worker_command(0)) if settings.is_python else None
        self._cold_start_reason = (
            cold_start_reason(environ) if self._program else "the workers do not run a Python program"
        )
        self._preload = settings.preload
        self._nproc = settings.layout.nproc
        # OpenMP sets the number of threads of a single worker, when it is loaded, from the CPUs that the process may use.
        self._cpus = settings.cpus[0] if settings.cpus and self._nproc == 1 else None
        self._environ = steady_env(environ, settings.layout)
        self._reaper = reaper
        self._pump = pump
        self._log = log
        self._server: ForkServerClient | None = None
        self._starting: asyncio.Task[None] | None = None
        self._unavailable_reason = ""
        self._lost_at: list[float] = []  # recent losses since the last fork of workers, by the loop's clock
        self._preforked: list[ForkedWorker] = []
        self._prefork_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_ended = False
        self._on_settled: Callable[[], None] = lambda: None

    def begin(self, on_settled: Callable[[], None]) -> bool:
        """Start the server if it can fork these workers; True if so. on_settled is called once it is ready or has failed."""
        self._on_settled = on_settled
        if self._cold_start_reason:
            self._log.info("workers start cold", why=self._cold_start_reason)
            return False
        self._start_server()
        return True

    async def fork(self, count: int, cancelled: asyncio.Event) -> list[ForkedWorker] | None:
        """Give this many processes that wait for their programs, or None if the workers must start cold."""
        if self._cold_start_reason or self._has_ended:
            return None
        try:
            forked = await self._fork(count, cancelled)
        except (ForkServerLost, ForkRefused) as error:
            self._discard_preforked()
            if not cancelled.is_set():
                self._log.info("workers start cold", why=error)
            return None
        self._lost_at = []
        self._schedule_prefork(PREFORK_DELAY_S)
        return forked

    async def end(self) -> None:
        """End the server and the processes forked in advance, and wait until they are gone."""
        self._has_ended = True
        if self._prefork_timer is not None:
            self._prefork_timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        waiting = [asyncio.ensure_future(one.child.ended.wait()) for one in self._preforked]
        self._discard_preforked()
        if self._server is not None:
            await self._server.end()
        self._reaper.kill_stopped_strays(bootstrap.__file__)
        if waiting:
            await asyncio.wait(waiting, timeout=1.0)
            for wait in waiting:
                wait.cancel()

    async def _fork(self, count: int, cancelled: asyncio.Event) -> list[ForkedWorker]:
        """Raises ForkServerLost or ForkRefused."""
        server = await self._ready(cancelled)
        try:
            return await self._take(server, count)
        except ForkRefused as error:
            if not error.is_stale:
                raise
            self._log.info("fork server is restarted", why=error)
        self._discard_preforked()
        self._start_server(after=server)
        return await self._take(await self._ready(cancelled), count)

    async def _take(self, server: ForkServerClient, count: int) -> list[ForkedWorker]:
        """Take processes that were forked in advance, and fork the rest. Raises ForkServerLost or ForkRefused."""
        self._drop_unfit()
        if len(self._preforked) >= count:
            await server.check()
        # An earlier request may have been under way, and what it has forked may have died since. A process that dies here again and
        # again has a reason that a cold start tells.
        for _ in range(_FORK_ROUNDS):
            self._drop_unfit()
            if len(self._preforked) >= count:
                break
            forked = await server.fork(count - len(self._preforked))
            self._preforked += forked  # a statement of its own: the await may replace the list
        taken, self._preforked = self._preforked[:count], self._preforked[count:]
        return taken

    def _drop_unfit(self) -> None:
        for one in [one for one in self._preforked if not one.is_fit()]:
            self._preforked.remove(one)
            one.discard()

    async def _ready(self, cancelled: asyncio.Event) -> ForkServerClient:
        """Wait until the server has imported its modules. Raises ForkServerLost."""
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        off = asyncio.ensure_future(cancelled.wait())
        try:
            while not cancelled.is_set():
                server, starting = self._server, self._starting
                if server is not None and server.is_ready:
                    return server
                if starting is not None:
                    await asyncio.wait([starting, off], return_when=asyncio.FIRST_COMPLETED)
                    continue
                if server is None:
                    raise ForkServerLost(self._unavailable_reason)
                if server.is_stopped():
                    raise server.abandon("it is stopped by a signal")
                left = remaining_wait_s(loop.time(), asked_at, server.last_message_at)
                if left <= 0:
                    raise ForkServerLost(f"the fork server is still importing {server.module}")
                change = asyncio.ensure_future(server.changed.wait())
                await asyncio.wait([change, off], timeout=min(left, _POLL_S), return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
        finally:
            off.cancel()
        raise ForkServerLost("the start was cancelled")

    def _start_server(self, pause_s: float = 0.0, after: ForkServerClient | None = None) -> None:
        """Start a server in the background. A start of workers waits for it, except during the pause.

        after: the previous server, which is ended first.
        """
        self._server = None
        task = asyncio.ensure_future(self._start_and_watch(pause_s, after))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if not pause_s:
            self._starting = task

    async def _start_and_watch(self, pause_s: float, after: ForkServerClient | None) -> None:
        assert self._program is not None
        interpreter = self._program.command[0]
        try:
            if after is not None:
                await after.end()
            await asyncio.sleep(pause_s)
            self._reaper.kill_stopped_strays(bootstrap.__file__)
            self._starting = asyncio.current_task()
            server = await ForkServerClient.start(
                interpreter, self._environ, self._program, self._preload, self._reaper, self._pump
            )
        except OSError as error:
            self._server_lost(f"{interpreter} cannot be run: {error.strerror}", is_unusable=False)
            return
        finally:
            self._starting = None
        if self._cpus is not None:
            bind(server.child.pid, self._cpus)
        self._server = server
        self._tasks.add(watch := asyncio.ensure_future(self._watch(server)))
        watch.add_done_callback(self._tasks.discard)

    async def _watch(self, server: ForkServerClient) -> None:
        """Log when the server is ready, and handle its loss."""
        await server.changed.wait()
        if server.is_ready:
            for note in server.notes:
                self._log.warning(note)
            self._log.info("fork server is ready", seconds=server.seconds)
            self._on_settled()
            if not self._preforked:
                self._schedule_prefork(0.0)
        await server.lost.wait()
        if self._server is server and not self._has_ended:
            self._server_lost(server.lost_reason or "it ended", is_unusable=server.is_unusable)

    def _server_lost(self, why: str, *, is_unusable: bool) -> None:
        self._server = None
        self._on_settled()
        self._discard_preforked()
        now = asyncio.get_running_loop().time()
        self._lost_at = [*recent_losses(self._lost_at, now), now]
        pause_s = None if is_unusable else replacement_delay_s(len(self._lost_at))
        self._unavailable_reason = f"there is no fork server: {why}"
        if pause_s is None:
            self._cold_start_reason = self._unavailable_reason
            self._log.warning("no more warm workers: all further workers start cold", why=why)
        else:
            self._log.warning("fork server is lost", why=why, next_in_s=pause_s)
            self._start_server(pause_s)

    def _schedule_prefork(self, pause_s: float) -> None:
        if self._prefork_timer is not None:
            self._prefork_timer.cancel()
        self._prefork_timer = asyncio.get_running_loop().call_later(pause_s, self._start_prefork)

    def _start_prefork(self) -> None:
        self._tasks.add(task := asyncio.ensure_future(self._prefork()))
        task.add_done_callback(self._tasks.discard)

    async def _prefork(self) -> None:
        server, wanted = self._server, min(self._nproc, _MAX_PREFORKED)
        if server is None or not server.is_ready or len(self._preforked) >= wanted:
            return
        with suppress(ForkServerLost, ForkRefused):  # the next start finds out and logs it
            forked = await server.fork(wanted - len(self._preforked))
            missing = (
                max(0, wanted - len(self._preforked)) if server is self._server else 0
            )  # the server may have been replaced
            self._preforked += forked[:missing]
            for one in forked[missing:]:
                one.discard()

    def _discard_preforked(self) -> None:
        for one in self._preforked:
            one.discard()
        self._preforked = []
