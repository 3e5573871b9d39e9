"""What ends this process."""

from __future__ import annotations

import sys

_asked_for: int | None = None


def uncaught_exception() -> BaseException | None:
    """Give the exception that ends this process, at its exit; None if there was none, and in an interactive session."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


def note_exit_status(code: object) -> None:
    """Record the code of a SystemExit that ends the script. Exit handlers cannot find it out; what catches the exception tells it."""
    global _asked_for  # a process ends once
    _asked_for = code & 0xFF if isinstance(code, int) else int(code is not None)


def exit_status() -> int:
    """Give the status with which this process is to end, as far as it is known: 0 where nobody has seen another one."""
    if uncaught_exception() is not None:
        return 1
    return _asked_for or 0
