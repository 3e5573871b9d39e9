"""When workers may be forked from the fork server, what they run, and when a lost server is replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# With one of these variables an interpreter does something at its start, or all the time, that a fork would skip or share: import
# profiles, memory traces, coverage from the first line. Such a run needs new interpreters.
COLD_START_VARIABLES = (
    "COVERAGE_PROCESS_START",
    "PYTHONDEVMODE",
    "PYTHONDUMPREFS",
    "PYTHONINSPECT",
    "PYTHONMALLOCSTATS",
    "PYTHONPERFSUPPORT",
    "PYTHONPROFILEIMPORTTIME",
    "PYTHONTRACEMALLOC",
    "PYTHONVERBOSE",
)
FILE, MODULE, CODE = "file", "module", "code"
MAX_LOSSES = 3
# Older losses are forgotten: a server that dies once a week is worth replacing. Three servers that die while they import, for up to
# ten minutes each, are well within it.
LOSS_WINDOW_S = 3600.0
FIRST_PAUSE_S = 1.0
QUIET_LIMIT_S = 30.0
LOAD_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Program:
    """What a worker runs. kind: FILE, MODULE (python -m) or CODE (python -c); command: the whole command line."""

    kind: str
    target: str
    args: tuple[str, ...]
    command: tuple[str, ...]


def read_program(command: Sequence[str]) -> Program | None:
    """Parse a worker's command as the interpreter would; None for a form that needs an exec.

    command: ``python -u script ...``, ``python -u -m module ...`` or ``python -u -c code ...``.
    """
    parts = tuple(command)
    if len(parts) < 3 or parts[1] != "-u":
        return None
    if parts[2] in ("-m", "-c"):
        kind = MODULE if parts[2] == "-m" else CODE
        return Program(kind, parts[3], parts[4:], parts) if len(parts) > 3 else None
    if parts[2].startswith("-") or parts[2].endswith((".pyc", ".pyo")):
        return None
    return Program(FILE, parts[2], parts[3:], parts)


def cold_start_reason(environ: Mapping[str, str]) -> str | None:
    """Say why the workers of this pod must start cold; None if they need not."""
    named = [name for name in COLD_START_VARIABLES if environ.get(name)]
    return f"{named[0]} is set" if named else None


def recent_losses(lost_at: Sequence[float], now: float) -> list[float]:
    """Give the times of those losses that still count, in order. lost_at, now: seconds of one monotonic clock."""
    return [at for at in lost_at if now - at < LOSS_WINDOW_S]


def replacement_delay_s(losses: int) -> float | None:
    """Give the seconds until a lost server is replaced; None if it was lost too often in a row.

    losses: recent ones since the last fork of workers, at least 1.
    """
    return None if losses >= MAX_LOSSES else FIRST_PAUSE_S * 4 ** (losses - 1)


def remaining_wait_s(now: float, asked_at: float, last_message_at: float) -> float:
    """Give the seconds that a start may still wait for a server that is importing; <= 0: no longer.

    Waiting costs nothing while the server makes progress: a cold start imports the same modules in every worker at once.
    last_message_at: when the server last named the module that it imports next.
    """
    return min(max(last_message_at, asked_at) + QUIET_LIMIT_S, asked_at + LOAD_LIMIT_S) - now
