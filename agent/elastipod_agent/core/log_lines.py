"""Picks, out of many lines, those that may match a rule. Every byte that workers print comes by here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MAX_LINE_BYTES = 4096  # of a line no more is matched
_LEARN_EVERY = 1024
_SAMPLE_BYTES = 16 * 1024
_MANY = 32
_DENSE_BYTES = 256  # where so many lines with a text stand so close, picking them out costs more than matching all

Find = Callable[[bytes, int], int]  # what `bytes.find` is to the bytes that are searched


class Needle:
    """One text to be found. The byte of it that lines hold least is looked for first: that is far quicker."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self._guard = text[:1]
        self._offset = 0
        self._age = 0

    def places(self, lines: bytes, find: Find) -> list[tuple[int, int]] | None:
        """Give where each line that contains the text begins and ends; None when that is not worth while: most do.

        Of a line no more than MAX_LINE_BYTES are searched.
        """
        if self._age % _LEARN_EVERY == 0:
            self._learn(lines[:_SAMPLE_BYTES])
        self._age += 1
        text, guard, offset, find_byte, find_back = self.text, self._guard, self._offset, lines.find, lines.rfind
        places: list[tuple[int, int]] = []
        end = 0
        while (at := find_byte(guard, end + offset)) >= 0 and (at := find(text, at - offset)) >= 0:
            begin = find_back(b"\n", 0, at) + 1
            end = find_byte(b"\n", at)
            if end < 0:
                end = len(lines)
            if at - begin < MAX_LINE_BYTES:
                places.append((begin, end))
                if len(places) == _MANY and end < _MANY * _DENSE_BYTES:
                    return None
        return places

    def _learn(self, sample: bytes) -> None:
        counts = {byte: sample.count(byte) for byte in set(self.text)}
        self._offset = min(range(len(self.text)), key=lambda at: counts[self.text[at]])
        self._guard = self.text[self._offset : self._offset + 1]


def candidates(lines: bytes, needles: Sequence[Needle] | None, find: Find) -> bytes:
    """Give those of the whole lines that contain one of the texts, cut to MAX_LINE_BYTES.

    Gives all of them, as they are, when ``needles`` is None or when a text stands in very many.
    """
    if needles is None:
        return lines if lines.endswith(b"\n") else lines + b"\n"
    found: list[tuple[int, int]] = []
    for needle in needles:
        places = needle.places(lines, find)
        if places is None:
            return candidates(lines, None, find)
        found += places
    if len(needles) > 1:
        found = sorted(set(found))
    return b"".join([lines[begin : min(end, begin + MAX_LINE_BYTES)] + b"\n" for begin, end in found])
