"""One worker process: where its output and its error report are."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from elastipod_agent.workers.output_pump import OutputStream
from elastipod_agent.workers.reaper import ChildProcess


@dataclass(slots=True)
class WorkerProcess:
    """One worker process and where its output goes.

    has_tap: its output can be read for log rules. reports_before: how many reports its slot of the worker file had before it.
    """

    local_rank: int
    child: ChildProcess
    error_file: Path
    streams: list[OutputStream]
    stderr: OutputStream | None
    stderr_file: Path | None  # if standard error goes directly to a file
    is_killed: bool = False
    has_tap: bool = False
    reports_before: int = 0

    def stderr_tail(self) -> str:
        """Give the end of the worker's standard error."""
        if self.stderr is not None:
            return self.stderr.tail.decode("utf-8", "replace")
        if self.stderr_file is not None:
            return _end_of(self.stderr_file)
        return ""


def _end_of(path: Path, size: int = 32 * 1024) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
