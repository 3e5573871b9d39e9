"""Opens the two ways out of one worker: to the console, into files, or both, as torchrun's options say."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from elastipod_agent.settings import Logs
from elastipod_agent.workers.output import OutputPump, Stream

STDOUT, STDERR = 1, 2
_FILES = {STDOUT: "stdout.log", STDERR: "stderr.log"}
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC


@dataclass(slots=True)
class Outputs:
    """What a worker writes into (descriptors for it to inherit) and the streams that carry it on."""

    sinks: dict[int, int] = field(default_factory=dict)
    streams: dict[int, Stream] = field(default_factory=dict)
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
    def stderr(self) -> Stream | None:
        """The stream of standard error, None where it goes straight into `stderr_file`."""
        return self.streams.get(STDERR)

    def hand_over(self, pump: OutputPump) -> list[Stream]:
        """Let the pump carry the streams from now on."""
        self._is_handed_over = True
        for stream in self.streams.values():
            pump.add(stream)
        return list(self.streams.values())

    def close(self) -> None:
        """Close the worker's ends, which it has by now, and what nobody took over."""
        for sink in self.sinks.values():
            os.close(sink)
        if not self._is_handed_over:
            for stream in self.streams.values():
                os.close(stream.source)
                stream.finish()


@contextmanager
def open_outputs(
    logs: Logs, prefix: str, local_rank: int, directory: Path, *, tap: Callable[[bytes], None] | None = None
) -> Iterator[Outputs]:
    """Open both ways for one worker, in whose ``directory`` its files are made. Raises OSError.

    tap: is given all that the worker prints, wherever else it goes.
    """
    outputs = Outputs()
    try:
        for stream in (STDOUT, STDERR):
            _open(outputs, stream, logs, prefix, local_rank, directory / _FILES[stream], tap)
        yield outputs
    finally:
        outputs.close()


def _open(
    outputs: Outputs,
    stream: int,
    logs: Logs,
    prefix: str,
    local_rank: int,
    path: Path,
    tap: Callable[[bytes], None] | None,
) -> None:
    is_redirect = bool(logs.redirects.of(local_rank) & stream)
    is_tee = bool(logs.tee.of(local_rank) & stream)
    if is_redirect and not is_tee and tap is None:
        outputs.sinks[stream] = os.open(path, _NEW_FILE, 0o644)
        if stream == STDERR:
            outputs.stderr_file = path
        return
    has_file = is_tee or is_redirect
    file = open(path, "wb", buffering=0) if has_file else None  # noqa: SIM115 the stream closes it
    is_shown = is_tee or not is_redirect
    is_shown &= logs.only_local_ranks is None or local_rank in logs.only_local_ranks
    source, outputs.sinks[stream] = os.pipe2(os.O_CLOEXEC)
    console = stream if is_shown else None
    outputs.streams[stream] = Stream(source, prefix.encode(), console, file, has_tail=stream == STDERR, tap=tap)
