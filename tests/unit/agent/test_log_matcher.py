"""The agent's side of the matcher process: its limits of time, its end, and what is said to it and by it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
from tests.patience import PATIENCE_S

from elastipod_agent.core.log_lines import MAX_LINE_BYTES
from elastipod_agent.core.log_rule_tracker import MAX_LINE_SHOWN, Matches
from elastipod_agent.core.log_rules import LogRule
from elastipod_agent.workers import log_matcher, matcher_process
from elastipod_agent.workers.log_matcher import Matcher, MatcherGone, MatcherStuck


class Child:
    """A process that ends only when the test says so."""

    pid = 4711

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.signals: list[int] = []

    def send(self, number: int) -> None:
        self.signals.append(number)


def matcher(child: Child | None = None) -> Matcher:
    reaper: Any = None
    made = Matcher(reaper, {}, ())
    held: Any = child
    made._child = held
    return made


async def test_a_process_that_does_not_end_is_killed_and_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_matcher, "_END_S", 0.01)
    child = Child()
    closing = matcher(child)
    closing._socket, other = socket.socketpair()
    with other:
        await asyncio.wait_for(closing.close(), PATIENCE_S)
        assert other.recv(1) == b"", "its socket is closed"
    assert child.signals == [signal.SIGKILL]
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_one_that_ends_is_waited_for() -> None:
    child = Child()
    task = asyncio.ensure_future(matcher(child).close())
    for _ in range(5):
        await asyncio.sleep(0)
    assert (child.signals, task.done()) == ([signal.SIGKILL], False)
    child.ended.set()
    await asyncio.wait_for(task, PATIENCE_S)


async def test_one_that_starts_too_late_is_ended_and_one_that_never_started_is_not() -> None:
    loop, child = asyncio.get_running_loop(), Child()
    closed, spawned, failed, cancelled = matcher(), loop.create_future(), loop.create_future(), loop.create_future()
    spawned.set_result(child)
    failed.set_exception(OSError())
    cancelled.cancel()
    closed._end_if_closed(spawned)
    assert child.signals == [], "it is wanted"
    await closed.close()
    for each in (spawned, failed, cancelled):
        closed._end_if_closed(each)
    assert child.signals == [signal.SIGKILL]


# ---- limits


class Asked:
    """A process that never answers. cpu_s: its processor time at each look, the last one from then on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cpu_s: list[float]) -> None:
        self.looks = 0
        self.cancelled = False
        self._cpu_s = cpu_s
        monkeypatch.setattr(log_matcher, "_POLL_S", 0.001)
        monkeypatch.setattr(log_matcher, "_cpu_s", self._look)
        self.matcher = matcher(Child())
        monkeypatch.setattr(self.matcher, "_send_and_receive", self._never)

    def _look(self, pid: int) -> float:
        assert pid == Child.pid
        self.looks += 1
        return self._cpu_s[min(self.looks, len(self._cpu_s)) - 1]

    async def _never(self, body: bytes) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


async def test_what_computes_for_too_long_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is counted from the first look on: it has started before."""
    asked = Asked(monkeypatch, [100.0, 100.0, 103.0, 104.0, 104.5])
    with pytest.raises(MatcherStuck, match="its pattern took too long on a line and could not be interrupted"):
        await asked.matcher.ask([(0, b"line")])
    assert (asked.looks, asked.cancelled) == (5, True)


async def test_what_sleeps_for_too_long_is_stuck_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, [1.0])
    monkeypatch.setattr(log_matcher, "_GIVE_UP_AFTER_S", 0.0045)
    with pytest.raises(MatcherStuck):
        await asked.matcher.ask([(0, b"line")])
    assert (asked.looks, asked.cancelled) == (1 + 5, True)


@pytest.mark.parametrize("error", [BrokenPipeError(), EOFError()])
async def test_a_process_that_is_gone_is_told_apart(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    asked = Asked(monkeypatch, [1.0])

    async def broken(_: bytes) -> None:
        raise error

    monkeypatch.setattr(asked.matcher, "_send_and_receive", broken)
    with pytest.raises(MatcherGone, match="the matcher ended each time while it matched this pattern"):
        await asked.matcher.ask([(0, b"line")])


def test_the_processor_time_of_a_process_that_is_gone_is_none() -> None:
    while time.process_time() < 0.05:  # a process that has just been forked has used none
        pass
    assert log_matcher._cpu_s(os.getpid()) > 0
    assert log_matcher._cpu_s(1 << 30) == 0


# ---- what is said


def test_a_rule_as_the_process_gets_it() -> None:
    sizes = [MAX_LINE_BYTES, MAX_LINE_SHOWN]
    plain = LogRule(name="r", log_pattern="loss (.*)")
    assert log_matcher._rule_arguments(plain) == ["loss (.*)", None, False, False, False, sizes]
    measured = LogRule(name="r", log_pattern=".*x", stop_pattern="end", metric_threshold=0, operator="gt")
    assert log_matcher._rule_arguments(measured) == [".*x", "end", True, True, False, sizes]
    for half in ({"metric_threshold": 1}, {"operator": "gt"}, {"fault_on_match": True}):
        given: dict[str, Any] = half
        arguments = log_matcher._rule_arguments(LogRule(name="r", log_pattern="x", **given))
        assert arguments[3:5] == [False, "fault_on_match" in half]


def test_an_answer_is_matches_or_a_sentence() -> None:
    answer = {"count": 3, "line": "l", "values": [1.0, 2.0]}
    assert log_matcher._parse_matches(answer) == Matches(count=3, line="l", values=(1.0, 2.0), is_over=False)
    assert log_matcher._parse_matches({**answer, "is_over": True}).is_over  # type: ignore[union-attr]
    assert log_matcher._parse_matches({"refused": "too slow"}) == "too slow"


# ---- the process itself


class Process:
    """A matcher process with rules, which takes requests until it is closed."""

    def __init__(self, patterns: list[str]) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(PATIENCE_S)
        command = [sys.executable, "-I", "-S", matcher_process.__file__]
        with theirs:
            self._process = subprocess.Popen(command, stdout=theirs.fileno())
        rules = [log_matcher._rule_arguments(LogRule(name="r", log_pattern=each)) for each in patterns]
        assert self._call(json.dumps({"limit_s": log_matcher.LIMIT_S, "rules": rules}).encode()) == "ready"

    def ask(self, *requests: tuple[int, bytes]) -> list[Any]:
        head = matcher_process.REQUEST
        answers: list[Any] = self._call(b"".join(head.pack(at, len(lines)) + lines for at, lines in requests))
        return answers

    def close(self) -> None:
        self._socket.close()
        assert self._process.wait(PATIENCE_S) == 0

    def _call(self, body: bytes) -> Any:
        self._socket.sendall(matcher_process.HEADER.pack(len(body)) + body)
        with self._socket.makefile("rb") as file:
            (size,) = matcher_process.HEADER.unpack(file.read(matcher_process.HEADER.size))
            return json.loads(file.read(size))


def test_rules_that_are_too_slow_keep_no_other_from_being_matched() -> None:
    """One takes seconds to compile: it has hundreds of sets of characters beyond U+00FF. Another one takes seconds on a line."""
    compiles_slowly = "(?i)" + "[Ā-\uffff]" * 400
    process = Process([compiles_slowly, "loss", "(a+)+$"])
    lines = b"loss 1\n" + b"a" * 40 + b"b\n"
    for _ in range(2):
        first, second, third = process.ask((0, lines), (1, lines), (2, lines))
        assert first == {"refused": "its pattern took more than 0.5 s to compile"}
        assert second == {"count": 1, "line": "loss 1", "values": []}
        assert third == {"refused": "its pattern took more than 0.5 s on a few lines"}
    process.close()
