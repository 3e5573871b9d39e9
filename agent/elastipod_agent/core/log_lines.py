"""Selects the lines that may match a rule. Every byte that workers print passes through here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MAX_LINE_BYTES = 4096  # only this much of a line is matched
_MANY = 32
_DENSE_BYTES = 256  # if that many matching lines are that close, selecting them costs more than matching all

Find = Callable[[bytes, int], int]  # like `bytes.find` of the searched bytes


def matching_spans(lines: bytes, text: bytes, find: Find) -> list[tuple[int, int]] | None:
    """Give the begin and end of each line that contains the text; None if most lines do, so that selecting is not worthwhile.

    A progress bar ends its lines with a carriage return. Only the first MAX_LINE_BYTES of a line are searched.
    """
    found: list[tuple[int, int]] = []
    end = 0
    while (at := find(text, end)) >= 0:
        least = max(0, at - MAX_LINE_BYTES)
        begin = max(lines.rfind(b"\n", least, at), lines.rfind(b"\r", least, at)) + 1
        is_near = begin > 0 or least == 0
        end = _end_of_line(lines, at, (begin if is_near else at) + MAX_LINE_BYTES)
        if is_near:
            found.append((begin, end))
            if len(found) == _MANY and end < _MANY * _DENSE_BYTES:
                return None
    return found


def _end_of_line(lines: bytes, at: int, limit: int) -> int:
    """Give where the line at a place ends, at most the limit."""
    ends = (lines.find(b"\n", at, limit), lines.find(b"\r", at, limit))
    return min((end for end in ends if end >= 0), default=min(limit, len(lines)))


def candidates(lines: bytes, texts: Sequence[bytes] | None, find: Find) -> bytes:
    """Give the lines that contain one of the texts, cut to MAX_LINE_BYTES.

    Gives all lines unchanged if ``texts`` is None or if very many lines contain a text.
    """
    if texts is None:
        return lines if lines.endswith(b"\n") else lines + b"\n"
    found: list[tuple[int, int]] = []
    for text in texts:
        of_text = matching_spans(lines, text, find)
        if of_text is None:
            return candidates(lines, None, find)
        found += of_text
    if len(texts) > 1:
        found = sorted(set(found))
    return b"".join([lines[begin : min(end, begin + MAX_LINE_BYTES)] + b"\n" for begin, end in found])
