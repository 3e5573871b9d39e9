"""The agent's side of the matcher process: starts it, sends requests, limits its time, and ends it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from elastipod_agent.core.log_lines import MAX_LINE_BYTES
from elastipod_agent.core.log_literals import has_leading_wildcard
from elastipod_agent.core.log_rule_tracker import MAX_LINE_SHOWN, Matches
from elastipod_agent.core.log_rules import LogRule
from elastipod_agent.workers import matcher_process
from elastipod_agent.workers.reaper import ChildProcess, Reaper

LIMIT_S = 0.5  # CPU time for one rule's lines, and to compile it, enforced by the matcher itself
_KILL_AFTER_S = 4.0  # CPU time without an answer: the matcher failed to enforce the limit
_GIVE_UP_AFTER_S = 60.0  # time without an answer, whatever the matcher is doing
_POLL_S = 1.0
_END_S = 5.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class MatcherGone(Exception):
    """The matcher ended or was killed."""


class MatcherStuck(Exception):
    """The matcher gave no answer in time and was killed."""


class Matcher:
    """One matcher process. Call `start` first and `close` in any case; one request at a time."""

    def __init__(self, reaper: Reaper, environ: Mapping[str, str], rules: Sequence[LogRule]) -> None:
        self._reaper = reaper
        self._environ = environ
        self._rules = rules
        self._child: ChildProcess | None = None
        self._socket: socket.socket | None = None
        self._is_closed = False

    async def start(self) -> None:
        """Start the process and wait until it has the rules. Raises OSError, MatcherGone, MatcherStuck."""
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        command = [sys.executable, "-I", "-S", str(Path(matcher_process.__file__))]
        spawning = asyncio.ensure_future(self._reaper.spawn(command, self._environ, stdout=theirs.fileno(), stderr=2))
        # A cancelled caller does not wait for an exec that hangs. The process then finds its socket closed and ends.
        spawning.add_done_callback(lambda _: theirs.close())
        spawning.add_done_callback(self._end_if_closed)
        self._child = await asyncio.shield(spawning)
        setup = {"limit_s": LIMIT_S, "rules": [_rule_arguments(rule) for rule in self._rules]}
        await self._call(json.dumps(setup).encode())

    async def ask(self, requests: Sequence[tuple[int, bytes]]) -> list[Matches | str]:
        """Match lines against the rules of these indexes. A rule whose pattern was too slow gets a sentence.

        Raises MatcherGone or MatcherStuck; the process cannot be used any more then.
        """
        head = matcher_process.REQUEST
        body = b"".join(part for index, lines in requests for part in (head.pack(index, len(lines)), lines))
        return [_parse_matches(answer) for answer in await self._call(body)]

    async def close(self) -> None:
        """End the process, if there is one, and wait for it."""
        self._is_closed = True
        if self._socket is not None:
            self._socket.close()
        if self._child is not None:
            self._child.send(signal.SIGKILL)
            ended = asyncio.ensure_future(self._child.ended.wait())
            await asyncio.wait([ended], timeout=_END_S)
            ended.cancel()

    def _end_if_closed(self, spawning: asyncio.Future[ChildProcess]) -> None:
        if self._is_closed and not spawning.cancelled() and spawning.exception() is None:
            spawning.result().send(signal.SIGKILL)

    async def _call(self, body: bytes) -> Any:
        assert self._child is not None
        task = asyncio.ensure_future(self._send_and_receive(body))
        pid, used_s, waited_s = self._child.pid, 0.0, 0.0
        try:
            while True:
                await asyncio.wait([task], timeout=_POLL_S)
                if task.done():
                    return task.result()
                waited_s += _POLL_S
                used_s = used_s or _cpu_s(pid)
                if _cpu_s(pid) - used_s > _KILL_AFTER_S or waited_s >= _GIVE_UP_AFTER_S:
                    raise MatcherStuck("its pattern took too long on a line and could not be interrupted")
        except (OSError, EOFError) as error:
            raise MatcherGone("the matcher ended each time while it matched this pattern") from error
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, OSError, EOFError):
                await task

    async def _send_and_receive(self, body: bytes) -> Any:
        assert self._socket is not None
        header = matcher_process.HEADER
        await asyncio.get_running_loop().sock_sendall(self._socket, header.pack(len(body)) + body)
        (size,) = header.unpack(await self._receive(header.size))
        return json.loads(await self._receive(size))

    async def _receive(self, size: int) -> bytes:
        assert self._socket is not None
        parts: list[bytes] = []
        while size:
            data = await asyncio.get_running_loop().sock_recv(self._socket, size)
            if not data:
                raise EOFError
            parts.append(data)
            size -= len(data)
        return b"".join(parts)


def _parse_matches(answer: dict[str, Any]) -> Matches | str:
    if "refused" in answer:
        return str(answer["refused"])
    is_over = answer.get("is_over", False)
    return Matches(count=answer["count"], line=answer["line"], values=tuple(answer["values"]), is_over=is_over)


def _rule_arguments(rule: LogRule) -> list[Any]:
    has_value = rule.metric_threshold is not None and rule.operator is not None
    sizes = [MAX_LINE_BYTES, MAX_LINE_SHOWN]
    is_match = has_leading_wildcard(rule.log_pattern)
    return [rule.log_pattern, rule.stop_pattern, is_match, has_value, rule.fault_on_match, sizes]


def _cpu_s(pid: int) -> float:
    """Give the CPU time that a process has used; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
