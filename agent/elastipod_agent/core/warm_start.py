"""When workers may be forked from the fork server, what they then run, and when a lost server is replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# An interpreter that is started with one of these does something at its start, or all the time, that a fork would skip
# or share: profiles of imports, traces of memory, coverage from the first line on. Such a run wants fresh interpreters.
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
FIRST_PAUSE_S = 1.0
QUIET_LIMIT_S = 30.0
LOAD_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Program:
    """What a worker runs. kind: FILE, MODULE (python -m) or CODE (python -c); command: all of it, as ps shows it."""

    kind: str
    target: str
    args: tuple[str, ...]
    command: tuple[str, ...]


def read_program(command: Sequence[str]) -> Program | None:
    """Take a worker's command apart as the interpreter would; None for a shape that is left to an exec.

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
    """Say why this pod's workers must each have an interpreter of their own from the start; None when they need not."""
    named = [name for name in COLD_START_VARIABLES if environ.get(name)]
    return f"{named[0]} is set" if named else None


def replacement_delay_s(losses: int) -> float | None:
    """Give the seconds to wait before a lost server is replaced; None: it was lost too often in a row.

    losses: servers lost since one last forked workers, at least 1.
    """
    return None if losses >= MAX_LOSSES else FIRST_PAUSE_S * 4 ** (losses - 1)


def remaining_wait_s(now: float, asked_at: float, last_message_at: float) -> float:
    """Give the seconds that a start may still wait for a server that is importing; <= 0: no longer.

    Importing anew in every worker would take each as long as it takes the server, with all of them at it at once, so
    waiting costs nothing while the server gets on. last_message_at: when it last named a module that it begins to import.
    """
    return min(max(last_message_at, asked_at) + QUIET_LIMIT_S, asked_at + LOAD_LIMIT_S) - now
