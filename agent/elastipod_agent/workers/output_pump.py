"""Copies the output of the workers and the agent to the console, each line with its prefix.

One thread does all of it, so a console that is read slowly never delays supervision. Lines are passed on as they arrive, a chunk at a
time; only the end of each standard error is kept, for the failure report. The cost depends on the number of chunks, not of bytes: pipes
are large, and after a chunk the thread pauses for a time that is short compared to the time in which the pipe fills.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import select
import selectors
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from elastipod.freed_memory import keep_freed_memory
from elastipod_agent.workers.log_file import FilteredCopy, LogFile

TAIL_BYTES = 32 * 1024
_PIPE_BYTES = 1 << 20  # the kernel's limit without privileges
_SMALLEST_PIPE = 64 * 1024  # the kernel's default
_ALL_PIPES_BYTES = 8 << 20  # of one agent's workers; a user without privileges may have 64 MiB on a node, in all pods
_CHUNK = 64 * 1024
_KEPT_BYTES = 4 << 20  # the buffers of a chunk, which otherwise come from the kernel each time
_LONGEST_PARTIAL = 8 * 1024  # a progress bar without line ends is shown at least this often
_LINE_ENDS = b"\n\r"
_MAX_AGENT_LINES = 10_000
_LONGEST_PAUSE_S = 0.05
_SHORTEST_PAUSE_S = 0.001
_CATCH_UP_S = 0.25
_F_SETPIPE_SZ = getattr(fcntl, "F_SETPIPE_SZ", 1031)
_F_GETPIPE_SZ = getattr(fcntl, "F_GETPIPE_SZ", 1032)


@dataclass(slots=True, eq=False)
class OutputStream:
    """One output stream of one process.

    console: descriptor that it is written to, None if it is not shown. keeps_tail: keep its end in `tail`. tap: called with every chunk
    as it was read, in the pump's thread; must not block. filtered: gets the lines that the console gets.
    """

    source: int
    prefix: bytes
    console: int | None
    file: LogFile | None = None
    keeps_tail: bool = True
    tail: bytes = b""
    tap: Callable[[bytes], None] | None = None
    filtered: FilteredCopy | None = None
    capacity: int = 64 * 1024  # of its pipe
    errors: list[str] = field(default_factory=list)  # sentences for the log
    has_failed: bool = False  # and goes on without copies
    _partial: bytes = b""

    def take(self, data: bytes) -> bytes:
        """Add a chunk; give the complete lines to write to the console, each with the prefix."""
        if self.keeps_tail:
            self.tail = data[-TAIL_BYTES:] if len(data) >= TAIL_BYTES else (self.tail + data)[-TAIL_BYTES:]
        if self.tap is not None:
            self.tap(data)
        if self.file is not None:
            self._note(self.file.write(data))
        if self.console is None:
            return b""
        cut = data.rfind(b"\n") + 1
        if not cut and len(self._partial) + len(data) > _LONGEST_PARTIAL:
            cut = data.rfind(b"\r") + 1 or len(data)
        if not cut:
            self._partial += data
            return b""
        begun, self._partial = self._partial, data[cut:]
        return self._prefixed(begun, data[: cut - 1] if data[cut - 1] in _LINE_ENDS else data[:cut])

    def finish(self) -> bytes:
        """End the stream; give an incomplete last line, if there is one."""
        if self.tap is not None:
            self.tap(b"\n")
        rest, self._partial = self._partial, b""
        shown = self._prefixed(b"", rest.removesuffix(b"\r")) if rest else b""
        self._close_files()
        return shown

    def drop_copies(self) -> None:
        """Go on without files, filter and tap."""
        self.tap = None
        self._close_files()

    def _close_files(self) -> None:
        for file in (self.file, self.filtered):
            if file is not None:
                self._note(file.close())
        self.file = self.filtered = None

    def _prefixed(self, begun: bytes, lines: bytes) -> bytes:
        """Give lines for the console. begun: the begin of the first line; the last line has no line end."""
        shown = b"".join((self.prefix, begun, lines.replace(b"\n", b"\n" + self.prefix), b"\n"))
        if self.filtered is not None:
            self._note(self.filtered.take(shown))
        return shown

    def _note(self, trouble: str) -> None:
        if trouble:
            self.errors.append(trouble)


class OutputPump:
    """The output thread. `add` streams, `print_line` for the agent's own lines, `catch_up` before reading tails; call `close` last.

    num_workers: of the agent; where there are many, each one's pipes are smaller.
    """

    def __init__(self, num_workers: int = 1) -> None:
        self.bytes_read = 0  # of all streams so far, for the metrics
        self._selector = selectors.DefaultSelector()
        self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wakeup_fd, selectors.EVENT_READ, None)
        self._lock = threading.Lock()
        self._arriving: list[OutputStream] = []
        self._agent_lines: deque[bytes] = deque(maxlen=_MAX_AGENT_LINES)
        self._catch_up_requests: list[tuple[list[OutputStream] | None, Future[None]]] = []
        self._is_closing = False
        self._pipe_bytes = pipe_bytes(num_workers)
        self._dead_consoles: set[int] = set()
        self._refusals: dict[int, str] = {}  # why a console did not take the last lines
        self._fullest = 0.0  # fill level of the fullest pipe of a round
        self._round_began_at = 0.0  # when the last round began
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        for console in (1, 2):
            _widen(console, _PIPE_BYTES)
        keep_freed_memory(_KEPT_BYTES, block_bytes=_KEPT_BYTES)
        self._thread.start()

    def add(self, stream: OutputStream) -> None:
        """Copy this stream until its end; the pump owns and closes its descriptor."""
        os.set_blocking(stream.source, False)
        stream.capacity = _widen(stream.source, self._pipe_bytes)
        with self._lock:
            self._arriving.append(stream)
        self._wake()

    def print_line(self, line: str) -> None:
        """Print one line of the agent to standard error, in order with worker output; never blocks."""
        with self._lock:
            self._agent_lines.append(line.encode("utf-8", "replace") + b"\n")
        self._wake()

    def catch_up(self, streams: list[OutputStream] | None = None) -> Future[None]:
        """Give a future that is done once all data written to these streams so far (None: to all) was read and shown.

        All of it is read before any of it is shown: the tails are whole even if the console is stuck.
        """
        done: Future[None] = Future()
        with self._lock:
            self._catch_up_requests.append((streams, done))
        self._wake()
        return done

    async def caught_up(self, streams: list[OutputStream] | None = None, limit_s: float = _CATCH_UP_S) -> None:
        """Wait for `catch_up`; at most this long if the console is stuck."""
        await asyncio.wait([asyncio.wrap_future(self.catch_up(streams))], timeout=limit_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Copy what is left, then end the thread; a console that is stuck is given up after the time-out."""
        with self._lock:
            self._is_closing = True
        self._wake()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._selector.close()
            os.close(self._wakeup_fd)

    def _wake(self) -> None:
        os.eventfd_write(self._wakeup_fd, 1)

    def _run(self) -> None:
        while True:
            self._pause()
            for key, _ in self._selector.select():
                if key.data is None:
                    self._handle_requests()
                else:
                    self._read_all(key.data)
            with self._lock:
                if self._is_closing and not (self._agent_lines or self._arriving or self._catch_up_requests):
                    break
        self._read_all_of(self._carried())
        for stream in self._carried():
            with suppress(Exception):  # nothing is left to be done for it
                self._show(stream, self._end(stream))

    def _pause(self) -> None:
        """Let the pipes fill by half, at their last speed. A request ends the pause. No pause after silence."""
        now = time.monotonic()
        passed_s, self._round_began_at = now - self._round_began_at, now
        if not self._fullest:
            return
        pause_s = min(_LONGEST_PAUSE_S, 0.5 * passed_s / self._fullest)
        self._fullest = 0.0
        if pause_s >= _SHORTEST_PAUSE_S:
            select.select([self._wakeup_fd], [], [], pause_s)

    def _handle_requests(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wakeup_fd)
        with self._lock:
            arriving, self._arriving = self._arriving, []
            requests, self._catch_up_requests = self._catch_up_requests, []
            agent_lines = b"".join(self._agent_lines)
            self._agent_lines.clear()
        for stream in arriving:
            self._selector.register(stream.source, selectors.EVENT_READ, stream)
        if agent_lines:
            self._read_all_of(self._carried())
            self._write(2, agent_lines)
        wanted = [self._carried() if streams is None else streams for streams, _ in requests]
        self._read_all_of([stream for streams in wanted for stream in streams])
        for _, done in requests:
            if done.set_running_or_notify_cancel():
                done.set_result(None)

    def _read_all_of(self, streams: list[OutputStream]) -> None:
        """Read what is there now of all these streams, then show it."""
        read = [(stream, lines) for stream in streams for lines in self._chunks(stream)]
        for stream, lines in read:
            self._show(stream, lines)

    def _read_all(self, stream: OutputStream) -> None:
        """Read what is there now, and show each chunk at once."""
        for lines in self._chunks(stream):
            self._show(stream, lines)

    def _chunks(self, stream: OutputStream) -> Iterator[bytes]:
        """Read what is there now, or detect the end; gives the lines to show. A process that keeps writing must not hold up the thread.

        An error costs the copies of this stream, and the stream itself if it comes again: the thread must go on for the others.
        """
        try:
            yield from self._read_available(stream)
        except Exception as error:  # of a file, a filter or a tap: without this thread all workers would block in print
            stream.drop_copies()
            is_lost = stream.has_failed and self._is_carried(stream)
            stream.has_failed = True
            what = "read" if is_lost else "copied or monitored"
            stream.errors.append(f"an output stream of a process is not {what} any more: {error!r}")
            yield self._end(stream) if is_lost else b""

    def _read_available(self, stream: OutputStream) -> Iterator[bytes]:
        if not self._is_carried(stream):
            return
        size = left = max(1, _readable(stream.source))
        while left > 0 and self._is_carried(stream):
            num_read, lines = self._read(stream)
            yield lines
            left -= num_read or left
        self._fullest = max(self._fullest, size / stream.capacity)

    def _carried(self) -> list[OutputStream]:
        return [key.data for key in list(self._selector.get_map().values()) if key.data is not None]

    def _is_carried(self, stream: OutputStream) -> bool:
        key = self._selector.get_map().get(stream.source)
        return key is not None and key.data is stream

    def _read(self, stream: OutputStream) -> tuple[int, bytes]:
        """Read one chunk; gives its size (0 if there is no data or the stream has ended) and the lines to show."""
        try:
            data = os.read(stream.source, _CHUNK)
        except BlockingIOError:
            return 0, b""
        if not data:
            return 0, self._end(stream)
        self.bytes_read += len(data)
        return len(data), stream.take(data)

    def _end(self, stream: OutputStream) -> bytes:
        self._selector.unregister(stream.source)
        os.close(stream.source)
        return stream.finish()

    def _show(self, stream: OutputStream, lines: bytes) -> None:
        self._write(stream.console, lines)
        while stream.errors:
            self._write(2, f"hyperpodrun: {stream.errors.pop()}\n".encode())

    def _write(self, console: int | None, data: bytes) -> None:
        if console is None or console in self._dead_consoles:
            return
        if why := self._refusals.pop(console, ""):
            data = f"\nhyperpodrun: lines are missing here: {why}\n".encode() + data
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(console, view) :]
            except BlockingIOError:
                select.select([], [console], [], 1.0)
            except OSError as error:  # training continues without a console
                if error.errno in (errno.EPIPE, errno.EBADF):  # nobody reads it any more
                    self._dead_consoles.add(console)
                else:  # it may be a file whose disk is full for a moment
                    self._refusals[console] = os.strerror(error.errno or errno.EIO)
                return


def pipe_bytes(num_workers: int) -> int:
    """Give the size of each pipe of an agent's workers, two of each: a power of two, as the kernel wants it."""
    share = max(1, _ALL_PIPES_BYTES // (2 * num_workers))
    return min(_PIPE_BYTES, max(_SMALLEST_PIPE, 1 << (share.bit_length() - 1)))


def _widen(pipe: int, size: int) -> int:
    """Make a pipe as large as this; gives the size that it has then, or the default for anything but a pipe."""
    with suppress(OSError):  # not a pipe, or the user's limit for pipes is reached
        fcntl.fcntl(pipe, _F_SETPIPE_SZ, size)
    try:
        return fcntl.fcntl(pipe, _F_GETPIPE_SZ)
    except OSError:
        return 64 * 1024


def _readable(pipe: int) -> int:
    """Give how many bytes can be read now."""
    count: int = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))[0]
    return count
