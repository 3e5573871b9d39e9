"""Picks, out of many lines, those that may match a rule. Every byte that workers print comes by here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MAX_LINE_BYTES = 4096  # of a line no more is matched
_MANY = 32
_DENSE_BYTES = 256  # where so many lines with a text stand so close, picking them out costs more than matching all

Find = Callable[[bytes, int], int]  # what `bytes.find` is to the bytes that are searched


def matching_spans(lines: bytes, text: bytes, find: Find) -> list[tuple[int, int]] | None:
    """Give where each line that contains the text begins and ends; None when that is not worth while: most do.

    Of a line no more than MAX_LINE_BYTES are searched.
    """
    found: list[tuple[int, int]] = []
    end = 0
    while (at := find(text, end)) >= 0:
        begin = lines.rfind(b"\n", 0, at) + 1
        end = lines.find(b"\n", at)
        if end < 0:
            end = len(lines)
        if at - begin < MAX_LINE_BYTES:
            found.append((begin, end))
            if len(found) == _MANY and end < _MANY * _DENSE_BYTES:
                return None
    return found


def candidates(lines: bytes, texts: Sequence[bytes] | None, find: Find) -> bytes:
    """Give those of the whole lines that contain one of the texts, cut to MAX_LINE_BYTES.

    Gives all of them, as they are, when ``texts`` is None or when a text stands in very many.
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
