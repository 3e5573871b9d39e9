"""Output of training scripts in messages of the operator, marked so that Events can leave it out.

Output and exceptions of a script may contain confidential values: a password in a URL, a line of data. The job's conditions
quote them, because they tell those who may read the job why it failed. Events have a much larger audience.
"""

from __future__ import annotations

import re

OPEN, CLOSE = "\N{LEFT DOUBLE QUOTATION MARK}", "\N{RIGHT DOUBLE QUOTATION MARK}"
# A truncated text may lack the end of a quotation.
_QUOTATION = re.compile(f"{OPEN}([^{CLOSE}]*)(?:{CLOSE}|$)")
# The class of an exception at the start of the last line of a traceback.
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w{0,63}\.){0,8}[A-Za-z_]\w{0,63}(?:Error|Exception|Interrupt|Exit|Warning|Timeout)\b(?=:|$)"
)


def quote_output(words: str) -> str:
    """Quote output or an exception of a script; empty for nothing."""
    words = words.replace(OPEN, '"').replace(CLOSE, '"').strip()
    return f"{OPEN}{words}{CLOSE}" if words else ""


def redact_quotes(text: str) -> str:
    """Redact a text for an Event: each quotation is replaced by the class of its exception, if it names one."""
    return _QUOTATION.sub(lambda found: _class_of(found[1]), text)


def _class_of(words: str) -> str:
    named = _EXCEPTION.match(words.strip())
    where = "see the job's conditions and the pod's log"
    return f"{named[0]} ({where})" if named else f"({where})"
