"""Opens the output of one worker: to the console, to files, or both, as torchrun's options say."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from elastipod_agent.log_settings import LogSettings
from elastipod_agent.workers.log_file import FilteredCopy, LogFile
from elastipod_agent.workers.output_pump import OutputPump, OutputStream

STDOUT, STDERR = 1, 2
_FILES = {STDOUT: "stdout.log", STDERR: "stderr.log"}
_LONGEST_LINE = 8 * 1024
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC


@dataclass(slots=True)
class WorkerOutput:
    """The descriptors that a worker inherits for its output, and the streams that read from them."""

    sinks: dict[int, int] = field(default_factory=dict)
    streams: dict[int, OutputStream] = field(default_factory=dict)
    stderr_file: Path | None = None
    _is_handed_over: bool = False

    @property
    def stdout_sink(self) -> int:
        """Where standard output goes."""
        return self.sinks[STDOUT]

    @property
    def stderr_sink(self) -> int:
        """Where standard error goes."""
        return self.sinks[STDERR]

    @property
    def stderr(self) -> OutputStream | None:
        """The stream of standard error, None if it goes directly to `stderr_file`."""
        return self.streams.get(STDERR)

    def hand_over(self, pump: OutputPump) -> list[OutputStream]:
        """Hand the streams over to the pump."""
        self._is_handed_over = True
        for stream in self.streams.values():
            pump.add(stream)
        return list(self.streams.values())

    def close(self) -> None:
        """Close the worker's ends, which it has inherited, and streams that were not handed over."""
        for sink in self.sinks.values():
            with suppress(OSError):  # of a file: what the worker writes to it is written by the worker
                os.close(sink)
        if not self._is_handed_over:
            for stream in self.streams.values():
                os.close(stream.source)
                stream.finish()


class LineSplitter:
    """Splits a stream between lines, so that lines of two streams are not mixed.

    A carriage return ends a line too, so that a progress bar counts before it is complete. A very long line comes in pieces.
    """

    def __init__(self, give: Callable[[bytes], None]) -> None:
        self._give = give
        self._rest = b""

    def take(self, chunk: bytes) -> None:
        """Add a chunk; pass on the complete lines."""
        cut = chunk.rfind(b"\n") + 1
        cut = max(cut, chunk.rfind(b"\r", cut) + 1)
        if not cut and len(self._rest) + len(chunk) > _LONGEST_LINE:
            cut = len(chunk)
        if not cut:
            self._rest += chunk
            return
        begun, self._rest = self._rest, chunk[cut:]
        self._give(b"".join((begun, memoryview(chunk)[:cut])))


def open_worker_output(
    logs: LogSettings, prefix: str, local_rank: int, directory: Path, *, tap: Callable[[bytes], None] | None = None
) -> WorkerOutput:
    """Open the output of one worker, with its files in ``directory``. Raises OSError. The caller closes it.

    All workers of a generation share one filtered copy per stream, next to their directories. tap: called with all output of the worker,
    wherever else it goes: complete lines of one stream at a time, in the output thread.
    """
    outputs = WorkerOutput()
    try:
        for stream in (STDOUT, STDERR):
            _open(outputs, stream, logs, prefix, local_rank, directory / _FILES[stream], tap)
    except OSError:
        outputs.close()
        raise
    return outputs


def _open(
    outputs: WorkerOutput,
    stream: int,
    logs: LogSettings,
    prefix: str,
    local_rank: int,
    path: Path,
    tap: Callable[[bytes], None] | None,
) -> None:
    if logs.direct_streams(local_rank) & stream and tap is None:
        outputs.sinks[stream] = os.open(path, _NEW_FILE, 0o644)
        if stream == STDERR:
            outputs.stderr_file = path
        return
    is_redirect = bool(logs.redirects.of(local_rank) & stream)
    is_tee = bool(logs.tee.of(local_rank) & stream)
    is_shown = is_tee or not is_redirect
    is_shown &= logs.only_local_ranks is None or local_rank in logs.only_local_ranks
    file = LogFile(path) if is_tee or is_redirect else None
    filters = logs.stdout_filters if stream == STDOUT else logs.stderr_filters
    filtered = _open_filtered(filters, local_rank, path, is_shown=is_shown)
    source, outputs.sinks[stream] = os.pipe2(os.O_CLOEXEC)
    outputs.streams[stream] = OutputStream(
        source,
        prefix.encode(),
        stream if is_shown else None,
        file,
        keeps_tail=stream == STDERR,
        tap=None if tap is None else LineSplitter(tap).take,
        filtered=filtered,
    )


def _open_filtered(filters: tuple[str, ...], local_rank: int, path: Path, *, is_shown: bool) -> FilteredCopy | None:
    """Open the copy that all workers of the generation share; local rank 0, which comes first, empties it."""
    if not filters:
        return None
    common = path.parent.parent / f"filtered_{path.name}"
    if local_rank == 0:
        common.unlink(missing_ok=True)
    return FilteredCopy(LogFile(common, is_new=False), filters) if is_shown else None
