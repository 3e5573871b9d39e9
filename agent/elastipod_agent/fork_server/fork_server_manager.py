"""Keeps a warm server for the agent, and a few processes forked ahead; says why whenever a start has to do without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

from elastipod_agent.core.warm_start import Program, patience, pause_before_retry, read_program, why_fresh
from elastipod_agent.core.worker_env import steady_env
from elastipod_agent.fork_server import bootstrap
from elastipod_agent.fork_server.client import Refused, ServerLost, WarmServer
from elastipod_agent.fork_server.forked_worker import Newborn
from elastipod_agent.log import EventLog
from elastipod_agent.settings import Settings
from elastipod_agent.topology import bind
from elastipod_agent.workers.output_pump import OutputPump
from elastipod_agent.workers.reaper import Reaper

# So long after a start the next generation's processes are forked ahead: not while this one's are starting.
FORK_AHEAD_S = 5.0
_MAX_AHEAD = 64
_LOOK_S = 1.0


class WarmWorkers:
    """All methods belong to the event loop's thread. `bear` gives None, with a line in the log, when workers must start cold."""

    def __init__(
        self, settings: Settings, environ: Mapping[str, str], reaper: Reaper, pump: OutputPump, log: EventLog
    ) -> None:
        self._program: Program | None = read_program(settings.worker_command(0)) if settings.is_python else None
        self._why_never = why_fresh(environ) if self._program else "the workers are no Python program"
        self._preload = settings.preload
        self._nproc = settings.layout.nproc
        # A single worker's number of threads is counted, when OpenMP is loaded, from the CPUs that it may use.
        self._cpus = settings.cpus[0] if settings.cpus and self._nproc == 1 else None
        self._environ = steady_env(environ, settings.layout)
        self._reaper = reaper
        self._pump = pump
        self._log = log
        self._server: WarmServer | None = None
        self._starting: asyncio.Task[None] | None = None
        self._why_none = ""
        self._losses = 0
        self._ahead: list[Newborn] = []
        self._forking_ahead: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = False
        self._on_settled: Callable[[], None] = lambda: None

    def begin(self, on_settled: Callable[[], None]) -> bool:
        """Start the server, if it can serve these workers: True, and a call once it has imported all or has failed."""
        self._on_settled = on_settled
        if self._why_never:
            self._log.info("workers start cold", why=self._why_never)
            return False
        self._start_server()
        return True

    async def bear(self, count: int, called_off: asyncio.Event) -> list[Newborn] | None:
        """Give so many processes that wait for their orders, or None when the workers are to be started cold."""
        if self._why_never or self._is_over:
            return None
        try:
            born = await self._bear(count, called_off)
        except (ServerLost, Refused) as error:
            self._drop_ahead()
            if not called_off.is_set():
                self._log.info("workers start cold", why=error)
            return None
        self._losses = 0
        self._fork_ahead_later(FORK_AHEAD_S)
        return born

    async def end(self) -> None:
        """End the server and what it has forked ahead, and wait until they are gone."""
        self._is_over = True
        if self._forking_ahead is not None:
            self._forking_ahead.cancel()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        waiting = [asyncio.ensure_future(one.child.ended.wait()) for one in self._ahead]
        self._drop_ahead()
        if self._server is not None:
            await self._server.end()
        self._reaper.kill_strays(bootstrap.__file__)
        if waiting:
            await asyncio.wait(waiting, timeout=1.0)
            for wait in waiting:
                wait.cancel()

    async def _bear(self, count: int, called_off: asyncio.Event) -> list[Newborn]:
        """Raises ServerLost or Refused."""
        server = await self._ready(called_off)
        try:
            return await self._take(server, count)
        except Refused as error:
            if not error.is_stale:
                raise
            self._log.info("warm server is started anew", why=error)
        self._drop_ahead()
        self._start_server(after=server)
        return await self._take(await self._ready(called_off), count)

    async def _take(self, server: WarmServer, count: int) -> list[Newborn]:
        """Take what was forked ahead, and have the rest forked. Raises ServerLost or Refused."""
        for one in [one for one in self._ahead if not one.is_fit()]:
            self._ahead.remove(one)
            one.let_go()
        if len(self._ahead) >= count:
            await server.check()
        else:
            born = await server.bear(count - len(self._ahead))
            self._ahead += born  # not in one line: the list may be another one after the wait
        taken, self._ahead = self._ahead[:count], self._ahead[count:]
        return taken

    async def _ready(self, called_off: asyncio.Event) -> WarmServer:
        """Wait for the server while it imports. Raises ServerLost."""
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        off = asyncio.ensure_future(called_off.wait())
        try:
            while not called_off.is_set():
                server, starting = self._server, self._starting
                if server is not None and server.is_ready:
                    return server
                if starting is not None:
                    await asyncio.wait([starting, off], return_when=asyncio.FIRST_COMPLETED)
                    continue
                if server is None:
                    raise ServerLost(self._why_none)
                if server.is_stopped():
                    raise server.give_up("it is stopped by a signal")
                left = patience(loop.time(), asked_at, server.heard_at)
                if left <= 0:
                    raise ServerLost(f"the warm server is still importing {server.module}")
                change = asyncio.ensure_future(server.changed.wait())
                await asyncio.wait([change, off], timeout=min(left, _LOOK_S), return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
        finally:
            off.cancel()
        raise ServerLost("the start was called off")

    def _start_server(self, pause_s: float = 0.0, after: WarmServer | None = None) -> None:
        """Start a server in the background. A start of workers waits for it, except during the pause.

        after: the former one, which is ended first.
        """
        self._server = None
        task = asyncio.ensure_future(self._started(pause_s, after))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if not pause_s:
            self._starting = task

    async def _started(self, pause_s: float, after: WarmServer | None) -> None:
        assert self._program is not None
        interpreter = self._program.command[0]
        try:
            if after is not None:
                await after.end()
            await asyncio.sleep(pause_s)
            self._reaper.kill_strays(bootstrap.__file__)
            self._starting = asyncio.current_task()
            server = await WarmServer.start(
                interpreter, self._environ, self._program, self._preload, self._reaper, self._pump
            )
        except OSError as error:
            self._lost(f"{interpreter} cannot be run: {error.strerror}", is_hopeless=False)
            return
        finally:
            self._starting = None
        if self._cpus is not None:
            bind(server.child.pid, self._cpus)
        self._server = server
        self._tasks.add(watch := asyncio.ensure_future(self._watch(server)))
        watch.add_done_callback(self._tasks.discard)

    async def _watch(self, server: WarmServer) -> None:
        """Say when it is ready, and see to what follows when it is lost."""
        await server.changed.wait()
        if server.is_ready:
            for note in server.notes:
                self._log.warning(note)
            self._log.info("warm server is ready", seconds=server.seconds)
            self._on_settled()
            if not self._ahead:
                self._fork_ahead_later(0.0)
        await server.lost.wait()
        if self._server is server and not self._is_over:
            self._lost(server.why_lost or "it ended", is_hopeless=server.is_hopeless)

    def _lost(self, why: str, *, is_hopeless: bool) -> None:
        self._server = None
        self._on_settled()
        self._drop_ahead()
        self._losses += 1
        pause_s = None if is_hopeless else pause_before_retry(self._losses)
        self._why_none = f"there is no warm server: {why}"
        if pause_s is None:
            self._why_never = self._why_none
            self._log.warning("no more warm workers: all further workers start cold", why=why)
        else:
            self._log.warning("warm server is lost", why=why, next_in_s=pause_s)
            self._start_server(pause_s)

    def _fork_ahead_later(self, pause_s: float) -> None:
        if self._forking_ahead is not None:
            self._forking_ahead.cancel()
        self._forking_ahead = asyncio.get_running_loop().call_later(pause_s, self._fork_ahead_now)

    def _fork_ahead_now(self) -> None:
        self._tasks.add(task := asyncio.ensure_future(self._fork_ahead()))
        task.add_done_callback(self._tasks.discard)

    async def _fork_ahead(self) -> None:
        server, wanted = self._server, min(self._nproc, _MAX_AHEAD)
        if server is None or not server.is_ready or len(self._ahead) >= wanted:
            return
        with suppress(ServerLost, Refused):  # the next start finds out, and says so
            born = await server.bear(wanted - len(self._ahead))
            missing = max(0, wanted - len(self._ahead)) if server is self._server else 0  # it may be another by now
            self._ahead += born[:missing]
            for one in born[missing:]:
                one.let_go()

    def _drop_ahead(self) -> None:
        for one in self._ahead:
            one.let_go()
        self._ahead = []
