"""Words of training scripts in sentences of the operator: marked as such, so that Events can leave them out.

What a script prints or raises may hold values that are nobody else's business: a password in a URL, a line of data. The
job's conditions quote it, because they say why a job failed to those who may read the job. Events are read by many more.
"""

from __future__ import annotations

import re

OPEN, CLOSE = "\N{LEFT DOUBLE QUOTATION MARK}", "\N{RIGHT DOUBLE QUOTATION MARK}"
# A text that was cut to a length may lack the end of a quotation.
_QUOTATION = re.compile(f"{OPEN}([^{CLOSE}]*)(?:{CLOSE}|$)")
# The class of an exception, as it begins the last line of a traceback.
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w{0,63}\.){0,8}[A-Za-z_]\w{0,63}(?:Error|Exception|Interrupt|Exit|Warning|Timeout)\b(?=:|$)"
)


def quote_output(words: str) -> str:
    """Quote what a script printed or raised; empty for nothing."""
    words = words.replace(OPEN, '"').replace(CLOSE, '"').strip()
    return f"{OPEN}{words}{CLOSE}" if words else ""


def redact_quotes(text: str) -> str:
    """Give a text for an Event: of each quotation only the class of the exception that it names, if it names one."""
    return _QUOTATION.sub(lambda found: _class_of(found[1]), text)


def _class_of(words: str) -> str:
    named = _EXCEPTION.match(words.strip())
    where = "see the job's conditions and the pod's log"
    return f"{named[0]} ({where})" if named else f"({where})"
