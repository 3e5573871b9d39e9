"""Processes that a benchmark starts: each is ended whatever happens, and no wait is without a deadline."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

from bench.common.machine import descendants

T = TypeVar("T")
_ENDS_WITHIN_S = 20.0
_PR_SET_CHILD_SUBREAPER = 36


class Failed(Exception):
    """A measurement failed; the text says what it waited for, how long, and what it saw."""


def until(
    condition: Callable[[], T | None], what: str, within_s: float, every_s: float = 0.01, seen: Callable[[], str] = str
) -> T:
    """Wait for a condition and give its first true value. Raises Failed after the deadline, with what `seen` says."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise Failed(f"waited {within_s:g} s in vain for {what}; {seen()}".removesuffix("; "))
        time.sleep(every_s)
    return value


def free_port() -> int:
    """Give a port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Process:
    """One process in a session of its own, with everything that it prints in a file."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        self.started = time.monotonic()
        with open(log, "ab") as output:
            self._popen = subprocess.Popen(
                command,
                env=dict(env),
                cwd=log.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def require_alive(self) -> None:
        """Raises Failed, with the last lines that it printed, when the process has ended."""
        if not self.is_alive:
            raise Failed(f"{self.name} ended with {self._popen.returncode}; it printed last:\n{self.printed_last()}")

    def printed_last(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-lines:])

    def kill_tree(self) -> None:
        """SIGKILL the process and all its descendants at once, as the loss of a node would."""
        for pid in descendants(self.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._popen.wait(_ENDS_WITHIN_S)


class Processes:
    """A context in which processes are started; at its end none of them, nor a descendant of one, is alive.

    This process adopts those whose parent dies, so that everything that was started stays among its descendants. SIGTERM and SIGHUP
    end the context too, as Ctrl-C does. It is entered by the main thread.
    """

    def __init__(self) -> None:
        self._all: list[Process] = []
        self._before: dict[int, Any] = {}  # what signals did

    def __enter__(self) -> Processes:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._before = {number: signal.signal(number, _exit) for number in (signal.SIGTERM, signal.SIGHUP)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> Process:
        """Start a process; its log is written in its working directory."""
        process = Process(name, command, env, log)
        self._all.append(process)
        return process

    def end(self) -> None:
        """SIGKILL everything and wait until it is gone. Raises Failed when something is not."""
        for process in self._all:
            if process.is_alive:
                process.kill_tree()
        self._all.clear()
        until(_no_descendant, "the end of all processes", _ENDS_WITHIN_S, seen=lambda: str(descendants(os.getpid())))


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _no_descendant() -> bool:
    """End the adopted ones too; True once there is none."""
    for pid in descendants(os.getpid())[1:]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return len(descendants(os.getpid())) == 1
