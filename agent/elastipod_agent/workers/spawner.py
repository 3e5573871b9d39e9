"""Starts processes in a thread of its own: an exec that hangs on slow storage must not block the agent."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastipod_agent.workers.linux import die_with_parent

_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD)


@dataclass(frozen=True, slots=True, eq=False)
class _SpawnRequest:
    command: Sequence[str]
    env: Mapping[str, str]
    stdout: int
    stderr: int
    keep: Sequence[int]
    started: asyncio.Future[subprocess.Popen[bytes]]


class Spawner:
    """The spawner thread. It lives as long as the agent, because the kernel kills a child when the thread that forked it ends."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[_SpawnRequest | None] = queue.SimpleQueue()
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._parent = os.getpid()
        self._thread = threading.Thread(target=self._run, name="spawner", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and with it every child that still runs."""
        self._requests.put(None)

    async def spawn(
        self, command: Sequence[str], env: Mapping[str, str], *, stdout: int, stderr: int, keep: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        """Start a command in a session of its own that dies with the agent. Raises OSError if it cannot be run.

        keep: further descriptors that it inherits, under the same numbers.
        """
        started: asyncio.Future[subprocess.Popen[bytes]] = asyncio.get_running_loop().create_future()
        self._requests.put(_SpawnRequest(command, env, stdout, stderr, keep, started))
        return await started

    def _run(self) -> None:
        # The main thread handles signals, and a child before its exec must not handle them for the agent.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while (request := self._requests.get()) is not None:
            try:
                process = self._start(request)
            except Exception as error:  # the end of this thread would end all of its children
                _deliver(request.started, error=error if isinstance(error, OSError) else OSError(str(error)))
            else:
                _deliver(request.started, process=process)

    def _start(self, request: _SpawnRequest) -> subprocess.Popen[bytes]:
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork in a process with threads; the child runs only `_before_exec`.
            warnings.simplefilter("ignore", DeprecationWarning)
            return subprocess.Popen(
                request.command,
                env=request.env,
                stdin=subprocess.DEVNULL,
                stdout=request.stdout,
                stderr=request.stderr,
                pass_fds=request.keep,
                start_new_session=True,
                preexec_fn=self._before_exec,
            )

    def _before_exec(self) -> None:
        """Between fork and exec: reset the agent's signal handlers, then unblock signals."""
        die_with_parent(self._parent)
        for number in _HANDLED:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


def _deliver(
    started: asyncio.Future[subprocess.Popen[bytes]],
    *,
    process: subprocess.Popen[bytes] | None = None,
    error: OSError | None = None,
) -> None:
    """Hand the result to the event loop. A process that nobody waits for any more is killed."""

    def settle() -> None:
        if started.cancelled():
            _kill_unclaimed(process)
        elif error is not None:
            started.set_exception(error)
        elif process is not None:
            started.set_result(process)

    try:
        started.get_loop().call_soon_threadsafe(settle)
    except RuntimeError:  # the loop is closed
        _kill_unclaimed(process)


def _kill_unclaimed(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        process.kill()
        disown(process)


def disown(process: subprocess.Popen[bytes]) -> None:
    """Tell a Popen that it is not to wait for its process, which somebody else reaps."""
    if process.returncode is None:
        process.returncode = -signal.SIGKILL
