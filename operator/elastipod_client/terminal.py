"""What reaches the user's terminal.

Messages of pods, scripts and API servers hold whatever their writers put there, such as sequences that move the cursor or set
the title of a window. So every command prints through `say`.
"""

from __future__ import annotations

import sys
from typing import TextIO

KEPT = "\n\t\N{NO-BREAK SPACE}"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    """Give text whose characters can all be seen: others, except newline and tab, are replaced."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in KEPT else REPLACEMENT for one in text)


def one_line(text: str) -> str:
    """Give text as one line, for cells of tables and lines of a live picture."""
    return printable(" ".join(text.split()) if any(one in text for one in "\n\t\r") else text)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print text for a person, followed by a newline, to standard output or another stream."""
    print(printable(text), file=stream if stream is not None else sys.stdout, flush=True)
