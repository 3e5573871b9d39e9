"""What announcements of nodes do: drain the pods, only stop placing new ones there, or nothing. An administrator may say otherwise."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from enum import StrEnum


class SignalEffect(StrEnum):
    """What is done about a node."""

    DRAIN = "drain"
    STOP_PLACING = "stop-placing"
    IGNORE = "ignore"


_ENTRY = re.compile(
    r"(drain|stop-placing|ignore) ((?:taint|annotation) [^\s=:,]+|(?:label|condition) [^\s=:,]+=[^\s=:,]*)"
)
CONFIGURED: dict[str, SignalEffect] = {}
"""Effects by signal, as the operator's command line says; set once, when the process starts."""


def parse_signals(listed: str) -> dict[str, SignalEffect]:
    """Read entries such as "drain taint KEY", separated by commas. Raises ArgumentTypeError with one sentence."""
    found = {}
    for entry in filter(None, map(str.strip, listed.split(","))):
        if (read := _ENTRY.fullmatch(entry)) is None:
            raise ArgumentTypeError(
                f"{entry!r} says nothing about a node; write drain, stop-placing or ignore, and then `taint KEY`, `annotation KEY`, "
                "`label KEY=VALUE` or `condition TYPE=STATUS`, such as `drain condition GpuUnhealthy=True`"
            )
        found[read[2]] = SignalEffect(read[1])
    return found
