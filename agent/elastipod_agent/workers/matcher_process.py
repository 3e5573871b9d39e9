"""Matches lines against patterns in a process of its own, because Python's re holds the GIL while it searches.

Run as a script in an isolated interpreter without Elastipod on its path. Descriptor 1 is a socket to the agent. The agent sends one
frame of JSON with the rules, then requests, each answered by one frame of JSON. A frame begins with its length. A request holds, for some
of the rules, the rule's index, the length of its lines, and the lines; the answer is a list.

A search may not end. A CPU timer interrupts the search of one rule's lines, since the engine checks for signals, and the compiling
of its patterns. If that fails the agent kills the process.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import struct
from collections.abc import Callable
from typing import Any

SOCKET = 1
HEADER = struct.Struct(">I")
REQUEST = struct.Struct(">HI")
MAX_MEMORY = 1 << 30


class TooSlow(Exception):
    """The time limit of a request has passed."""


class CompiledRule:
    """One compiled rule. pattern, stop: regular expressions; is_match: match at the first character only.

    has_value: the first group is a number to compare. is_once: only the first match counts. sizes: how many characters of a line are
    matched, and how many are reported.
    """

    def __init__(
        self, pattern: str, stop: str | None, is_match: bool, has_value: bool, is_once: bool, sizes: list[int]
    ) -> None:
        compiled = re.compile(pattern)
        self.find = compiled.match if is_match else compiled.search
        self.stop = re.compile(stop).search if stop else None
        self.has_value = has_value and compiled.groups > 0
        self.is_once = is_once
        self.max_line, self.max_shown = sizes

    def match(self, block: bytes) -> dict[str, Any]:
        """Match the lines of a block in order; see `core.log_rule_tracker.Matches` for the answer."""
        find, stop, max_line = self.find, self.stop, self.max_line
        count, last = 0, ""
        values: list[float] = []
        for line in block.decode("utf-8", "replace").replace("\r", "\n").split("\n"):
            line = line[:max_line]
            if not line:
                continue
            if stop is not None and stop(line):
                return {"count": count, "line": last[: self.max_shown], "values": values, "is_over": True}
            found = find(line)
            if found is None:
                continue
            count += 1
            last = line
            if self.has_value:
                values += number(found.group(1))
            if self.is_once:
                break
        return {"count": count, "line": last[: self.max_shown], "values": values}


def number(text: str | None) -> list[float]:
    """Give the number that a group captured as a list of one; an empty list for NaN or text."""
    try:
        value = float(text or "")
    except ValueError:
        return []
    return [] if math.isnan(value) else [value]


def read(size: int) -> bytes:
    """Read this many bytes; exits if the agent is gone."""
    parts = []
    while size:
        data = os.read(SOCKET, min(size, 1 << 20))
        if not data:
            os._exit(0)
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


def send_frame(what: object) -> None:
    """Send one frame."""
    body = json.dumps(what).encode()
    data = HEADER.pack(len(body)) + body
    while data:
        data = data[os.write(SOCKET, data) :]


def on_timer(*_: object) -> None:
    """Handle the timer's signal."""
    raise TooSlow


class Rules:
    """All rules; each is compiled with its first lines, so that one which takes too long keeps no other from being matched."""

    def __init__(self, arguments: list[list[Any]], limit_s: float) -> None:
        self._arguments = arguments
        self._limit_s = limit_s
        self._compiled: dict[int, CompiledRule] = {}

    def match(self, index: int, block: bytes) -> dict[str, Any]:
        """Match the lines of a block. A rule that takes too long gives a sentence in place of matches."""
        doing = "to compile"
        try:
            if index not in self._compiled:
                self._compiled[index] = self._in_time(CompiledRule, *self._arguments[index])
            doing = "on a few lines"
            matches: dict[str, Any] = self._in_time(self._compiled[index].match, block)
            return matches
        except TooSlow:
            return {"refused": f"its pattern took more than {self._limit_s:g} s {doing}"}
        except (MemoryError, RecursionError) as error:
            return {"refused": repr(error)}

    def _in_time(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function within the limit of CPU time. Raises TooSlow."""
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, self._limit_s)
            return function(*arguments)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def main() -> None:
    """Answer requests until the agent is gone."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    setup = json.loads(read(HEADER.unpack(read(HEADER.size))[0]))
    rules = Rules(setup["rules"], setup["limit_s"])
    signal.signal(signal.SIGVTALRM, on_timer)
    send_frame("ready")
    while True:
        body = read(HEADER.unpack(read(HEADER.size))[0])
        answers = []
        at = 0
        while at < len(body):
            index, size = REQUEST.unpack_from(body, at)
            at += REQUEST.size
            answers.append(rules.match(index, body[at : at + size]))
            at += size
        send_frame(answers)


if __name__ == "__main__":
    try:
        main()
    except ConnectionError:  # the agent is gone or has closed the socket
        os._exit(0)
