"""What the operator logs as an error is a mistake of its own: it goes on with its other jobs, and the schedule has found something."""

from __future__ import annotations

import logging

from tests.sim.invariant_state import Violation


class _Mistakes(logging.Handler):
    """Keeps errors until somebody asks."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record)


_MISTAKES = _Mistakes()


def collect_operator_errors() -> None:
    """Have errors of the operator kept from here on; of its many warnings nothing is logged, which would only take time."""
    log = logging.getLogger("elastipod_operator")
    log.setLevel(logging.ERROR)
    log.propagate = False
    log.addHandler(_MISTAKES)


def forget_operator_errors() -> None:
    """Begin anew, with another schedule."""
    _MISTAKES.found.clear()


def raise_operator_errors() -> None:
    """Raise the first mistake since the last time, if there is one."""
    if not _MISTAKES.found:
        return
    record = _MISTAKES.found[0]
    _MISTAKES.found.clear()
    cause = record.exc_info[1] if record.exc_info else None
    raise Violation(f"{record.getMessage()}: {type(cause).__name__}: {cause}") from cause
