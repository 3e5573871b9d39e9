"""Carries what the workers and the agent print to the console, each line behind its prefix.

One thread does all of it, so that a console that is slow to read never holds up supervision. Workers' lines are passed
on as they come, a chunk at a time; nothing is kept but the last part of each standard error, for the failure report.
"""

from __future__ import annotations

import os
import select
import selectors
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO

TAIL_BYTES = 32 * 1024
_CHUNK = 64 * 1024
_LONGEST_PARTIAL = 8 * 1024  # a progress bar without line ends is shown at least this often
_MAX_SAYINGS = 10_000


@dataclass(slots=True, eq=False)
class Stream:
    """One output stream of one process on its way.

    console: descriptor it goes to, None = not shown there. has_tail: its last part is kept in `tail`. tap: is given every
    chunk as it was read, in the pump's thread; must not block.
    """

    source: int
    prefix: bytes
    console: int | None
    file: BinaryIO | None = None
    has_tail: bool = True
    tail: bytes = b""
    tap: Callable[[bytes], None] | None = None
    _partial: bytes = field(default=b"")

    def take(self, data: bytes) -> bytes:
        """Take a chunk in; give what is to be written to the console now: whole lines, each with the prefix."""
        if self.has_tail:
            self.tail = (self.tail + data)[-TAIL_BYTES:]
        if self.tap is not None:
            self.tap(data)
        if self.file is not None:
            self.file.write(data)
        if self.console is None:
            return b""
        if self._partial:
            data = self._partial + data
        cut = data.rfind(b"\n") + 1
        if not cut and len(data) > _LONGEST_PARTIAL:
            cut = data.rfind(b"\r") + 1 or len(data)
        self._partial = data[cut:]
        return self._prefixed(data[:cut])

    def finish(self) -> bytes:
        """End the stream; give an unfinished last line, if there is one."""
        if self.file is not None:
            self.file.close()
            self.file = None
        rest, self._partial = self._partial, b""
        return self._prefixed(rest)

    def _prefixed(self, lines: bytes) -> bytes:
        if not lines:
            return b""
        body = lines[:-1] if lines.endswith((b"\n", b"\r")) else lines
        return self.prefix + body.replace(b"\n", b"\n" + self.prefix) + b"\n"


class OutputPump:
    """The thread. `add` streams, `say` lines of the agent's own, `catch_up` before reading tails; `close` comes last."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        self._lock = threading.Lock()
        self._arriving: list[Stream] = []
        self._sayings: deque[bytes] = deque(maxlen=_MAX_SAYINGS)
        self._asked: list[tuple[list[Stream], Future[None]]] = []
        self._is_closing = False
        self._dead_consoles: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, stream: Stream) -> None:
        """Carry this stream until its end; the pump owns and closes its descriptor."""
        os.set_blocking(stream.source, False)
        with self._lock:
            self._arriving.append(stream)
        self._wake()

    def say(self, line: str) -> None:
        """Print one line of the agent's own to standard error, in order with what workers print; never blocks."""
        with self._lock:
            self._sayings.append(line.encode("utf-8", "replace") + b"\n")
        self._wake()

    def catch_up(self, streams: list[Stream]) -> Future[None]:
        """Give a future that is done once everything written into these streams so far has been read."""
        done: Future[None] = Future()
        with self._lock:
            self._asked.append((streams, done))
        self._wake()
        return done

    def close(self, timeout_s: float = 5.0) -> None:
        """Carry what is there, then end the thread; a console that takes nothing is given up after the time-out."""
        with self._lock:
            self._is_closing = True
        self._wake()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._selector.close()
            os.close(self._bell)

    def _wake(self) -> None:
        os.eventfd_write(self._bell, 1)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._take_orders()
                elif self._is_carried(key.data):  # its end may have come with the orders just taken
                    self._read(key.data)
            with self._lock:
                if self._is_closing and not (self._sayings or self._arriving or self._asked):
                    break
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._read_all(key.data)
                if self._is_carried(key.data):
                    self._end(key.data)

    def _take_orders(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        with self._lock:
            arriving, self._arriving = self._arriving, []
            asked, self._asked = self._asked, []
            sayings = b"".join(self._sayings)
            self._sayings.clear()
        for stream in arriving:
            self._selector.register(stream.source, selectors.EVENT_READ, stream)
        self._write(2, sayings)
        for streams, done in asked:
            for stream in streams:
                self._read_all(stream)
            done.set_result(None)

    def _read_all(self, stream: Stream) -> None:
        while self._is_carried(stream) and self._read(stream):
            pass

    def _is_carried(self, stream: Stream) -> bool:
        key = self._selector.get_map().get(stream.source)
        return key is not None and key.data is stream

    def _read(self, stream: Stream) -> bool:
        """Read one chunk; False when nothing is there now or the stream has ended."""
        try:
            data = os.read(stream.source, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._end(stream)
            return False
        self._write(stream.console, stream.take(data))
        return True

    def _end(self, stream: Stream) -> None:
        self._selector.unregister(stream.source)
        os.close(stream.source)
        self._write(stream.console, stream.finish())

    def _write(self, console: int | None, data: bytes) -> None:
        if console is None or console in self._dead_consoles:
            return
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(console, view) :]
            except BlockingIOError:
                select.select([], [console], [], 1.0)
            except OSError:  # nobody reads it any more; training goes on without a console
                self._dead_consoles.add(console)
                return
